"""X-Pool and token-wise interaction held to loops over single pairs, in plain numbers."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from features import variants
from gare.interaction import TokenWiseConfig, XPoolConfig
from interaction_laws import random_scene

SEEDS = st.integers(0, 2**31 - 1)


def layer_norm(x, norm):
    centred = [a - sum(x) / len(x) for a in x]
    scale = math.sqrt(sum(a * a for a in centred) / len(x) + norm.eps)
    return [
        a / scale * w + b for a, w, b in zip(centred, norm.weight.tolist(), norm.bias.tolist(), strict=True)
    ]


def linear(x, layer):
    bias = [0.0] * layer.out_features if layer.bias is None else layer.bias.tolist()
    return [dot(row, x) + b for row, b in zip(layer.weight.tolist(), bias, strict=True)]


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def cosine(a, b):
    return dot(a, b) / math.sqrt(dot(a, a) * dot(b, b))


def softmax(x):
    largest = max(x)
    powers = [math.exp(a - largest) for a in x]
    return [a / sum(powers) for a in powers]


def xpool_pair(text, frames, net):
    """X-Pool for one text and the real frames of one video; also the attention of each head."""
    query = linear(layer_norm(text, net.norm1), net.query)
    keys = [linear(layer_norm(frame, net.norm1), net.key) for frame in frames]
    values = [linear(layer_norm(frame, net.norm1), net.value) for frame in frames]
    width = len(text) // net.num_heads
    attended, attention = [], []
    for head in range(net.num_heads):
        part = slice(head * width, (head + 1) * width)
        weights = softmax([dot(query[part], key[part]) / math.sqrt(width) for key in keys])
        attention.append(weights)
        attended += [
            sum(w * value[i] for w, value in zip(weights, values, strict=True))
            for i in range(part.start, part.stop)
        ]
    hidden = layer_norm(linear(attended, net.out), net.norm2)
    pooled = layer_norm([h + r for h, r in zip(hidden, linear(hidden, net.residual), strict=True)], net.norm3)
    return cosine(text, pooled), attention


def token_wise_pair(words, frames, net):
    """WTI for the real words of one text and the real frames of one video; also what each frame adds."""

    def weights(tokens, hidden, output):
        return softmax([linear([max(0.0, h) for h in linear(t, hidden)], output)[0] for t in tokens])

    of_words = weights(words, net.words_hidden, net.words_output)
    of_frames = weights(frames, net.frames_hidden, net.frames_output)
    text_side = sum(w * max(cosine(word, f) for f in frames) for w, word in zip(of_words, words, strict=True))
    shares = [w * max(cosine(word, f) for word in words) for w, f in zip(of_frames, frames, strict=True)]
    return (text_side + sum(shares)) / 2, shares


def real(tokens, mask):
    return tokens[mask].tolist()


def check_loop(scene, one_pair):
    """`one_pair` gives a score and the share of each real frame."""
    text, video = scene.text, scene.video
    expected = torch.empty(len(text), len(video), dtype=torch.float64)
    pool_TVF = scene.interaction.frame_weights(text, video).pool_TVF
    for t in range(len(text)):
        for v in range(len(video)):
            expected[t, v], shares = one_pair(t, v)
            is_real = video.mask_VF[v]
            torch.testing.assert_close(
                pool_TVF[t, v][is_real], torch.tensor(shares, dtype=torch.float64), atol=1e-10, rtol=0
            )
            assert not pool_TVF[t, v][~is_real].any()
    for scores in (
        scene.interaction.score_pairs(text, video).scores_TV,
        scene.interaction.score(text, video),
    ):
        torch.testing.assert_close(scores, expected, atol=1e-9, rtol=0)


@given(SEEDS, st.sampled_from(variants(XPoolConfig)))
def test_xpool_is_a_loop_over_pairs(seed, config):
    scene = random_scene(seed, config)
    text, video, net = scene.text, scene.video, scene.interaction.attention
    attention_TVHF = scene.interaction.frame_weights(text, video).attention_TVHF

    def one_pair(t, v):
        score, attention = xpool_pair(
            text.text_TD[t].tolist(), real(video.frames_VFD[v], video.mask_VF[v]), net
        )
        attention = torch.tensor(attention, dtype=torch.float64)
        torch.testing.assert_close(attention_TVHF[t, v][:, video.mask_VF[v]], attention)
        return score, attention.mean(dim=0).tolist()

    check_loop(scene, one_pair)


@given(SEEDS)
def test_token_wise_is_a_loop_over_pairs(seed):
    scene = random_scene(seed, TokenWiseConfig())
    text, video = scene.text, scene.video

    def one_pair(t, v):
        words, frames = (
            real(text.words_TWD[t], text.mask_TW[t]),
            real(video.frames_VFD[v], video.mask_VF[v]),
        )
        return token_wise_pair(words, frames, scene.interaction)

    check_loop(scene, one_pair)
