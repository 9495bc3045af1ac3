"""The cosine of a text and a pooled video: frames become one vector by weights without parameters.

`MeanPooling` and `TextConditionedPooling` differ only in the weights. GARE pools by one of the two and adds
its increment to the pair.

Shapes: T texts, V videos, F frames, D embedding.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gare.interaction.interaction import (
    SQUARE_FLOOR,
    FastScoring,
    Interaction,
    InteractionConfig,
    PairProducts,
    PairVectors,
    cosine,
)
from gare.interaction.pair_blocks import block_budget, each_block, full_precision, products
from gare.interaction.score_bounds import (
    SLACK,
    Balls,
    BoundCards,
    ScoreBounds,
    angle_of,
    cosine_bounds,
    length_of,
    product_interval,
    square_of,
)
from gare.interaction.score_cards import ScoreCards, cards_in_blocks, features_of, owners_per_block
from gare.types import FrameWeights, PairScores, TextFeatures, VideoFeatures, block_slices

MAX_TEXTS_PER_BLOCK = 1024


@dataclass(frozen=True)
class PoolCard:
    """What pooling and the gap need of each video."""

    frames_VFD: Tensor
    mask_VF: Tensor
    gram_VFF: Tensor
    mean_VD: Tensor
    unit_mean_VD: Tensor
    """Mean of the unit frame vectors: its product with a unit text is their mean cosine."""


@dataclass(frozen=True)
class PooledCards(ScoreCards):
    """The frames of each video with their products among themselves."""

    pool: PoolCard

    @cached_property
    def video(self) -> VideoFeatures:
        return VideoFeatures(self.pool.frames_VFD, self.pool.mask_VF)


@dataclass(frozen=True)
class PooledCosineConfig(InteractionConfig):
    """Settings that every pooled cosine has."""

    mask_frames: bool = True
    """Leave padded frames out of the mean. The released code does not."""

    COUNTS_PADDING: ClassVar[Mapping[str, bool]] = {"mask_frames": False}


class PooledCosine(Interaction):
    """Pools the frames of a video with weights that a text may choose, then takes the cosine."""

    config: PooledCosineConfig
    fast_scoring: FastScoring = "products"
    same_for_every_text: bool
    """Whether the weights leave the text out of account, so that each video has one vector."""

    @abstractmethod
    def weights(self, logits_VFT: Tensor, mask_VF: Tensor) -> Tensor:
        """The weight of each frame in the video vector of each pair, [V, F, T]; `logits_VFT` is t·f."""

    def score_pairs(self, text: TextFeatures, video: VideoFeatures) -> PairScores:
        self.check(text, video)
        video = self.without_padding(video)
        text_TVD = text.text_TD[:, None].expand(-1, len(video), -1)
        return PairScores(cosine(text_TVD, self.pool(text.text_TD, video)), None)

    def pool(self, text_TD: Tensor, video: VideoFeatures) -> Tensor:
        """The video vector of each pair, [T, V, D]."""
        weights_VFT = self.weights(video.frames_VFD @ text_TD.mT, video.mask_VF)
        return torch.einsum("vft,vfd->tvd", weights_VFT, video.frames_VFD)

    def score(
        self,
        text: TextFeatures,
        video: VideoFeatures | ScoreCards,
        *,
        text_block: int | None = None,
        video_block: int | None = None,
    ) -> Tensor:
        """The same without forming a pooled vector: from t·f and the products of the frames, in blocks."""
        self.check(text, video)
        features = features_of(video)
        num_frames, budget = features.mask_VF.shape[1], block_budget(features.mask_VF.device)
        text_block = text_block or min(len(text), MAX_TEXTS_PER_BLOCK, max(1, budget // num_frames))
        video_block = video_block or max(1, budget // (num_frames * text_block))
        if not isinstance(video, ScoreCards):
            owners = owners_per_block(num_frames, text.dim, features.mask_VF.device)
            video_block = min(video_block, owners)
        text_blocks = list(text.blocks(text_block))

        def column_of_blocks(rows: slice) -> Tensor:
            pool = self._pool_card(video[rows])
            return torch.cat([self._score_block(texts.text_TD, pool) for texts in text_blocks], dim=1)

        return torch.cat(each_block(column_of_blocks, list(block_slices(len(video), video_block)))).mT

    def cards(self, video: VideoFeatures) -> PooledCards:
        size = owners_per_block(video.frames_VFD.shape[1], video.dim, video.frames_VFD.device)
        cards: PooledCards = cards_in_blocks(
            lambda part: PooledCards(self.config, self.pool_card(part)), video, size
        )
        return cards

    def pool_card(self, video: VideoFeatures) -> PoolCard:
        """What pooling and the gap need of each video."""
        kept = self.without_padding(video)
        frames_VFD = full_precision(kept.frames_VFD)
        mean_VF = mean_weights(video.mask_VF, mask_frames=self.masks_padding, dtype=frames_VFD.dtype)
        return PoolCard(
            frames_VFD=kept.frames_VFD,
            mask_VF=kept.mask_VF,
            gram_VFF=frames_VFD @ frames_VFD.mT,
            mean_VD=weighted_mean(frames_VFD, mean_VF),
            unit_mean_VD=weighted_mean(F.normalize(frames_VFD, dim=-1), mean_VF),
        )

    def pool_products(self, text_TD: Tensor, pool: PoolCard) -> tuple[Tensor, Tensor, Tensor]:
        """|pooled|² and text·pooled of each pair, [V, T] or broadcastable, and its weights [V, F, T]."""
        frame_text_VFT = products(pool.frames_VFD, text_TD)
        weights_VFT = self.weights(frame_text_VFT, pool.mask_VF)
        pooled_sq_VT = (pool.gram_VFF @ weights_VFT).mul_(weights_VFT).sum(dim=1)
        return pooled_sq_VT, (weights_VFT * frame_text_VFT).sum(dim=1), weights_VFT

    def bound_cards(self, video: VideoFeatures, dtype: torch.dtype = torch.float32) -> BoundCards:
        return BoundCards(self.pooled_balls(video, dtype))

    def pooled_balls(self, video: VideoFeatures, dtype: torch.dtype) -> Balls:
        """Around the mean frame: every vector that the frames of a video can be pooled to."""
        kept = self.without_padding(video).to(torch.float64)
        mean_VF = mean_weights(video.mask_VF, mask_frames=self.masks_padding, dtype=torch.float64)
        mean_VD = weighted_mean(kept.frames_VFD, mean_VF)
        if self.same_for_every_text:
            return Balls.around(mean_VD, mean_VD.new_zeros(len(video)), dtype)
        off_VFD = (kept.frames_VFD - mean_VD[:, None]).masked_fill(~video.mask_VF[..., None], 0)
        radius_V = off_VFD.norm(dim=-1).amax(dim=1)
        if not self.masks_padding:  # the weights of real frames may add up to less than one
            return Balls.around(mean_VD, torch.maximum(radius_V, mean_VD.norm(dim=-1)), dtype)
        # The covariance of D numbers has the eigenvalues of this F × F matrix.
        gram_VFF = off_VFD @ off_VFD.mT * mean_VF.amax(dim=1)[:, None, None]
        spread_V = torch.linalg.eigvalsh(gram_VFF)[:, -1].clamp_min(0) + SLACK * radius_V.square()
        return Balls.around(mean_VD, radius_V, dtype, spread_V)

    def pooled_radius(self, text_TD: Tensor, pooled: Balls) -> Tensor:
        """How far from the mean frame a text can pool to, [T, V] or [V]: no farther than the ball."""
        return pooled.radius_O

    def bounds(self, text: TextFeatures, cards: BoundCards) -> ScoreBounds:
        pooled, length_T1 = cards.pooled, text.text_TD.double().norm(dim=-1, keepdim=True)
        pooled_sq = square_of(pooled.length_O)
        return cosine_bounds(
            product_interval(text.text_TD, pooled),
            square_of(length_T1),
            pooled_sq,
            angle_of(self.pooled_radius(text.text_TD, pooled), length_of(pooled_sq)),
        )

    def frame_weights(self, text: TextFeatures, video: VideoFeatures | ScoreCards) -> FrameWeights:
        self.check(text, video)
        kept = self.without_padding(features_of(video))
        weights_VFT = self.weights(products(kept.frames_VFD, text.text_TD), kept.mask_VF)
        return FrameWeights(weights_VFT.permute(2, 0, 1))

    @torch.no_grad()
    def pair_vectors(self, text: TextFeatures, video: VideoFeatures) -> PairVectors:
        video = self.without_padding(video)
        text_TVD = text.text_TD[:, None].expand(-1, len(video), -1)
        return PairVectors(text_TVD, self.pool(text.text_TD, video), torch.zeros_like(text_TVD))

    @torch.no_grad()
    def pair_products(self, text: TextFeatures, video: VideoFeatures) -> PairProducts:
        text_TD, pool = full_precision(text.text_TD), self.pool_card(video)
        pooled_sq_VT, text_pooled_VT, _ = self.pool_products(text_TD, pool)
        zero_TV = torch.zeros_like(text_pooled_VT.mT)
        text_sq_TV = text_TD.square().sum(dim=-1)[:, None].expand_as(zero_TV)
        pooled_sq_TV = pooled_sq_VT.mT.expand_as(zero_TV)
        return PairProducts(text_sq_TV, pooled_sq_TV, text_pooled_VT.mT, zero_TV, zero_TV, zero_TV)

    def without_padding(self, video: VideoFeatures) -> VideoFeatures:
        """The videos with padding set to zero, whatever it holds; untouched under the released rule."""
        return video.without_padding() if self.masks_padding else video

    def _pool_card(self, video: VideoFeatures | ScoreCards) -> PoolCard:
        return video.pool if isinstance(video, PooledCards) else self.pool_card(features_of(video))

    def _score_block(self, text_TD: Tensor, pool: PoolCard) -> Tensor:
        """Scores [V, T] of one block."""
        pooled_sq_VT, text_pooled_VT, _ = self.pool_products(text_TD, pool)
        text_sq_T = full_precision(text_TD).square().sum(dim=-1)
        scales = [square.clamp_min(SQUARE_FLOOR).rsqrt() for square in (text_sq_T, pooled_sq_VT)]
        return (text_pooled_VT * scales[0] * scales[1]).clamp(-1, 1)


def mean_weights(mask_VF: Tensor, *, mask_frames: bool, dtype: torch.dtype) -> Tensor:
    """Weights [V, F] of the plain mean: one over the number of real frames, zero on padding.

    >>> mean_weights(torch.tensor([[True, True, False]]), mask_frames=True, dtype=torch.float32)
    tensor([[0.5000, 0.5000, 0.0000]])
    """
    counted_VF = (mask_VF if mask_frames else torch.ones_like(mask_VF)).to(dtype)
    return counted_VF / counted_VF.sum(dim=1, keepdim=True)


def weighted_mean(frames_VFD: Tensor, weights_VF: Tensor) -> Tensor:
    """One vector per video, [V, D]."""
    return (weights_VF[:, None] @ frames_VFD).squeeze(1)
