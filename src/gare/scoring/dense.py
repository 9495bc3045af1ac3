"""The reference: every increment is formed, so each line can be read beside the paper. Training uses it too.

Shapes: T texts, V videos, F frames, D embedding. One pair costs four D×D products, and T×V×D numbers are
kept, so `score` works in blocks; `factored` gives the same numbers without forming the increment.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gare.scoring.pooling import mean_weights, pool_weights, weighted_mean, without_padding
from gare.types import IncrementModule, Interaction, PairScores, TextFeatures, VideoFeatures


def score_pairs(
    text: TextFeatures, video: VideoFeatures, psi: IncrementModule | None, interaction: Interaction
) -> PairScores:
    """Score every text with every video and keep the increments; `psi=None` is the baseline."""
    frames_VFD = without_padding(video.frames_VFD, video.mask_VF, mask_frames=interaction.mask_frames)
    video = VideoFeatures(frames_VFD, video.mask_VF)
    pooled_TVD = pool(text.text_TD, video, interaction)
    text_TVD = text.text_TD[:, None].expand_as(pooled_TVD)
    if psi is None:
        return PairScores(F.cosine_similarity(text_TVD, pooled_TVD, dim=-1), None)
    increment_TVD = increments(text, video, psi, interaction)
    if interaction.corrected_side == "text":
        scores_TV = F.cosine_similarity(text_TVD + increment_TVD, pooled_TVD, dim=-1)
    else:
        scores_TV = F.cosine_similarity(text_TVD, pooled_TVD + increment_TVD, dim=-1)
    return PairScores(scores_TV, increment_TVD)


def score(
    text: TextFeatures,
    video: VideoFeatures,
    psi: IncrementModule | None,
    interaction: Interaction,
    *,
    block: int = 128,
) -> Tensor:
    """The scores alone, [T, V], in blocks of `block` × `block` pairs."""
    return torch.cat(
        [
            torch.cat(
                [
                    score_pairs(text[i : i + block], video[j : j + block], psi, interaction).scores_TV
                    for j in range(0, len(video), block)
                ],
                dim=1,
            )
            for i in range(0, len(text), block)
        ]
    )


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
        gap_TVD = weighted_mean(video.frames_VFD, mean_VF) - text_TVD
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
