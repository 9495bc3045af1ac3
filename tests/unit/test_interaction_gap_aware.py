"""GARE against a loop over pairs written out by hand, and what its fast path may not do."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from features import every_factored, every_gap_aware, random_interaction, random_text, random_video, short
from gare import VideoFeatures
from gare.interaction import GapAwareConfig, TextConditionedConfig, gap_aware_cuda, score_cards


def dense(interaction, text, video):
    return interaction.score_pairs(text, video).scores_TV


def score_one_pair(text, words, frames, frame_is_real, interaction, config):
    """One pair, one step a line, lists of one-dimensional vectors; `psi` is the increment net."""
    psi = interaction.increment_net
    real = [f for f, is_real in zip(frames, frame_is_real, strict=True) if is_real]
    seen = real if config.mask_frames else list(frames)
    mean = sum(seen) / len(seen)

    query = mean - text if config.query == "gap" else text
    if config.query == "gap" and config.gap_direction == "text_minus_video":
        query = -query
    context = seen if config.context == "frames" else words
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
    if config.query == "paper_text":
        increment = mean - increment if config.gap_direction == "video_minus_text" else increment - mean
        increment = increment / increment.norm()
        if not config.normalise:
            cosines = [text @ f / (text.norm() * f.norm()) for f in frames]
            if config.mask_frames:
                cosines = [c * is_real for c, is_real in zip(cosines, frame_is_real, strict=True)]
            weights = interaction.length.weight[0]
            length = interaction.length.bias[0] + sum(a * c for a, c in zip(weights, cosines, strict=False))
            increment = increment * length.exp()
    elif config.normalise:
        increment = increment / increment.norm()
    elif config.query == "text":
        cosines = [text @ f / (text.norm() * f.norm()) for f in seen]
        increment = increment / increment.norm() * math.exp(sum(cosines) / len(cosines))

    if config.pooling == "mean":
        pooled = mean
    else:
        weights = torch.stack([text @ f / config.pooling_temperature for f in seen]).softmax(dim=0)
        kept = frame_is_real if not config.mask_frames else [True] * len(seen)
        pooled = sum(w * f for w, f, keep in zip(weights, seen, kept, strict=True) if keep)
    left, right = text, pooled
    if config.corrected_side == "text":
        left = text + increment
    else:
        right = pooled + increment
    return left @ right / (left.norm() * right.norm())


@pytest.mark.parametrize("config", every_gap_aware(num_heads=2), ids=short)
def test_the_reference_equals_a_loop_over_pairs(config):
    generator = torch.Generator().manual_seed(3)
    text, video = random_text(generator, 2, 3, 8), random_video(generator, 3, 4, 8)
    interaction = random_interaction(generator, config, 8)
    expected = torch.stack(
        [
            torch.stack(
                [
                    score_one_pair(
                        text.text_TD[i],
                        list(text.words_TWD[i][text.mask_TW[i]]),
                        list(video.frames_VFD[j]),
                        video.mask_VF[j].tolist(),
                        interaction,
                        config,
                    )
                    for j in range(3)
                ]
            )
            for i in range(2)
        ]
    )
    torch.testing.assert_close(dense(interaction, text, video), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("num_frames", [2, 12])
def test_a_pooled_vector_that_vanishes_scores_the_same_both_ways(num_frames):
    """Released rule: the softmax may lie on padding almost entirely, and the pooled vector is then tiny."""
    generator = torch.Generator().manual_seed(0)
    config = GapAwareConfig(pooling="text_conditioned", mask_frames=False)
    text, video = random_text(generator, 20, 2, 512), random_video(generator, 30, num_frames, 512)
    video.mask_VF[:] = False
    video.mask_VF[:, :1] = True
    interaction = random_interaction(generator, config, 512)
    with torch.no_grad():
        slow, fast = dense(interaction, text, video), interaction.score(text, video)
    torch.testing.assert_close(fast, slow, atol=1e-10, rtol=0)
    cards = interaction.float().cards(VideoFeatures(video.frames_VFD.float(), video.mask_VF))
    fused_TV = gap_aware_cuda.score(text.text_TD.float(), cards)
    torch.testing.assert_close(fused_TV.double(), slow, atol=2e-5, rtol=0)


def test_scores_are_cosines_even_where_the_shifted_text_vanishes():
    generator = torch.Generator().manual_seed(0)
    text = random_text(generator, 6, 2, 32, torch.float32)
    video = random_video(generator, 6, 3, 32, torch.float32)
    interaction = random_interaction(generator, GapAwareConfig(), 32, torch.float32)
    with torch.no_grad():
        interaction.increment_net.output.weight.zero_()
        # The increment of every pair undoes the first text.
        interaction.increment_net.output.bias.copy_(-text.text_TD[0])
        assert interaction.score(text, video).abs().max() <= 1


@pytest.mark.parametrize("context", ["frames", "words"])
@torch.no_grad()
def test_sizes_of_real_models(context):
    generator = torch.Generator().manual_seed(0)
    text = random_text(generator, 5, 77, 512)
    video = random_video(generator, 4, 64, 512)
    config = GapAwareConfig(context=context, pooling="text_conditioned", num_heads=8)
    interaction = random_interaction(generator, config, 512)
    expected = dense(interaction, text, video)
    torch.testing.assert_close(interaction.score(text, video), expected, atol=1e-10, rtol=0)


@torch.no_grad()
def test_cards_made_in_blocks_and_cards_with_gaps(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    text, video = (
        random_text(generator, 5, 2, 16, torch.float32),
        random_video(generator, 9, 3, 16, torch.float32),
    )
    interaction = random_interaction(generator, GapAwareConfig(), 16, torch.float32)
    whole = interaction.cards(video)
    monkeypatch.setitem(score_cards.OWNER_NUMBERS, "cpu", 2 * 3 * 16)  # two videos at a time
    pieces = interaction.cards(video)
    expected = interaction.score(text, whole)
    torch.testing.assert_close(interaction.score(text, pieces), expected)
    fused_TV = gap_aware_cuda.score(text.text_TD, whole[::2])
    torch.testing.assert_close(fused_TV, expected[:, ::2], atol=2e-6, rtol=0)


def test_padded_words_of_any_content_change_nothing():
    generator = torch.Generator().manual_seed(0)
    text, video = random_text(generator, 4, 3, 16), random_video(generator, 3, 2, 16)
    text.mask_TW[:, 2], text.mask_TW[:, 0] = False, True
    interaction = random_interaction(generator, GapAwareConfig(context="words"), 16)
    expected = dense(interaction, text, video)
    text.words_TWD[:, 2] = float("nan")
    torch.testing.assert_close(dense(interaction, text, video), expected)
    torch.testing.assert_close(interaction.score(text, video), expected)


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


@pytest.mark.parametrize("config", every_factored(), ids=short)
def test_the_fast_path_never_holds_a_vector_for_every_pair(config):
    generator = torch.Generator().manual_seed(0)
    text = random_text(generator, 24, 3, 64, torch.float32)
    video = random_video(generator, 24, 3, 64, torch.float32)
    interaction = random_interaction(generator, config, 64, torch.float32)
    with LargestTensor() as largest:
        interaction.score(text, video).sum().backward()
    assert largest.numel < 24 * 24 * 64 / 2


def test_mean_pooling_takes_a_product_with_the_mean_and_not_with_each_frame():
    generator = torch.Generator().manual_seed(0)
    text = random_text(generator, 12, 3, 64, torch.float32)
    video = random_video(generator, 10, 12, 64, torch.float32)
    counted = {}
    for pooling in ("mean", "text_conditioned"):
        config = GapAwareConfig(pooling=pooling, num_heads=1)
        interaction = random_interaction(generator, config, 64, torch.float32)
        cards = interaction.cards(video)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            interaction.score(text, cards)
        counted[pooling] = counter.get_total_flops() / (2 * 12 * 10)
    products_of_frames = 11 * 64  # a pair: twelve of length D against one
    squares = 12 * 12 + 12 * 12 - 12  # |pooled|² and pooled·atoms
    assert counted["text_conditioned"] - counted["mean"] >= products_of_frames + squares


@pytest.mark.parametrize("num_heads", [1, 2])
@pytest.mark.parametrize("config", every_factored(context="frames"), ids=short)
@torch.no_grad()
def test_the_cuda_kernel_in_tritons_interpreter_equals_plain_torch(config, num_heads):
    """Frames that fill a tile and frames that do not; more texts and videos than a program has."""
    generator = torch.Generator().manual_seed(0)
    config = replace(config, num_heads=num_heads)
    num_texts, num_videos, num_frames, dim = (69, 3, 5, 16) if num_heads == 1 else (5, 2, 17, 40)
    text = random_text(generator, num_texts, 2, dim, torch.float32)
    video = random_video(generator, num_videos, num_frames, dim, torch.float32)
    interaction = random_interaction(generator, config, dim, torch.float32)
    cards = interaction.cards(video)
    fused_TV = gap_aware_cuda.score(text.text_TD, cards)
    plain_TV = interaction.score(text, cards)
    torch.testing.assert_close(fused_TV, plain_TV, atol=2e-6, rtol=0)


@pytest.mark.parametrize("scale", [1.0, 100.0])
@torch.no_grad()
def test_the_cuda_kernel_in_half_precision(scale):
    """Its matrices are kept in float16, each divided by its largest number: no weight is too large.

    float16, because Triton's interpreter multiplies bfloat16 as if it were integers.
    """
    generator = torch.Generator().manual_seed(0)
    config = GapAwareConfig(pooling="text_conditioned")
    text, video = random_text(generator, 7, 2, 64), random_video(generator, 5, 12, 64)
    interaction = random_interaction(generator, config, 64)
    interaction.increment_net.output.weight.mul_(scale)
    text, video = text.to(torch.float16), video.to(torch.float16)
    exact = interaction.score(text.to(torch.float64), video.to(torch.float64))
    cards = interaction.half().cards(video)
    fused_TV = gap_aware_cuda.score(text.text_TD, cards)
    assert (fused_TV - exact).abs().max() < 0.01  # what rounding weights and keys costs


@torch.no_grad()
@pytest.mark.parametrize("context", ["frames", "words"])
def test_half_precision_is_scored_in_float32(context):
    generator = torch.Generator().manual_seed(0)
    text, video = random_text(generator, 6, 4, 64), random_video(generator, 7, 5, 64)
    config = GapAwareConfig(context=context, pooling="text_conditioned")
    interaction = random_interaction(generator, config, 64)
    exact = dense(interaction, text, video)
    half = torch.bfloat16
    scores = interaction.to(half).score(text.to(half), video.to(half))
    assert scores.dtype == torch.float32
    assert (scores - exact).abs().max() < 0.02  # what rounding the inputs to eight bits costs


@torch.no_grad()
def test_frame_weights_are_those_of_the_reference():
    generator = torch.Generator().manual_seed(0)
    text, video = random_text(generator, 3, 2, 8), random_video(generator, 4, 5, 8)
    config = GapAwareConfig(pooling="text_conditioned", num_heads=2)
    interaction = random_interaction(generator, config, 8)
    psi = interaction.increment_net
    weights = interaction.frame_weights(text, video)
    assert weights.pool_TVF.shape == (3, 4, 5)
    assert weights.attention_TVHF.shape == (3, 4, 2, 5)
    pooled = torch.einsum("tvf,vfd->tvd", weights.pool_TVF, video.frames_VFD)
    torch.testing.assert_close(pooled, interaction.pooling.pool(text.text_TD, video))
    query = psi.query(psi.norm1(video.frames_VFD[1][video.mask_VF[1]].mean(dim=0) - text.text_TD[2]))
    keys = psi.key(psi.norm1(video.frames_VFD[1][video.mask_VF[1]]))
    by_hand = (keys[:, 4:] @ query[4:] / 2).softmax(dim=0)  # the second of two heads of four dimensions
    torch.testing.assert_close(weights.attention_TVHF[2, 1, 1][video.mask_VF[1]], by_hand)
    ones = torch.ones(3, 4, 2, dtype=torch.float64)
    torch.testing.assert_close(weights.attention_TVHF.sum(dim=-1), ones)
    assert (weights.attention_TVHF[:, ~video.mask_VF[:, None].expand(-1, 2, -1)] == 0).all()
    plain = random_interaction(generator, TextConditionedConfig(), 8).frame_weights(text, video)
    assert plain.attention_TVHF is None
    torch.testing.assert_close(plain.pool_TVF, weights.pool_TVF)


def test_released_rule_lets_padding_in():
    """The paper's rule ignores padding; the released code's mean and attention see it (FIDELITY 4)."""
    generator = torch.Generator().manual_seed(0)
    text, video = random_text(generator, 2, 2, 8), random_video(generator, 3, 4, 8)
    video.mask_VF[:, -1] = False
    video.mask_VF[:, 0] = True
    other = VideoFeatures(video.frames_VFD.clone(), video.mask_VF)
    other.frames_VFD[:, -1] += 1
    for mask_frames in (True, False):
        interaction = random_interaction(generator, GapAwareConfig(mask_frames=mask_frames), 8)
        change = dense(interaction, text, video) - dense(interaction, text, other)
        assert (change.abs().max() == 0) == mask_frames
        assert interaction.masks_padding == mask_frames
