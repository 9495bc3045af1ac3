"""Cross-attention pooling and token-wise interaction: held to loops over single pairs, and to laws."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from features import random_text, random_video
from gare import Interaction, TextFeatures, VideoFeatures
from gare.model.pooling import build_pooling
from gare.scoring import dense, factored, score_cards

POOLINGS = ("cross_attention", "token_wise")


def random_net(generator, pooling, dim, num_heads=1, dtype=torch.float64):
    """Weights large enough that every one of them matters."""
    net = build_pooling(pooling, dim, num_heads=num_heads, dropout=0.0).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.3)
            if name.startswith("norm") and name.endswith("weight"):
                parameter.add_(1)
    return net


@st.composite
def scenes(draw, dtype=torch.float64):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    num_heads, pooling = draw(st.sampled_from([1, 2])), draw(st.sampled_from(POOLINGS))
    dim = num_heads * draw(st.integers(2, 6)) * 2
    size = st.integers(1, 6)
    text = random_text(generator, draw(size), draw(size), dim, dtype)
    video = random_video(generator, draw(size), draw(size), dim, dtype)
    return text, video, random_net(generator, pooling, dim, num_heads, dtype), Interaction(pooling=pooling)


# --- references, a pair at a time, in plain numbers ---------------------------------------------------------


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


def cross_attention_pair(text, frames, net):
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


@given(scenes())
def test_scores_are_those_of_a_loop_over_pairs(scene):
    text, video, net, interaction = scene
    expected = torch.empty(len(text), len(video), dtype=torch.float64)
    frame_weights = factored.frame_weights(text, video, net, interaction)
    for t in range(len(text)):
        for v in range(len(video)):
            frames = real(video.frames_VFD[v], video.mask_VF[v])
            if interaction.pooling == "cross_attention":
                score, attention = cross_attention_pair(text.text_TD[t].tolist(), frames, net)
                found = frame_weights.attention_TVHF[t, v][:, video.mask_VF[v]]
                torch.testing.assert_close(found, torch.tensor(attention, dtype=torch.float64))
                shares = torch.tensor(attention, dtype=torch.float64).mean(dim=0).tolist()
            else:
                words = real(text.words_TWD[t], text.mask_TW[t])
                score, shares = token_wise_pair(words, frames, net)
            expected[t, v] = score
            pooled = frame_weights.pool_TVF[t, v]
            torch.testing.assert_close(
                pooled[video.mask_VF[v]], torch.tensor(shares, dtype=torch.float64), atol=1e-10, rtol=0
            )
            assert not pooled[~video.mask_VF[v]].any()
    for score in (dense.score, factored.score):
        torch.testing.assert_close(score(text, video, net, interaction), expected, atol=1e-9, rtol=0)


@given(scenes(torch.float32))
def test_float32_is_close_to_the_reference(scene):
    text, video, net, interaction = scene
    actual = factored.score(text, video, net, interaction)
    torch.testing.assert_close(actual, dense.score(text, video, net, interaction), atol=2e-5, rtol=0)


@given(scenes(), st.integers(1, 4), st.integers(1, 4))
def test_blocks_and_cards_change_nothing(scene, text_block, video_block):
    text, video, net, interaction = scene
    expected = factored.score(text, video, net, interaction)
    blocks = {"text_block": text_block, "video_block": video_block}
    cards = score_cards(video, net, interaction)
    for videos in (video, cards):
        actual = factored.score(text, videos, net, interaction, **blocks)
        torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(
        dense.score(text, video, net, interaction, **blocks), expected, atol=1e-10, rtol=0
    )
    assert len(cards[1:]) == len(video) - 1


@given(scenes(), st.integers(1, 4), st.sampled_from([0.0, 1e6, float("nan"), float("inf")]))
def test_padding_of_any_content_changes_nothing(scene, num_padding, content):
    text, video, net, interaction = scene

    def pad(tokens, mask):
        rows = len(mask)
        return (
            torch.cat([tokens, torch.full((rows, num_padding, tokens.shape[2]), content).to(tokens)], dim=1),
            torch.cat([mask, torch.zeros(rows, num_padding, dtype=torch.bool)], dim=1),
        )

    padded_text = TextFeatures(text.text_TD, *pad(text.words_TWD, text.mask_TW))
    padded_video = VideoFeatures(*pad(video.frames_VFD, video.mask_VF))
    for score in (dense.score, factored.score):
        expected = score(text, video, net, interaction)
        actual = score(padded_text, padded_video, net, interaction)
        torch.testing.assert_close(actual, expected, atol=1e-10, rtol=0)


@given(scenes(), st.randoms(use_true_random=False))
def test_permuting_videos_permutes_columns(scene, random):
    text, video, net, interaction = scene
    order = random.sample(range(len(video)), len(video))
    shuffled = VideoFeatures(video.frames_VFD[order], video.mask_VF[order])
    expected = factored.score(text, video, net, interaction)[:, order]
    torch.testing.assert_close(factored.score(text, shuffled, net, interaction), expected, atol=1e-12, rtol=0)


@given(scenes())
def test_a_pair_does_not_depend_on_its_batch_mates(scene):
    text, video, net, interaction = scene
    alone = factored.score(text[-1:], video[-1:], net, interaction)
    together = factored.score(text, video, net, interaction)[-1:, -1:]
    torch.testing.assert_close(alone, together, atol=1e-12, rtol=0)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_gradients_are_the_same_whole_and_in_blocks(pooling):
    generator = torch.Generator().manual_seed(5)
    text, video = random_text(generator, 3, 4, 16), random_video(generator, 4, 3, 16)
    net, interaction = random_net(generator, pooling, 16), Interaction(pooling=pooling)
    upstream = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    inputs = [
        text.words_TWD if pooling == "token_wise" else text.text_TD,
        video.frames_VFD,
        *net.parameters(),
    ]
    for tensor in inputs:
        tensor.requires_grad_()

    def gradients(score, **blocks):
        return torch.autograd.grad((score(text, video, net, interaction, **blocks) * upstream).sum(), inputs)

    slow = gradients(dense.score)
    for fast in (gradients(factored.score), gradients(factored.score, text_block=2, video_block=2)):
        for expected, actual in zip(slow, fast, strict=True):
            assert torch.isfinite(expected).all()
            torch.testing.assert_close(actual, expected, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_the_wrong_module_is_refused(pooling):
    generator = torch.Generator().manual_seed(0)
    text, video = random_text(generator, 2, 2, 8), random_video(generator, 2, 2, 8)
    (other,) = set(POOLINGS) - {pooling}
    for net in (None, random_net(generator, other, 8)):
        for score in (dense.score, factored.score):
            with pytest.raises(ValueError, match="needs a module of its own"):
                score(text, video, net, Interaction(pooling=pooling))
