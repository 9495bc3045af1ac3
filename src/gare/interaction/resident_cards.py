"""What a GPU keeps of a video to bound its scores: keys, mean frame and increment at even attention as bytes.

The bounds are those of `increment_keys.py`, from the same few products. Two things differ, so that a kernel
can read the cards at the speed of memory:

- Vectors are integers with a scale each, keys of one byte or two, the other two of two. Their products with a
  text that is rounded to two bytes as well are integers, and exact.
- What follows is computed in float32. An increment is the known one at even attention plus a difference: its
  forms lose next to nothing where it is short.

`docs/proof.md` has the derivation, and what rounding adds. Shapes: V videos, F frames, H heads, A = H × F
atoms, D embedding, T texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gare.interaction.increment_ball import increment_range
from gare.interaction.increment_keys import TokenKeys
from gare.interaction.pooled_cosine import mean_weights, weighted_mean
from gare.interaction.score_bounds import SLACK, Balls, BoundCards, IncrementSlabs
from gare.interaction.score_cards import map_tensors
from gare.types import Rows, VideoFeatures

if TYPE_CHECKING:
    from gare.interaction.gap_aware_bounds import GapAwareBounds

ROUND = 2.0**-19
"""More than a few operations in float32, or a sum of 16 numbers, lose of what they add up."""
FORM_ROUNDING = 2.0**-16
"""What a quadratic form of up to 64 numbers in float32 can be off, as a share of its largest value."""
EXTRA_ROWS = 4
"""High and low bytes of the mean frame and of the increment at even attention."""
NUM_ROWS = 7
"""Rows over the atoms of a video, before its numbers."""
NUM_NUMBERS = 29
"""Numbers of a video before those of its heads."""
_LOST = 2.0**-20  # float32 rounds to 2**-24
_UP = 1 + _LOST
_MOST = 1e18  # whose square is a float32 still
_MOST_WORD = 127 * 256 + 127
_MOST_BYTE = 127


@dataclass(frozen=True)
class ResidentCards:
    """Keys and the two vectors of each video as integers, and what turns their products into bounds."""

    high_VSD: Tensor
    """int8: the keys (their high bytes, where they have two), then high and low bytes of the two vectors."""
    low_VAD: Tensor | None
    """int8: the low bytes of the keys; None where a key has one."""
    numbers_VK: Tensor
    """float32: rows over the atoms, numbers, numbers for each head, lower triangles of three matrices. See
    `make_resident`."""
    shared_K: Tensor
    """float32, for all videos: |c|² / D, |scaled|², ε, |c| / √D, |scaled|."""
    num_frames: int
    num_heads: int

    def __len__(self) -> int:
        return len(self.numbers_VK)

    def __getitem__(self, rows: Rows) -> ResidentCards:
        return map_tensors(self, lambda tensor: tensor[rows], owners_only=True)

    @property
    def num_bytes(self) -> int:
        """Memory of the cards."""
        tensors = (self.high_VSD, self.low_VAD, self.numbers_VK)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def card_bytes(num_frames: int, num_heads: int, dim: int, *, wide_keys: bool) -> int:
    """Memory of one video's card.

    >>> card_bytes(12, 1, 512, wide_keys=True), card_bytes(12, 1, 512, wide_keys=False)
    (15736, 9592)
    """
    num_atoms = num_frames * num_heads
    triangles = 3 * num_atoms * (num_atoms + 1) // 2
    numbers = NUM_ROWS * num_atoms + NUM_NUMBERS + 3 * num_heads + triangles
    return ((2 if wide_keys else 1) * num_atoms + EXTRA_ROWS) * dim + 4 * numbers


@dataclass(frozen=True)
class TextPlanes:
    """Texts as integers of two bytes, high bytes and low ones, and what that moved them."""

    planes_T2D: Tensor
    numbers_T6: Tensor
    """float32: scale, length, variance and mean over the dimensions, error of a product as a share of the
    other vector's length, squared length."""

    @classmethod
    def round(cls, text_TD: Tensor) -> TextPlanes:
        """Texts in any precision."""
        text_TD = text_TD.double()
        words_TD, scale_T1 = _to_words(text_TD)
        lost_T = (words_TD * scale_T1 - text_TD).norm(dim=-1)
        length_T = text_TD.norm(dim=-1)
        variance_T, level_T = text_TD.var(dim=-1, correction=0), text_TD.mean(dim=-1)
        error_T = (lost_T + ROUND * length_T) * _UP
        numbers = [scale_T1[:, 0], length_T * _UP, variance_T, level_T, error_T, length_T.square()]
        return cls(_bytes_of(words_TD, dim=1), torch.stack(numbers, dim=1).float().contiguous())


