"""GARE's bounds as a ladder: the ball of a video's increments, then its keys.

The ball needs two products a pair and says where the increment can be for any text. Keys need one product a
frame more, and say where it is for this text, but for its product with the text. Where the net attends over
words, both belong to the text, and a video needs its mean frame alone. `docs/proof.md` proves both.

Shapes: T texts, V videos, F frames, W words, D embedding; O owners, A atoms, P others as in `increment_keys`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from gare.interaction.increment_ball import IncrementRange, increment_range
from gare.interaction.increment_keys import (
    FrameKeys,
    GapCards,
    KeyCards,
    PairIncrements,
    StoredKeys,
    TokenKeys,
    gap_scale,
    pair_increments,
    scaled_logits,
)
from gare.interaction.increment_net import IncrementWeights
from gare.interaction.pooled_cosine import PooledCosine, mean_weights, weighted_mean
from gare.interaction.score_bounds import (
    LEAST_LENGTH,
    SLACK,
    Balls,
    BoundCards,
    IncrementSlabs,
    Interval,
    ScoreBounds,
    angle_of,
    cosine_bounds,
    length_of,
    product_interval,
    square_of,
)
from gare.types import TextFeatures, VideoFeatures

if TYPE_CHECKING:
    from gare.interaction.gap_aware import GapAwareConfig


@dataclass(frozen=True)
class _Known:
    """What a rung knows of increments: a vector near each, its products, and how far off it may be. [T, V]"""

    square: Interval
    with_text: Interval
    with_pooled: Interval
    radius: Tensor


@dataclass(frozen=True)
class GapAwareBounds:
    """The bounds of GARE's scores; the query of its net is the gap."""

    config: GapAwareConfig
    pooling: PooledCosine
    net: IncrementWeights

    # --- cards ----------------------------------------------------------------------------------------------

    def ball_cards(self, video: VideoFeatures, dtype: torch.dtype) -> BoundCards:
        """The two vectors of each video."""
        pooled = self.pooling.pooled_balls(video, dtype)
        if self.config.context == "words":
            return BoundCards(pooled)
        reach = increment_range(*self.context(video), self.net)
        slabs = self._slabs(reach, pooled.centre_OD.double())
        return BoundCards.join(pooled, self._increment_balls(reach, dtype), slabs)

    def key_cards(self, video: VideoFeatures, cards: BoundCards, dtype: torch.dtype) -> KeyCards:
        """The keys of each video, beside the two vectors as they are stored."""
        kept = self.pooling.without_padding(video)
        mean_VF = mean_weights(video.mask_VF, mask_frames=self.config.mask_frames, dtype=torch.float64)
        mean_VD = weighted_mean(kept.frames_VFD.double(), mean_VF)
        gap = GapCards.of(mean_VD, cards.pooled)
        if cards.increment is None:
            return KeyCards(gap, None)
        keys = TokenKeys.fold(*self.context(video), self.net)
        frames = FrameKeys(
            stored=StoredKeys.round(keys.key_OAD, dtype),
            key_mean_OA=torch.einsum("oad,od->oa", keys.key_OAD, mean_VD),
            bias_OA=keys.bias_OA,
            forms=keys.forms,
            pooled=keys.row(cards.pooled.centre_OD),
            even=keys.row(cards.increment.centre_OD),
        )
        return KeyCards(gap, frames)

    def context(self, video: VideoFeatures) -> tuple[Tensor, Tensor]:
        """The frames that the net attends over, and which of them."""
        kept = self.pooling.without_padding(video)
        return kept.frames_VFD, video.mask_VF if self.config.mask_frames else torch.ones_like(video.mask_VF)

    def _increment_balls(self, reach: IncrementRange, dtype: torch.dtype) -> Balls:
        centre_OD, radius_O = reach.centre_OD, reach.radius_O
        if self.config.normalise:
            radius_O = _unit_radius(radius_O, centre_OD.norm(dim=-1))
            centre_OD = F.normalize(centre_OD, dim=-1)
        return Balls.around(centre_OD, radius_O, dtype)

    def _slabs(self, reach: IncrementRange, pooled_OD: Tensor) -> IncrementSlabs:
        square, with_pooled = reach.square(), reach.along(pooled_OD)
        if not self.config.normalise:
            return IncrementSlabs(square, with_pooled)
        has_direction = length_of(square).low > LEAST_LENGTH
        square, (with_pooled,) = _unit_length(square, [with_pooled])
        most_O = pooled_OD.norm(dim=-1) * (1 + SLACK)  # a product with a vector of length one
        low_O = torch.where(has_direction, with_pooled.low, -most_O)
        return IncrementSlabs(square, Interval(low_O, torch.where(has_direction, with_pooled.high, most_O)))

    # --- the two rungs --------------------------------------------------------------------------------------

    def by_ball(self, text: TextFeatures, cards: BoundCards) -> ScoreBounds:
        """From two products a pair."""
        text_TD, text_pooled = text.text_TD, product_interval(text.text_TD, cards.pooled)
        if cards.increment is not None:
            assert cards.between_O is not None
            scale = cards.increment.length_O * cards.pooled.length_O
            known = _Known(
                square_of(cards.increment.length_O),
                product_interval(text_TD, cards.increment),
                Interval.of(cards.between_O, SLACK * scale),
                cards.increment.radius_O,
            )
            slabs = self._between_slabs(text_TD, cards.increment, known.with_text, cards.slabs)
        else:  # the words of a text: one ball a text
            reach = increment_range(text.words_TWD, text.mask_TW, self.net)
            balls = self._increment_balls(reach, torch.float64)
            own_T1 = torch.linalg.vecdot(text_TD.double(), balls.centre_OD)[:, None]
            scale = text_TD.double().norm(dim=-1, keepdim=True) * balls.length_O[:, None]
            known = _Known(
                square_of(balls.length_O[:, None]),
                Interval.of(own_T1, SLACK * scale),
                product_interval(balls.centre_OD, cards.pooled),
                balls.radius_O[:, None],
            )
            slabs = []
        return self._bounds(text_TD, cards.pooled, text_pooled, known, *slabs)

    def _between_slabs(
        self, text_TD: Tensor, increment: Balls, text_even: Interval, slabs: IncrementSlabs | None
    ) -> list[_Known]:
        """The same increments by their slabs: only their product with the text is left to the ball."""
        assert slabs is not None
        length_T1 = text_TD.double().norm(dim=-1, keepdim=True) * (1 + SLACK)
        with_text = text_even.widened(length_T1 * increment.radius_O)
        return [_Known(slabs.square, with_text, slabs.with_pooled, torch.zeros_like(increment.radius_O))]

    def by_keys(self, text: TextFeatures, cards: BoundCards, keys: KeyCards) -> ScoreBounds:
        """From a product with every key besides; from products of words with the mean frame."""
        text_pooled = product_interval(text.text_TD, cards.pooled)
        scale_TV = gap_scale(text_pooled, text.text_TD, keys.gap, self.net.eps)
        if keys.frames is not None:
            known = self._over_frames(text.text_TD, cards, keys.frames, scale_TV)
        else:
            known = self._over_words(text, cards.pooled, keys.gap, scale_TV)
        return self._bounds(text.text_TD, cards.pooled, text_pooled, known)

    def _over_frames(self, text_TD: Tensor, cards: BoundCards, keys: FrameKeys, scale_TV: Interval) -> _Known:
        product_VAT, error_VAT = keys.stored.products(text_TD)
        gap_VAT = self.sign * (keys.key_mean_OA[..., None] - product_VAT)
        logits_VAT, error_VAT = scaled_logits(gap_VAT, error_VAT, scale_TV.mT)
        found = pair_increments(logits_VAT + keys.bias_OA[..., None], error_VAT, keys.forms)
        assert cards.increment is not None
        square, (pooled, even), radius = self._normalised(
            found.square_OP, [found.along(keys.pooled), found.along(keys.even)], found
        )
        # The product with the text is open: that of the stored increment, give or take the distance to it.
        even_sq = square_of(cards.increment.length_O)
        apart_VT = (square.high - 2 * even.low + even_sq.high[:, None]).clamp_min(0).sqrt() * (1 + SLACK)
        text_even = product_interval(text_TD, cards.increment)
        open_TV = text_TD.double().norm(dim=-1, keepdim=True) * apart_VT.mT
        with_text = Interval(text_even.low - open_TV, text_even.high + open_TV)
        return _Known(square.mT, with_text, pooled.mT, radius.mT)

    def _over_words(self, text: TextFeatures, pooled: Balls, gap: GapCards, scale_TV: Interval) -> _Known:
        """The owner is the text, so its product with the increment is known as well."""
        keys = TokenKeys.fold(text.words_TWD, text.mask_TW, self.net)
        text_TD = text.text_TD.double()
        own_TA1 = torch.einsum("tad,td->ta", keys.key_OAD, text_TD)[..., None]
        product_TAV, error_TAV = _row_products(keys.key_OAD, pooled)
        error_TAV = error_TAV + keys.key_OAD.norm(dim=-1)[..., None] * gap.moved_O
        logits_TAV, error_TAV = scaled_logits(self.sign * (product_TAV - own_TA1), error_TAV, scale_TV)
        found = pair_increments(logits_TAV + keys.bias_OA[..., None], error_TAV, keys.forms)
        square, (with_text, with_pooled), radius = self._normalised(
            found.square_OP, [found.along(keys.row(text_TD)), _along_pooled(found, keys, pooled)], found
        )
        return _Known(square, with_text, with_pooled, radius)

    @property
    def sign(self) -> int:
        """The sign of the gap: 1 for video minus text, −1 for text minus video."""
        return 1 if self.config.gap_direction == "video_minus_text" else -1

    def _normalised(
        self, square: Interval, products: list[Interval], found: PairIncrements
    ) -> tuple[Interval, list[Interval], Tensor]:
        """The same for increments of length one, where the settings ask for them."""
        if not self.config.normalise:
            return square, products, found.radius_OP
        radius_OP = _unit_radius(found.radius_OP, length_of(square).low)
        return *_unit_length(square, products), radius_OP

    def _bounds(self, text_TD: Tensor, pooled: Balls, text_pooled: Interval, *ways: _Known) -> ScoreBounds:
        """The cosine from all products of text, pooled video and increment; the narrowest of several ways."""
        text_sq = square_of(text_TD.double().norm(dim=-1, keepdim=True))
        pooled_sq, pooled_radius = square_of(pooled.length_O), self.pooling.pooled_radius(text_TD, pooled)
        found = []
        for known in ways:
            if self.config.corrected_side == "text":
                shifted_sq = text_sq + known.with_text.doubled() + known.square
                width = angle_of(known.radius, length_of(shifted_sq))
                width = width + angle_of(pooled_radius, length_of(pooled_sq))
                found.append(cosine_bounds(text_pooled + known.with_pooled, shifted_sq, pooled_sq, width))
            else:
                shifted_sq = pooled_sq + known.with_pooled.doubled() + known.square
                width = angle_of(known.radius + pooled_radius, length_of(shifted_sq))
                found.append(cosine_bounds(text_pooled + known.with_text, text_sq, shifted_sq, width))
        return functools.reduce(ScoreBounds.narrowed, found)


