"""Decorrelation: channels of matched vectors agree with themselves and with no other channel.

Three published forms: over tokens and their best matches (WTI of DRL), over slices of channels (DiCoSA), over
the vectors of a batch (EERCF).

Shapes: T texts, V videos, B pairs, W words, F frames, D embedding, C slices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gare.objective.loss_term import LossTerm, ScoredBatch
from gare.settings import NonNegativeFloat


@dataclass(frozen=True)
class TokenDecorrelation(LossTerm):
    """Over the words of a batch with each one's best frame, and over frames with their words (DRL)."""

    weight: NonNegativeFloat = 1e-3
    on_diagonal: NonNegativeFloat = 0.11
    off_diagonal: NonNegativeFloat = 0.0
    weighted: bool = True
    """Weigh tokens as the scores do; if not, divide by their number."""
    zero_padding: bool = False
    """Compare padding with a cosine of zero, as the published code does: the best match of a token may then
    be what a padded position holds."""

    def __call__(self, batch: ScoredBatch) -> Tensor | None:
        parts, text, video = batch.pairs.parts, batch.text, batch.video
        if "word_weight_TW" not in parts or text is None or video is None:
            return None
        correlation_DD = token_correlation(
            text.words_TWD,
            text.mask_TW,
            video.frames_VFD,
            video.mask_VF,
            (parts["word_weight_TW"], parts["frame_weight_VF"]) if self.weighted else None,
            zero_padding=self.zero_padding,
        )
        return decorrelation(correlation_DD, self.on_diagonal, self.off_diagonal)


@dataclass(frozen=True)
class ConceptDecorrelation(LossTerm):
    """Over the slices of each matched pair (DiCoSA)."""

    weight: NonNegativeFloat = 1.0
    on_diagonal: NonNegativeFloat = 0.01
    off_diagonal: NonNegativeFloat = 0.005
    divisor: Literal["channels", "words"] = "channels"
    """What sums over the channels of a slice are divided by. The published code takes the number of padded
    words, so that the target of one is met at another correlation."""

    def __call__(self, batch: ScoredBatch) -> Tensor | None:
        text_BCd = batch.pairs.parts.get("text_slices_BCd")
        if text_BCd is None:
            return None
        video_BCd = batch.pairs.parts["video_slices_BCd"]
        divisor = text_BCd.shape[-1]
        if self.divisor == "words":
            assert batch.text is not None, "the published divisor is the number of padded words"
            divisor = batch.text.words_TWD.shape[1]
        left, right = (_standardised(x, dim=-1) for x in (text_BCd, video_BCd))
        return decorrelation((left @ right.mT).mean(dim=0) / divisor, self.on_diagonal, self.off_diagonal)


@dataclass(frozen=True)
class FeatureDecorrelation(LossTerm):
    """Over the vectors of a batch, of texts and each kind of video vector (EERCF)."""

    weight: NonNegativeFloat = 1e-3
    on_diagonal: NonNegativeFloat = 0.14
    off_diagonal: NonNegativeFloat = 0.0

    def __call__(self, batch: ScoredBatch) -> Tensor | None:
        text_BD = batch.pairs.parts.get("decorrelated_text")
        if text_BD is None:
            return None
        videos = [x for name, x in batch.pairs.parts.items() if name.startswith("decorrelated:")]
        losses = [
            decorrelation(feature_correlation(text_BD, video_BD), self.on_diagonal, self.off_diagonal)
            for video_BD in videos
        ]
        return sum(losses[1:], start=losses[0])


def decorrelation(correlation_DD: Tensor, on_diagonal: float, off_diagonal: float) -> Tensor:
    """on · Σ (C_dd − 1)² + off · Σ_{d≠e} C_de²."""
    diagonal_D = correlation_DD.diagonal()
    on = (diagonal_D - 1).square().sum()
    return on_diagonal * on + off_diagonal * (correlation_DD.square().sum() - diagonal_D.square().sum())


def feature_correlation(left_BD: Tensor, right_BD: Tensor) -> Tensor:
    """The correlation of every channel of one side with every channel of the other, [D, D]."""
    return _standardised(left_BD, dim=0).mT @ _standardised(right_BD, dim=0) / len(left_BD)


def token_correlation(
    words_BWD: Tensor,
    word_mask: Tensor,
    frames_BFD: Tensor,
    frame_mask: Tensor,
    weights: tuple[Tensor, Tensor] | None,
    *,
    zero_padding: bool = False,
) -> Tensor:
    """The mean of the correlations over words with their best frames and frames with their best words."""
    if not zero_padding:  # padding may hold anything
        words_BWD = words_BWD.masked_fill(~word_mask[..., None], 0)
        frames_BFD = frames_BFD.masked_fill(~frame_mask[..., None], 0)
    words_BWD, frames_BFD = F.normalize(words_BWD, dim=-1), F.normalize(frames_BFD, dim=-1)
    is_real_BWF = word_mask[..., None] & frame_mask[:, None]
    padding = 0.0 if zero_padding else float("-inf")
    cosines_BWF = (words_BWD @ frames_BFD.mT).masked_fill(~is_real_BWF, padding)
    sides = (
        (words_BWD, word_mask, frames_BFD, cosines_BWF, 0),
        (frames_BFD, frame_mask, words_BWD, cosines_BWF.mT, 1),
    )
    found = []
    for own_BND, mask_BN, other_BMD, cosines_BNM, index in sides:
        best_BN = cosines_BNM.argmax(dim=-1)
        match_BND = other_BMD.gather(1, best_BN[..., None].expand_as(own_BND))
        own_KD, match_KD = _standardised(own_BND[mask_BN], dim=0), _standardised(match_BND[mask_BN], dim=0)
        if weights is None:
            found.append(own_KD.mT @ match_KD / len(own_KD))
        else:
            weight_K1 = weights[index][mask_BN][:, None]
            found.append((weight_K1 * own_KD).mT @ match_KD / len(mask_BN))
    return torch.stack(found).mean(dim=0)


def _standardised(x: Tensor, *, dim: int) -> Tensor:
    return (x - x.mean(dim=dim, keepdim=True)) / x.std(dim=dim, keepdim=True)
