"""NeighborRetr and HBI, which merge tokens to train, against formulas written out in float64, owner by owner.

Numbers of pairs, words and frames are others than the goldens'; values and gradients are compared. Settings
are those of the published code, where padding holds numbers and takes part.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from features import random_text, random_video
from gare import PairScores
from gare.interaction.peers.banzhaf_game import banzhaf_interactions
from gare.interaction.peers.token_merging import MergeStage
from gare.objective import ObjectiveConfig, training_loss
from method_formulas import (
    DIM,
    SCALE,
    agree,
    by_pair,
    layer_norm,
    linear,
    nce,
    scene,
    share_of_net,
    token_score,
    unit,
)


def merge(stage: MergeStage, tokens_OND, mask_ON=None):
    """0.5, owner by owner."""
    number = tokens_OND.shape[1]
    mask_ON = torch.ones(tokens_OND.shape[:2], dtype=torch.bool) if mask_ON is None else mask_ON
    weight = stage.conv.weight
    normed = []
    for tokens_ND in tokens_OND:
        padded = F.pad(tokens_ND, (0, 0, 1, 1))
        mixed = sum(padded[place : place + number] @ weight[:, :, place].mT for place in range(3))
        normed.append(layer_norm(tokens_ND + mixed, stage.norm))
    distances = [torch.cdist(x.detach(), x.detach()) / math.sqrt(DIM) for x in normed]
    far = max(distance.max() for distance in distances)
    merged = []
    for x_ND, distance, mask_N in zip(normed, distances, mask_ON, strict=True):
        distance = distance.clone()
        distance[:, ~mask_N] = far + 1
        density = (-distance.sort(dim=1).values[:, :3].square().mean(dim=1)).exp() * mask_N
        peak = torch.stack(
            [
                distance[n][density > density[n]].min() if (density > density[n]).any() else distance.max()
                for n in range(number)
            ]
        )
        num_centres = max(math.ceil(number * stage.ratio), 1)
        centres = (peak * density).argsort(descending=True, stable=True)[:num_centres].tolist()
        member = [
            centres.index(n) if n in centres else int(torch.stack([distance[c, n] for c in centres]).argmin())
            for n in range(number)
        ]
        logits_N = linear(x_ND, stage.score).squeeze(-1).masked_fill(~mask_N, float("-inf"))
        merged_CD = torch.stack(
            [
                sum((logits_N[n].exp() * x_ND[n] for n in range(number) if member[n] == c), torch.zeros(DIM))
                / (sum(logits_N[n].exp() for n in range(number) if member[n] == c) + 1e-6)
                for c in range(num_centres)
            ]
        )
        normed_CD, normed_ND = (layer_norm(x, stage.attention_norm) for x in (merged_CD, x_ND))
        key, value = linear(normed_ND, stage.key_value).chunk(2, dim=-1)
        parts = []
        for q, k, v in zip(
            *(x.chunk(8, dim=-1) for x in (linear(normed_CD, stage.query), key, value)), strict=True
        ):
            parts.append((q @ k.mT / math.sqrt(q.shape[-1]) + logits_N).softmax(dim=-1) @ v)
        merged.append(merged_CD + linear(torch.cat(parts, dim=-1), stage.project))
    return torch.stack(merged)


def wti(method, text, video, i, j):
    words, frames = (text.words_TWD[i], text.mask_TW[i]), (video.frames_VFD[j], video.mask_VF[j])
    word_share = share_of_net(*words, method.words_hidden, method.words_output)
    return token_score(
        *words, word_share, *frames, share_of_net(*frames, method.frames_hidden, method.frames_output)
    )


def divergence(logits, wanted):
    """KL(wanted ‖ logits) as the mean over all elements."""
    p = wanted.softmax(dim=-1)
    return (p * (p.log() - logits.log_softmax(dim=-1))).sum() / p.numel()


def neighbor_loss(scores, centrality, number, temperature=3.0):
    total = 0.0
    for i, row in enumerate(scores):
        others = sorted((j for j in range(len(row)) if j != i), key=lambda j: -row[j].item())
        near, outside = others[:number], others[number:]

        def between(values, outside=outside):
            low, high = values[outside].min(), values[outside].max()
            return (values - low) / (high - low)

        relative = between(row) - between(centrality)
        share = (temperature * relative[near]).softmax(dim=0)
        log = row[[i, *near]].log_softmax(dim=0)
        total = total - (log[0] + (share * log[1:]).sum()) / (1 + share.sum())
    return total / len(scores)


def transport(scores):
    """50 rounds of Sinkhorn with marginals 1 / 2B, times 2B, mixed with the identity."""
    size = len(scores)
    plan = scores.detach().exp()
    for _ in range(50):
        plan = plan / plan.sum(dim=1, keepdim=True) / (2 * size)
        plan = plan / plan.sum(dim=0, keepdim=True) / (2 * size)
    return 0.7 * plan * 2 * size + 0.3 * torch.eye(size, dtype=scores.dtype)


@pytest.mark.parametrize(("pairs", "words", "frames", "number"), [(7, 13, 9, 2), (9, 17, 11, 4)])
def test_neighbor_retr(pairs, words, frames, number):
    options = {"zero_padding": True, "leaky_padding": True}
    method, text, video, generator = scene(
        "neighbor_retr", pairs=pairs, words=words, frames=frames, **options
    )
    bank_text = random_text(generator, 4, words, DIM)
    bank_video = random_video(generator, 4, frames, DIM)
    parts = method.training_parts(text, video, bank_text, bank_video)
    found = PairScores(method.score_pairs(text, video).scores_TV, None, parts)
    objective = ObjectiveConfig({**method.published_terms, "neighbor": {"num_neighbors": number}})
    ours = training_loss(found, SCALE, objective, text=text, video=video).terms

    scores = by_pair(pairs, lambda i, j: wti(method, text, video, i, j))
    text_TD, video_VD = (
        merge(stages[1], merge(stages[0], *tokens)).squeeze(1)
        for stages, tokens in (
            (method.text_stages, (text.words_TWD, text.mask_TW)),
            (method.video_stages, (video.frames_VFD, video.mask_VF)),
        )
    )
    merged = text_TD @ video_VD.mT

    def weights(merged_OD, tokens_OND):
        return (0.3 * (unit(merged_OD) @ unit(tokens_OND.flatten(0, 1)).mT).mean(dim=1)).exp()

    logits = SCALE * scores
    forth = -(weights(text_TD, text.words_TWD) * logits.log_softmax(dim=1).diagonal()).mean()
    back = -(weights(video_VD, video.frames_VFD) * logits.log_softmax(dim=0).diagonal()).mean()
    agree(ours["centrality"], (forth + back) / 2, method, text, video)
    uniform = [-(transport(x) * (3 * x).log_softmax(dim=1)).sum(dim=1).mean() for x in (merged, merged.mT)]
    agree(ours["uniform"], sum(uniform) / 2, method, text, video)
    hubs_V = torch.stack(
        [sum(wti(method, bank_text, video, m, j) for m in range(4)) / 4 for j in range(pairs)]
    )
    hubs_T = torch.stack(
        [sum(wti(method, text, bank_video, i, m) for m in range(4)) / 4 for i in range(pairs)]
    )
    adjusted = neighbor_loss(scores, hubs_V, number) + neighbor_loss(scores.mT, hubs_T, number)
    agree(ours["neighbor"], adjusted / 2, method, text, video)
    agreement = divergence(merged, scores) + divergence(merged.mT, scores.mT)
    agree(ours["level_agreement"], agreement / 2, method, text, video)


def estimated(net, grid_WF):
    """HBI's estimator, cell by cell."""

    def convolve(x_CWF, layer):
        words, frames = x_CWF.shape[1:]
        padded = F.pad(x_CWF, (1, 1, 1, 1))
        total = sum(
            torch.einsum("oc,cwf->owf", layer.weight[:, :, a, b], padded[:, a : a + words, b : b + frames])
            for a in range(3)
            for b in range(3)
        )
        return total + layer.bias[:, None, None]

    hidden = convolve(grid_WF[None], net.cnn1).relu()
    cells = hidden.flatten(1).mT
    cells = cells + ((cells @ net.Q) @ (cells @ net.K).mT).softmax(dim=-1) @ (cells @ net.V)
    return convolve(cells.mT.unflatten(1, grid_WF.shape), net.cnn2)[0]