def _unit_length(square: Interval, products: list[Interval]) -> tuple[Interval, list[Interval]]:
    """The same of increments that are made one long."""
    length = length_of(square)
    least = length.low.clamp_min(LEAST_LENGTH)
    over = Interval(1 / length.high.clamp_min(LEAST_LENGTH), 1 / least)
    return square_of(torch.ones_like(least)), [product.times(over) for product in products]


def _unit_radius(radius: Tensor, length: Tensor) -> Tensor:
    """The ball of the directions of all vectors in a ball, as far as they are from that of its centre."""
    is_one_sided = radius + LEAST_LENGTH < length
    angle = (radius / length.clamp_min(1e-30)).clamp_max(1).asin()
    return torch.where(is_one_sided, 2 * (angle / 2).sin(), torch.full_like(angle, 2))


def _row_products(rows_OAD: Tensor, pooled: Balls) -> tuple[Tensor, Tensor]:
    """Products [O, A, V] of float64 rows with stored mean frames, and how far they may be off."""
    found = product_interval(rows_OAD.flatten(0, 1), pooled)
    shape = rows_OAD.shape[:2]
    value_OAV = ((found.high + found.low) / 2).unflatten(0, shape)
    return value_OAV, ((found.high - found.low) / 2).unflatten(0, shape)


def _along_pooled(found: PairIncrements, keys: TokenKeys, pooled: Balls) -> Interval:
    """The product of increments over words with stored mean frames, [T, V]."""
    atom_TAV, error_TAV = _row_products(keys.atom_OAD, pooled)
    fixed_2V, error_2V = _row_products(torch.stack([keys.scaled_D, keys.fixed_D])[None], pooled)
    value_TV = (found.y_OAP * atom_TAV).sum(dim=1) + found.share_OP * fixed_2V[0, 0] + fixed_2V[0, 1]
    error_TV = (found.y_OAP * error_TAV).sum(dim=1) + found.share_OP * error_2V[0, 0] + error_2V[0, 1]
    return Interval.of(value_TV, error_TV + SLACK * pooled.length_O * found.reach_OP)