@torch.no_grad()
def make_resident(bounds: GapAwareBounds, video: VideoFeatures, *, wide_keys: bool) -> ResidentCards:
    """The cards of videos; `wide_keys` gives a key two bytes a number, not one."""
    context_VFD, attended_VF = bounds.context(video)
    net = bounds.net
    keys = TokenKeys.fold(context_VFD, attended_VF, net)
    forms, num_heads = keys.forms, net.num_heads
    attended_VA = attended_VF[:, None].expand(-1, num_heads, -1).flatten(1)
    constant3, scaled_sq, _, _, eps = forms.constants_OK[0]
    roots = constant3.clamp_min(0).sqrt(), scaled_sq.clamp_min(0).sqrt()

    # The two vectors: the mean frame, and the increment at (nearly) even attention, by its coefficients.
    mean_VF = mean_weights(video.mask_VF, mask_frames=bounds.config.mask_frames, dtype=torch.float64)
    kept = bounds.pooling.without_padding(video)
    mean_VD = weighted_mean(kept.frames_VFD.double(), mean_VF)
    even_VA = attended_VA.double() / attended_VF.sum(dim=1, keepdim=True)
    sigma2_V = (_form(forms.gram2_OAA, even_VA).clamp_min(0) + eps).sqrt()
    square3_V = _form(forms.gram3_OAA, even_VA) + sigma2_V * (forms.linear3_OA * even_VA).sum(dim=1)
    divisor_V = ((square3_V + sigma2_V.square() * constant3).clamp_min(0) + eps * sigma2_V.square()).sqrt()
    inverse_V = (1 / divisor_V).float().double() / attended_VF.sum(dim=1)
    inverse_V = inverse_V.float().double()  # the coefficients are what the kernel reads
    share_V = (sigma2_V / divisor_V).float().double()
    y_VA = attended_VA.double() * inverse_V[:, None]
    free_VD = torch.einsum("va,vad->vd", y_VA, keys.atom_OAD) + share_V[:, None] * keys.scaled_D
    even_VD = free_VD + keys.fixed_D
    mean_words_VD, mean_scale_V1 = _to_words(mean_VD)
    even_words_VD, even_scale_V1 = _to_words(even_VD)
    stored_mean_VD, stored_even_VD = mean_words_VD * mean_scale_V1, even_words_VD * even_scale_V1
    moved_V = (stored_mean_VD - mean_VD).norm(dim=-1)
    balls = bounds.pooling.pooled_balls(video, torch.float64)

    # Keys, one byte or two.
    to_integers = _to_words if wide_keys else _to_bytes
    integers_VAD, scale_VA1 = to_integers(keys.key_OAD)
    stored_VAD = integers_VAD * scale_VA1
    key_moved_VA = (stored_VAD - keys.key_OAD).norm(dim=-1).masked_fill(~attended_VA, 0)
    length_VA = stored_VAD.norm(dim=-1).masked_fill(~attended_VA, 0)
    planes_V2AD = _bytes_of(integers_VAD, dim=1) if wide_keys else integers_VAD.to(torch.int8)[:, None]
    vectors = [_bytes_of(words_VD, dim=1) for words_VD in (mean_words_VD, even_words_VD)]

    reach_V = forms.most_O * inverse_V * attended_VF.sum(dim=1) + share_V * roots[1]
    sign = bounds.sign
    # The kernel knows all of these by their places.
    rows = [  # scale of the key, key·mean, bias of the logit, linear part of LN3; then products of the atoms
        scale_VA1[..., 0],
        sign * torch.einsum("vad,vd->va", keys.key_OAD, mean_VD),
        keys.bias_OA.masked_fill(~attended_VA, -torch.inf),
        forms.linear3_OA,
        torch.einsum("vad,vd->va", keys.atom_OAD, even_VD),
        torch.einsum("vad,vd->va", keys.atom_OAD, stored_mean_VD),
        forms.atom_scaled_OA,
    ]
    numbers = [
        mean_scale_V1[:, 0],
        even_scale_V1[:, 0],
        key_moved_VA.amax(dim=1) * _UP,
        length_VA.amax(dim=1) * _UP,
        mean_VD.var(dim=-1, correction=0),
        mean_VD.mean(dim=-1),
        moved_V * _UP,
        stored_mean_VD.norm(dim=-1),
        (balls.radius_O + moved_V) * _UP,
        balls.spread_O * _UP,
        # Where padding may take weight, the ball is all that is known of pooled frames, whatever the text.
        (balls.moved_O + moved_V) * _UP if bounds.config.mask_frames else torch.full_like(moved_V, 1e20),
        (stored_even_VD - even_VD).norm(dim=-1) * _UP,
        even_VD.square().sum(dim=-1),
        inverse_V,
        share_V,
        free_VD.norm(dim=-1) * _UP,
        reach_V * _UP,
        even_VD @ keys.scaled_D,
        stored_mean_VD @ keys.scaled_D,
        (stored_mean_VD * even_VD).sum(dim=-1),
        forms.most2_O * _UP,
        forms.most3_O * _UP,
        forms.most_O * _UP,
        keys.bias_OA.masked_fill(~attended_VA, 0).abs().amax(dim=1) * _UP,
        *_first_rung(bounds, video, stored_mean_VD, stored_even_VD),
    ]
    assert (len(rows), len(numbers)) == (NUM_ROWS, NUM_NUMBERS)
    widths = [width_VH * _UP for width_VH in (forms.wide2_OH, forms.wide3_OH, forms.wide_OH)]
    lower = torch.tril_indices(attended_VA.shape[1], attended_VA.shape[1], device=attended_VA.device)
    grams = (forms.gram2_OAA, forms.gram3_OAA, forms.gram_OAA)
    triangles = [gram[:, lower[0], lower[1]] for gram in grams]
    return ResidentCards(
        high_VSD=torch.cat([planes_V2AD[:, 0], *vectors], dim=1),
        low_VAD=planes_V2AD[:, 1].contiguous() if wide_keys else None,
        numbers_VK=torch.cat([*rows, torch.stack(numbers, dim=1), *widths, *triangles], dim=1).float(),
        shared_K=torch.stack([constant3, scaled_sq, eps, *(root * _UP for root in roots)]).float(),
        num_frames=attended_VF.shape[1],
        num_heads=num_heads,
    )