@pytest.mark.parametrize("second_axis", ["words", "batch"])
@pytest.mark.parametrize(("pairs", "words", "frames"), [(4, 9, 9), (6, 11, 12)])
def test_hbi(pairs, words, frames, second_axis):
    options = {"zero_padding": True, "leaky_padding": True, "estimator_width": 3}
    method, text, video, _ = scene("hbi", pairs=pairs, words=words, frames=frames, **options)
    objective = ObjectiveConfig({**method.published_terms, "banzhaf": {"second_axis": second_axis}})
    ours = training_loss(method.train().score_pairs(text, video), SCALE, objective, text=text, video=video)

    scores = by_pair(pairs, lambda i, j: wti(method, text, video, i, j))
    sides = [(text.words_TWD, text.mask_TW), (video.frames_VFD, video.mask_VF)]
    levels, grids = [scores], []
    for index in range(3):
        (own, own_mask), (other, other_mask) = sides
        real = own_mask[:, :, None] & other_mask[:, None]
        cosines = unit(own) @ unit(other).mT * real
        found = torch.stack([estimated(method.estimators[index], grid) for grid in cosines]) * real
        with torch.no_grad():
            wanted = torch.stack([estimated(method.teacher, grid) for grid in cosines]) * real
        grids.append((found, wanted))
        if index == 2:
            break
        level = method.levels[index]
        masks = [mask if index == 0 else None for mask in (own_mask, other_mask)]
        merged = [merge(level.text_stage, own, masks[0]), merge(level.video_stage, other, masks[1])]
        sides = [(x, torch.ones(x.shape[:2], dtype=torch.bool)) for x in merged]

        def score(i, j, level=level, sides=tuple(sides)):
            words, frames = ((tokens[n], mask[n]) for (tokens, mask), n in zip(sides, (i, j), strict=True))
            word_share = share_of_net(*words, level.words_hidden, level.words_output)
            frame_share = share_of_net(*frames, level.frames_hidden, level.frames_output)
            return token_score(*words, word_share, *frames, frame_share)

        levels.append(by_pair(pairs, score))
    total = sum(nce(x) for x in levels)
    total = total + 2 * sum(divergence(x, scores) + divergence(x.mT, scores.mT) for x in levels[1:])
    order = (0, 2, 1) if second_axis == "words" else (2, 1, 0)
    for found, wanted in grids:
        total = total + divergence(found, wanted) + divergence(found.permute(order), wanted.permute(order))
    agree(ours.total, total, method, text, video)


