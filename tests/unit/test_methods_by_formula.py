"""Scores of published methods against their formulas, written out pair by pair in float64, at odd sizes.

The goldens have one size and one draw; here are one frame, one word, one pair and more texts than videos. The
settings are those of the published code, where padding holds numbers and takes part.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from features import random_interaction, random_text, random_video
from gare.interaction import INTERACTIONS
from gare.interaction.peers.mean_max_sim import mean_max_sim
from gare.interaction.peers.ts2_net import weighted_cosines

DIM = 16
SIZES = [(1, 1, 1, 1), (3, 2, 1, 4), (2, 5, 7, 1), (4, 3, 5, 6)]
"""Texts, videos, frames, words."""
sizes = pytest.mark.parametrize("size", SIZES, ids=str)


def scene(size, name=None, **settings):
    texts, videos, frames, words = size
    generator = torch.Generator().manual_seed(sum(size))
    text = random_text(generator, texts, words, DIM)
    video = random_video(generator, videos, frames, DIM)
    if name is None:
        return text, video
    return random_interaction(generator, INTERACTIONS[name].Config(**settings), DIM), text, video


def by_pair(text, video, score):
    return torch.stack([torch.stack([score(i, j) for j in range(len(video))]) for i in range(len(text))])


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


def cosine(x, y):
    return (unit(x) * unit(y)).sum()


def token_score(words_WD, word_mask, frames_FD, frame_mask, word_share, frame_share):
    """0.2 of METHODS.md: a masked pair of tokens has the cosine 0."""
    cosines_WF = unit(words_WD) @ unit(frames_FD).mT * word_mask[:, None] * frame_mask
    by_words = (word_share * cosines_WF.amax(dim=1)).sum()
    return (by_words + (frame_share * cosines_WF.amax(dim=0)).sum()) / 2


def net_share(tokens_ND, mask_N, hidden, output):
    logits_N = (torch.relu(tokens_ND @ hidden.weight.mT + hidden.bias) @ output.weight.mT).squeeze(-1)
    exponents_N = logits_N.exp() * mask_N
    return exponents_N / exponents_N.sum()


@sizes
@pytest.mark.parametrize("name", ["token_wise", "neighbor_retr", "hbi", "diffusion_ret"])
def test_weighted_token_interaction(size, name):
    method, text, video = scene(size, name, zero_padding=True)

    def score(i, j):
        word_share = net_share(text.words_TWD[i], text.mask_TW[i], method.words_hidden, method.words_output)
        frame_share = net_share(
            video.frames_VFD[j], video.mask_VF[j], method.frames_hidden, method.frames_output
        )
        return token_score(
            text.words_TWD[i], text.mask_TW[i], video.frames_VFD[j], video.mask_VF[j], word_share, frame_share
        )

    torch.testing.assert_close(method.score(text, video), by_pair(text, video, score))


@sizes
def test_token_interaction_without_weights(size):
    method, text, video = scene(size, "token_wise", zero_padding=True, weighting="uniform")
    assert not list(method.parameters())

    def score(i, j):
        word_mask, frame_mask = text.mask_TW[i].double(), video.mask_VF[j].double()
        shares = word_mask / word_mask.sum(), frame_mask / frame_mask.sum()
        return token_score(text.words_TWD[i], word_mask, video.frames_VFD[j], frame_mask, *shares)

    torch.testing.assert_close(method.score(text, video), by_pair(text, video, score))


def late_pool(text, video, i, j, temperature):
    """0.3: the softmax runs over all frames, then padding is set to zero without renormalising."""
    weights_F = (video.frames_VFD[j] @ text.text_TD[i] / temperature).softmax(dim=0) * video.mask_VF[j]
    return weights_F @ video.frames_VFD[j]


@sizes
@pytest.mark.parametrize("num_concepts", [2, 8])
def test_dicosa(size, num_concepts):
    method, text, video = scene(size, "dicosa", num_concepts=num_concepts, late_mask=True)

    def score(i, j):
        pooled_D, total = late_pool(text, video, i, j, 3.0), 0.0
        for own, other in zip(text.text_TD[i].chunk(num_concepts), pooled_D.chunk(num_concepts), strict=True):
            weight = method.output(torch.relu(method.hidden(torch.cat([own, other]))))[0]
            total = total + weight * cosine(own, other)
        return total

    torch.testing.assert_close(method.score(text, video), by_pair(text, video, score))


@sizes
def test_emcl_over_the_block(size):
    method, text, video = scene(size, "emcl", num_bases=5, over_block=True, late_mask=True)
    pooled_TVD = by_pair(text, video, lambda i, j: late_pool(text, video, i, j, 3.0))
    rows_ND = torch.cat([pooled_TVD.flatten(0, 1), text.text_TD])
    basis_NK = method.basis_1K.repeat(len(rows_ND), 1)
    for _ in range(9):
        share_DK = (rows_ND.mT @ basis_NK).softmax(dim=1)
        share_DK = share_DK / (1e-6 + share_DK.sum(dim=0))
        basis_NK = rows_ND @ share_DK
        basis_NK = basis_NK / (1e-6 + basis_NK.norm(dim=0))
    rows_ND = rows_ND + 3 * basis_NK @ share_DK.mT
    moved_TVD, moved_TD = rows_ND[: -len(text)].view_as(pooled_TVD), rows_ND[-len(text) :]
    expected = by_pair(text, video, lambda i, j: cosine(moved_TD[i], moved_TVD[i, j]))
    torch.testing.assert_close(method.score(text, video), expected, rtol=1e-6, atol=1e-9)


def pooled_by(net, query_D, frames_FD, num_heads):
    """0.6, over real frames."""
    query_D, context_FD = net.norm1(query_D), net.norm1(frames_FD)
    parts = []
    for q, k, v in zip(
        net.query(query_D).chunk(num_heads),
        net.key(context_FD).chunk(num_heads, dim=1),
        net.value(context_FD).chunk(num_heads, dim=1),
        strict=True,
    ):
        parts.append((k @ q / math.sqrt(len(q))).softmax(dim=0) @ v)
    hidden_D = net.norm2(net.out(torch.cat(parts)))
    return net.norm3(hidden_D + net.residual(hidden_D))


@sizes
@pytest.mark.parametrize("num_heads", [1, 2, 8])
def test_xpool(size, num_heads):
    method, text, video = scene(size, "xpool", num_heads=num_heads)

    def score(i, j):
        frames_FD = video.frames_VFD[j][video.mask_VF[j]]
        return cosine(text.text_TD[i], pooled_by(method.attention, text.text_TD[i], frames_FD, num_heads))

    expected = by_pair(text, video, score)
    torch.testing.assert_close(method.score_pairs(text, video).scores_TV, expected)
    torch.testing.assert_close(method.score(text, video), expected)


@sizes
def test_head_of_ts2_net(size):
    text, video = scene(size)

    def score(i, j):
        mask_F = video.mask_VF[j].double()
        cosines_F = unit(video.frames_VFD[j]) @ unit(text.text_TD[i])
        relative_F = cosines_F * mask_F / (cosines_F * mask_F).norm()
        weights_F = (4 * relative_F).exp() * mask_F
        return (weights_F / weights_F.sum() * cosines_F).sum()

    found = weighted_cosines(text.text_TD, video.frames_VFD, video.mask_VF, 4.0)[0]
    torch.testing.assert_close(found, by_pair(text, video, score))


@sizes
def test_mean_max_sim(size):
    text, video = scene(size)

    def score(i, j):
        words_WD, frames_FD = text.words_TWD[i][text.mask_TW[i]], video.frames_VFD[j][video.mask_VF[j]]
        return (unit(words_WD) @ unit(frames_FD).mT).amax(dim=1).mean()

    found = mean_max_sim(text.words_TWD, text.mask_TW, video.frames_VFD, video.mask_VF)
    torch.testing.assert_close(found, by_pair(text, video, score))


@sizes
def test_mean_of_unit_frames(size):
    method, text, video = scene(size, "clip4clip", head="mean")

    def score(i, j):
        return cosine(text.text_TD[i], unit(video.frames_VFD[j][video.mask_VF[j]]).mean(dim=0))

    torch.testing.assert_close(method.score(text, video), by_pair(text, video, score))


@sizes
@pytest.mark.parametrize("weighting", ["uniform", "learned"])
def test_dmae(size, weighting):
    method, text, video = scene(size, "dmae", zero_padding=True, weighting=weighting, max_frames=7)

    def level(tokens_ND, mask_N, share_N, j):
        frames_FD, frame_mask = unit(video.frames_VFD[j]), video.mask_VF[j].double()
        cosines_NF = unit(tokens_ND) @ frames_FD.mT * mask_N[:, None] * frame_mask
        alike_FF = frames_FD @ frames_FD.mT * frame_mask[:, None] * frame_mask
        alike_FF.fill_diagonal_(0)
        found = []
        for row_F in cosines_NF:
            best = int(row_F.argmax())
            other = int(alike_FF[best].argmax())
            found.append(row_F[best] + 0.5 * alike_FF[best, other] * row_F[other])
        frame_share = frame_mask / frame_mask.sum()
        if weighting == "learned":
            frame_share = (frames_FD @ method.frame_weight.weight[0]).exp() * frame_mask
            frame_share = frame_share / frame_share.sum()
        by_tokens = (share_N * torch.stack(found)).sum()
        return (by_tokens + (frame_share * cosines_NF.amax(dim=0)).sum()) / 2

    def score(i, j):
        mask_W = text.mask_TW[i].double()
        share_W = mask_W / mask_W.sum()
        if weighting == "learned":
            share_W = (unit(text.words_TWD[i]) @ method.word_weight.weight[0]).exp() * mask_W
            share_W = share_W / share_W.sum()
        sentence = level(text.text_TD[i : i + 1], mask_W[:1], torch.ones(1).double(), j)
        return (sentence + level(text.words_TWD[i], mask_W, share_W, j)) / 2

    torch.testing.assert_close(method.score(text, video), by_pair(text, video, score))


@sizes
def test_tmass(size):
    method, text, video = scene(size, "tmass", max_frames=7, dropout=0.0)
    generator = torch.Generator().manual_seed(1)
    noise = torch.rand(len(text), len(video), 3, DIM, generator=generator, dtype=torch.float64)

    def score(i, j):
        real = video.mask_VF[j]
        pooled_D = pooled_by(method.attention, text.text_TD[i], video.frames_VFD[j][real], 1)
        cosines_F = F.pad(unit(video.frames_VFD[j]) @ unit(text.text_TD[i]) * real, (0, 7 - len(real)))
        radius_D = method.radius(cosines_F).exp()
        points = [text.text_TD[i] + noise[i, j, draw] * radius_D for draw in range(3)]
        return torch.stack([cosine(point, pooled_D) for point in points]).max()

    found = method.best_scores(*method.prepare(text, video), noise)
    torch.testing.assert_close(found, by_pair(text, video, score))
