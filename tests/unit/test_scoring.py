"""Scoring against a loop over pairs written out by hand, and what factored scoring may not do."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from features import all_interactions, random_psi, random_text, random_video
from gare import Interaction, VideoFeatures
from gare.scoring import cards as cards_module
from gare.scoring import dense, factored, kernel, score_cards


def score_one_pair(text, words, frames, frame_is_real, psi, interaction):
    """One pair, one step a line, lists of one-dimensional vectors."""
    real = [f for f, is_real in zip(frames, frame_is_real, strict=True) if is_real]
    seen = real if interaction.mask_frames else list(frames)
    mean = sum(seen) / len(seen)

    query = text if interaction.query == "text" else mean - text
    if interaction.query == "gap" and interaction.gap_direction == "text_minus_video":
        query = -query
    context = seen if interaction.context == "frames" else words
    query = psi.norm1(query)
    context = [psi.norm1(c) for c in context]
    head = len(text) // psi.num_heads
    mixed = []
    for h in range(psi.num_heads):
        rows = slice(h * head, (h + 1) * head)
        logits = torch.stack([psi.key(c)[rows] @ psi.query(query)[rows] / math.sqrt(head) for c in context])
        weights = logits.softmax(dim=0)
        mixed.append(sum(w * psi.value(c)[rows] for w, c in zip(weights, context, strict=True)))
    hidden = psi.norm2(psi.out(torch.cat(mixed)))
    increment = psi.output(psi.norm3(hidden + psi.residual(hidden)))
    if interaction.normalise:
        increment = increment / increment.norm()
    elif interaction.query == "text":
        cosines = [text @ f / (text.norm() * f.norm()) for f in seen]
        increment = increment / increment.norm() * math.exp(sum(cosines) / len(cosines))

    if interaction.pooling == "mean":
        pooled = mean
    else:
        weights = torch.stack([text @ f / interaction.pooling_temperature for f in seen]).softmax(dim=0)
        kept = frame_is_real if not interaction.mask_frames else [True] * len(seen)
        pooled = sum(w * f for w, f, keep in zip(weights, seen, kept, strict=True) if keep)
    left, right = text, pooled
    if interaction.corrected_side == "text":
        left = text + increment
    else:
        right = pooled + increment
    return left @ right / (left.norm() * right.norm())


@pytest.mark.parametrize("interaction", all_interactions(), ids=str)
def test_dense_equals_a_loop_over_pairs(interaction):
    generator = torch.Generator().manual_seed(3)
    text, video = random_text(generator, 2, 3, 8), random_video(generator, 3, 4, 8)
    psi = random_psi(generator, 8, num_heads=2)
    expected = torch.stack(
        [
            torch.stack(
                [
                    score_one_pair(
                        text.text_TD[i],
                        list(text.words_TWD[i][text.mask_TW[i]]),
                        list(video.frames_VFD[j]),
                        video.mask_VF[j].tolist(),
                        psi,
                        interaction,
                    )
                    for j in range(3)
                ]
            )
            for i in range(2)
        ]
    )
    torch.testing.assert_close(dense.score(text, video, psi, interaction), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("num_frames", [2, 12])
def test_a_pooled_vector_that_vanishes_scores_the_same_both_ways(num_frames):
    """Released rule: the softmax may lie on padding almost entirely, and the pooled vector is then tiny."""
    generator = torch.Generator().manual_seed(0)
    interaction = Interaction(pooling="text_conditioned", mask_frames=False)
    text, video = random_text(generator, 20, 2, 512), random_video(generator, 30, num_frames, 512)
    video.mask_VF[:] = False
    video.mask_VF[:, :1] = True
    psi = random_psi(generator, 512)
    with torch.no_grad():
        slow, fast = dense.score(text, video, psi, interaction), factored.score(text, video, psi, interaction)
    torch.testing.assert_close(fast, slow, atol=1e-10, rtol=0)
    cards = score_cards(VideoFeatures(video.frames_VFD.float(), video.mask_VF), psi.float(), interaction)
    fused_VT = kernel.score(text.text_TD.float(), cards.increment, cards.pool, interaction)
    torch.testing.assert_close(fused_VT.mT.double(), slow, atol=2e-5, rtol=0)


def test_scores_are_cosines_even_where_the_shifted_text_vanishes():
    generator = torch.Generator().manual_seed(0)
    text = random_text(generator, 6, 2, 32, torch.float32)
    video = random_video(generator, 6, 3, 32, torch.float32)
    psi = random_psi(generator, 32, dtype=torch.float32)
    with torch.no_grad():
        psi.output.weight.zero_()
        psi.output.bias.copy_(-text.text_TD[0])  # the increment of every pair undoes the first text
        assert factored.score(text, video, psi, Interaction()).abs().max() <= 1


@pytest.mark.parametrize("context", ["frames", "words"])
@torch.no_grad()
def test_sizes_of_real_models(context):
    generator = torch.Generator().manual_seed(0)
    text = random_text(generator, 5, 77, 512)
    video = random_video(generator, 4, 64, 512)
    psi = random_psi(generator, 512, num_heads=8)
    interaction = Interaction(context=context, pooling="text_conditioned")
    expected = dense.score(text, video, psi, interaction)
    torch.testing.assert_close(factored.score(text, video, psi, interaction), expected, atol=1e-10, rtol=0)


@torch.no_grad()
def test_cards_made_in_blocks_and_cards_with_gaps(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    text, video = (
        random_text(generator, 5, 2, 16, torch.float32),
        random_video(generator, 9, 3, 16, torch.float32),
    )
    psi, interaction = random_psi(generator, 16, dtype=torch.float32), Interaction()
    whole = score_cards(video, psi, interaction)
    monkeypatch.setitem(cards_module.OWNER_NUMBERS, "cpu", 2 * 3 * 16)  # two videos at a time
    pieces = score_cards(video, psi, interaction)
    expected = factored.score(text, whole, psi, interaction)
    torch.testing.assert_close(factored.score(text, pieces, psi, interaction), expected)
    every_other = whole[::2]
    fused_VT = kernel.score(text.text_TD, every_other.increment, every_other.pool, interaction)
    torch.testing.assert_close(fused_VT.mT, expected[:, ::2], atol=2e-6, rtol=0)


def test_padded_words_of_any_content_change_nothing():
    generator = torch.Generator().manual_seed(0)
    text, video = random_text(generator, 4, 3, 16), random_video(generator, 3, 2, 16)
    text.mask_TW[:, 2], text.mask_TW[:, 0] = False, True
    psi, interaction = random_psi(generator, 16), Interaction(context="words")
    expected = dense.score(text, video, psi, interaction)
    text.words_TWD[:, 2] = float("nan")
    for score in (dense.score, factored.score):
        torch.testing.assert_close(score(text, video, psi, interaction), expected)


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


@pytest.mark.parametrize("interaction", all_interactions(), ids=str)
def test_factored_never_holds_a_vector_for_every_pair(interaction):
    generator = torch.Generator().manual_seed(0)
    text = random_text(generator, 24, 3, 64, torch.float32)
    video = random_video(generator, 24, 3, 64, torch.float32)
    psi = random_psi(generator, 64, dtype=torch.float32)
    with LargestTensor() as largest:
        factored.score(text, video, psi, interaction).sum().backward()
    assert largest.numel < 24 * 24 * 64 / 2


@pytest.mark.parametrize("num_frames", [5, 17])
@pytest.mark.parametrize("interaction", [i for i in all_interactions() if i.context == "frames"], ids=str)
@torch.no_grad()
def test_the_cuda_kernel_in_tritons_interpreter_equals_plain_torch(interaction, num_frames):
    generator = torch.Generator().manual_seed(0)
    text = random_text(generator, kernel.TEXTS_PER_PROGRAM + 5, 2, 16, torch.float32)
    video = random_video(generator, 2, num_frames, 16, torch.float32)
    psi = random_psi(generator, 16, dtype=torch.float32)
    cards = score_cards(video, psi, interaction)
    fused_VT = kernel.score(text.text_TD, cards.increment, cards.pool, interaction)
    plain_TV = factored.score(text, cards, psi, interaction)
    torch.testing.assert_close(fused_VT.mT, plain_TV, atol=2e-6, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("context", ["frames", "words"])
def test_half_precision_is_scored_in_float32(context):
    generator = torch.Generator().manual_seed(0)
    interaction = Interaction(context=context, pooling="text_conditioned")
    text, video = random_text(generator, 6, 4, 64), random_video(generator, 7, 5, 64)
    psi = random_psi(generator, 64)
    exact = dense.score(text, video, psi, interaction)
    half = torch.bfloat16
    scores = factored.score(text.to(half), video.to(half), psi.to(half), interaction)
    assert scores.dtype == torch.float32
    assert (scores - exact).abs().max() < 0.02  # what rounding the inputs to eight bits costs


@torch.no_grad()
def test_frame_weights_are_those_of_the_dense_path():
    generator = torch.Generator().manual_seed(0)
    interaction = Interaction(pooling="text_conditioned")
    text, video = random_text(generator, 3, 2, 8), random_video(generator, 4, 5, 8)
    psi = random_psi(generator, 8, num_heads=2)
    weights = factored.frame_weights(text, video, psi, interaction)
    assert weights.pool_TVF.shape == (3, 4, 5)
    assert weights.attention_TVHF.shape == (3, 4, 2, 5)
    pooled = torch.einsum("tvf,vfd->tvd", weights.pool_TVF, video.frames_VFD)
    torch.testing.assert_close(pooled, dense.pool(text.text_TD, video, interaction))
    query = psi.query(psi.norm1(video.frames_VFD[1][video.mask_VF[1]].mean(dim=0) - text.text_TD[2]))
    keys = psi.key(psi.norm1(video.frames_VFD[1][video.mask_VF[1]]))
    by_hand = (keys[:, 4:] @ query[4:] / 2).softmax(dim=0)  # the second of two heads of four dimensions
    torch.testing.assert_close(weights.attention_TVHF[2, 1, 1][video.mask_VF[1]], by_hand)
    ones = torch.ones(3, 4, 2, dtype=torch.float64)
    torch.testing.assert_close(weights.attention_TVHF.sum(dim=-1), ones)
    assert (weights.attention_TVHF[:, ~video.mask_VF[:, None].expand(-1, 2, -1)] == 0).all()
    assert factored.frame_weights(text, video, None, interaction).attention_TVHF is None


def test_released_rule_lets_padding_in():
    """The paper's rule ignores padding; the released code's mean and attention see it (FIDELITY 4)."""
    generator = torch.Generator().manual_seed(0)
    text, video = random_text(generator, 2, 2, 8), random_video(generator, 3, 4, 8)
    video.mask_VF[:, -1] = False
    video.mask_VF[:, 0] = True
    other = VideoFeatures(video.frames_VFD.clone(), video.mask_VF)
    other.frames_VFD[:, -1] += 1
    psi = random_psi(generator, 8)
    for mask_frames in (True, False):
        interaction = Interaction(mask_frames=mask_frames)
        change = dense.score(text, video, psi, interaction) - dense.score(text, other, psi, interaction)
        assert (change.abs().max() == 0) == mask_frames