def _first_rung(
    bounds: GapAwareBounds, video: VideoFeatures, mean_VD: Tensor, even_VD: Tensor
) -> list[Tensor]:
    """Where all increments of a video are, whatever the text, around its two vectors as they are stored: the
    radius of their ball, their least and largest product with the mean frame, and squared length."""
    reach = increment_range(*bounds.context(video), bounds.net)
    away_V = (even_VD - reach.centre_OD).norm(dim=-1) * (1 + SLACK)
    radius_V, none_V = (reach.radius_O + away_V) * (1 + SLACK), torch.zeros_like(away_V)
    pooled = Balls(mean_VD, none_V, mean_VD.norm(dim=-1), none_V, none_V)
    increment = Balls(even_VD, radius_V, even_VD.norm(dim=-1), none_V, none_V)
    slabs = BoundCards.join(pooled, increment, IncrementSlabs(reach.square(), reach.along(mean_VD))).slabs
    assert slabs is not None
    with_mean, square = slabs.with_pooled, slabs.square
    numbers = [
        radius_V * _UP,
        with_mean.low - _LOST * with_mean.low.abs(),
        with_mean.high + _LOST * with_mean.high.abs(),
        square.low * (1 - _LOST),
        square.high * _UP,
    ]
    # What float32 cannot hold, or is not a number, is infinite where it is too large for a bound.
    outwards = (torch.inf, -torch.inf, torch.inf, 0.0, torch.inf)
    return [
        number_V.where(number_V.abs() < _MOST, open_end)
        for number_V, open_end in zip(numbers, outwards, strict=True)
    ]


def _to_words(x: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers of two bytes, as float64, and the scale of each vector, a float32."""
    return _to_integers(x, _MOST_WORD)


def _to_bytes(x: Tensor) -> tuple[Tensor, Tensor]:
    return _to_integers(x, _MOST_BYTE)


def _to_integers(x: Tensor, most: int) -> tuple[Tensor, Tensor]:
    scale = (x.abs().amax(dim=-1, keepdim=True) / most * _UP).clamp_min(1e-30).float().double()
    return (x / scale).round(), scale


def _bytes_of(words: Tensor, dim: int) -> Tensor:
    """High and low bytes, int8, in a new dimension: a word is 256 times the first plus the second."""
    high = ((words + 128) / 256).floor()
    return torch.stack([high, words - 256 * high], dim=dim).to(torch.int8)


def _form(gram_VAA: Tensor, x_VA: Tensor) -> Tensor:
    return torch.einsum("va,vab,vb->v", x_VA, gram_VAA.double(), x_VA)