def every_coalition(cosines_WF, word_logits, frame_logits):
    """The interaction by its definition, over all coalitions of the other players."""
    words, frames = cosines_WF.shape

    def worth(own, other):
        if not own or not other:
            return torch.zeros((), dtype=torch.float64)
        part = 1000 * cosines_WF[own][:, other]
        by_words = (word_logits[own].softmax(dim=0) * part.amax(dim=1)).sum()
        return (by_words + (frame_logits[other].softmax(dim=0) * part.amax(dim=0)).sum()) / 2

    def subsets(number, without):
        others = [n for n in range(number) if n != without]
        return [[n for bit, n in enumerate(others) if code >> bit & 1] for code in range(2 ** len(others))]

    found = torch.zeros_like(cosines_WF)
    for a in range(words):
        for b in range(frames):
            changes = [
                worth([*own, a], [*other, b])
                - worth([*own, a], other)
                - worth(own, [*other, b])
                + worth(own, other)
                for own in subsets(words, a)
                for other in subsets(frames, b)
            ]
            found[a, b] = sum(changes) / len(changes)
    return found


def test_the_game_of_hbi_is_the_mean_over_coalitions():
    generator = torch.Generator().manual_seed(2)
    cosines = torch.rand(2, 3, 4, generator=generator, dtype=torch.float64)
    logits = [torch.randn(2, size, generator=generator, dtype=torch.float64) for size in (3, 4)]
    cosines[1, 2], logits[0][1, 2] = 0, float("-inf")  # the second text has two words
    found = banzhaf_interactions(cosines, *logits, draws=6000, generator=generator)
    expected = torch.zeros_like(found)
    expected[0] = every_coalition(cosines[0], logits[0][0], logits[1][0])
    expected[1, :2] = every_coalition(cosines[1, :2], logits[0][1, :2], logits[1][1])
    assert not found[1, 2].any()
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()
    published = banzhaf_interactions(cosines, *logits, draws=6000, single_cell=True, generator=generator)
    assert (published - expected).abs().max() > 0.2 * expected.abs().max()


@pytest.mark.parametrize("published", [False, True])
def test_the_teacher_of_hbi_can_be_taught(published):
    method, text, video, _ = scene("hbi", pairs=3, words=4, frames=3, estimator_width=4)

    def loss():
        generator = torch.Generator().manual_seed(0)
        return method.teacher_loss(text, video, draws=20, published=published, generator=generator)

    before = loss()
    assert not before.requires_grad  # it is frozen until one asks
    optimizer = torch.optim.Adam(method.teacher.requires_grad_().parameters(), lr=0.05)
    for _ in range(25):
        optimizer.zero_grad()
        loss().backward()
        assert all(p.grad.abs().max() > 0 for p in method.teacher.parameters())
        optimizer.step()
    assert loss() < 0.9 * before
    text.words_TWD.data[~text.mask_TW] = 7.0
    again, changed = loss(), video.frames_VFD.data
    changed[~video.mask_VF] = -5.0
    torch.testing.assert_close(loss(), again)
