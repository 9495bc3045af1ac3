"""The reference: every increment is formed, so each line can be read beside the paper. Training uses it too.

Shapes: T texts, V videos, F frames, W words, D embedding. A pair costs four D×D products, and T×V×D numbers
are kept, so `score` works in blocks; `factored` gives the same numbers without forming the increment.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gare.scoring import token_wise
from gare.scoring.checks import check_shapes, increment_module
from gare.scoring.pooling import mean_weights, pool_weights, weighted_mean, without_padding
from gare.types import (
    IncrementModule,
    Interaction,
    PairModule,
    PairScores,
    TextFeatures,
    VideoFeatures,
)

SQUARE_FLOOR = 1e-16
PAIRS_A_SIDE = 128


def score_pairs(
    text: TextFeatures, video: VideoFeatures, psi: PairModule | None, interaction: Interaction
) -> PairScores:
    """Score every text with every video and keep the increments; `psi=None` is the baseline.

    With the pooling "cross_attention" or "token_wise", `psi` is the module of that baseline instead.
    """
    check_shapes(text, video)
    if interaction.pooling == "token_wise":
        return PairScores(token_wise.score_pairs(text, video, psi), None)
    psi = increment_module(psi, interaction)
    frames_VFD = without_padding(video.frames_VFD, video.mask_VF, mask_frames=interaction.mask_frames)
    video = VideoFeatures(frames_VFD, video.mask_VF)
    text_TVD = text.text_TD[:, None].expand(-1, len(video), -1)
    if psi is not None and interaction.pooling == "cross_attention":
        pooled_VTD = psi(text_TVD.transpose(0, 1), video.frames_VFD, video.mask_VF)
        return PairScores(cosine(text_TVD, pooled_VTD.transpose(0, 1)), None)
    video_pooled_TVD = pool(text.text_TD, video, interaction)
    if psi is None:
        return PairScores(cosine(text_TVD, video_pooled_TVD), None)
    increment_TVD = increments(text, video, psi, interaction)
    if interaction.corrected_side == "text":
        shifted_text_TVD = text_TVD + increment_TVD
        return PairScores(cosine(shifted_text_TVD, video_pooled_TVD), increment_TVD)
    return PairScores(cosine(text_TVD, video_pooled_TVD + increment_TVD), increment_TVD)


def score(
    text: TextFeatures,
    video: VideoFeatures,
    psi: PairModule | None,
    interaction: Interaction,
    *,
    text_block: int | None = None,
    video_block: int | None = None,
) -> Tensor:
    """The scores alone, [T, V], in blocks."""
    check_shapes(text, video)
    text_block, video_block = text_block or PAIRS_A_SIDE, video_block or PAIRS_A_SIDE
    rows = [
        torch.cat(
            [score_pairs(texts, videos, psi, interaction).scores_TV for videos in video.blocks(video_block)],
            1,
        )
        for texts in text.blocks(text_block)
    ]
    return torch.cat(rows)


def cosine(left_TVD: Tensor, right_TVD: Tensor) -> Tensor:
    """Cosine of each pair; a vector shorter than 1e-8 counts as that long, so that it scores near zero."""
    product_TV = (left_TVD * right_TVD).sum(dim=-1)
    scale_TV = [x.square().sum(dim=-1).clamp_min(SQUARE_FLOOR).rsqrt() for x in (left_TVD, right_TVD)]
    return (product_TV * scale_TV[0] * scale_TV[1]).clamp(-1, 1)


def pool(text_TD: Tensor, video: VideoFeatures, interaction: Interaction) -> Tensor:
    """The video vector of each pair, [T, V, D]."""
    logits_VFT = video.frames_VFD @ text_TD.mT
    weights_VFT = pool_weights(logits_VFT, video.mask_VF, interaction)
    return torch.einsum("vft,vfd->tvd", weights_VFT, video.frames_VFD)


def increments(
    text: TextFeatures, video: VideoFeatures, psi: IncrementModule, interaction: Interaction
) -> Tensor:
    """Delta_ij for every pair, [T, V, D]."""
    text_TVD = text.text_TD[:, None].expand(-1, len(video), -1)
    mean_VF = mean_weights(video.mask_VF, mask_frames=interaction.mask_frames, dtype=video.frames_VFD.dtype)
    if interaction.query == "text":
        query_TVD = text_TVD
    else:
        video_mean_VD = weighted_mean(video.frames_VFD, mean_VF)
        gap_TVD = video_mean_VD - text_TVD
        query_TVD = gap_TVD if interaction.gap_direction == "video_minus_text" else -gap_TVD

    if interaction.context == "frames":
        attended_VF = video.mask_VF if interaction.mask_frames else torch.ones_like(video.mask_VF)
        increment_TVD = psi(query_TVD.transpose(0, 1), video.frames_VFD, attended_VF).transpose(0, 1)
    else:
        words_TWD = text.words_TWD.masked_fill(~text.mask_TW[..., None], 0)
        increment_TVD = psi(query_TVD, words_TWD, text.mask_TW)

    if interaction.normalise:
        return F.normalize(increment_TVD, dim=-1)
    if interaction.query == "text":
        unit_VD = weighted_mean(F.normalize(video.frames_VFD, dim=-1), mean_VF)
        length_TV = (F.normalize(text.text_TD, dim=-1) @ unit_VD.mT).exp()
        return F.normalize(increment_TVD, dim=-1) * length_TV[..., None]
    return increment_TVD
