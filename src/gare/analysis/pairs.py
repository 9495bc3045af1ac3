"""The vectors of a pair and what follows from them: inner products, lengths, distances, angles.

The increment is added to one side of a pair, its *own* vector c (the text, or with corrected_side = "video"
the pooled video); the *other* vector is o. The gap is o − c. Probes are written in these terms, so they serve
both sides.

Shapes: T texts, V videos, D embedding; text i belongs to video i.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gare.interaction.interaction import PairProducts, PairVectors, products_of
from gare.model import GARE
from gare.types import TextFeatures, VideoFeatures

__all__ = [
    "PairGeometry",
    "PairProducts",
    "PairVectors",
    "negatives",
    "pair_geometry",
    "positives",
    "products_of",
    "split_products",
    "unit",
]

BLOCK = 64


@torch.no_grad()
def split_products(model: GARE, text: TextFeatures, video: VideoFeatures) -> PairProducts:
    """Inner products of every text with every video, [T, V] each, in blocks of the side that owns them."""
    if model.interaction.reads_words:
        parts, dim = [model.interaction.pair_products(texts, video) for texts in text.blocks(BLOCK)], 0
    else:
        parts, dim = [model.interaction.pair_products(text, videos) for videos in video.blocks(BLOCK)], 1
    return PairProducts(
        **{name: torch.cat([getattr(part, name) for part in parts], dim=dim) for name in vars(parts[0])}
    )


@dataclass(frozen=True)
class PairGeometry:
    """Lengths, distances (own to other) and angles (degrees) of every pair, [T, V] each."""

    plain_cosine: Tensor
    """cos(c, o): the score without the increment."""
    cosine: Tensor
    """cos(c + Delta, o): the score."""
    own_norm: Tensor
    shifted_norm: Tensor
    radius: Tensor
    distance: Tensor
    """|o − c|"""
    shifted_distance: Tensor
    """|o − (c + Delta)|"""
    angle_to_gap: Tensor
    """The angle between Delta and o − c; not a number where there is no increment."""
    angle_to_own: Tensor
    """The angle between Delta and c."""


def pair_geometry(products: PairProducts) -> PairGeometry:
    """Lengths, distances and angles from inner products alone."""
    shifted_sq = (products.own_sq + 2 * products.own_increment + products.increment_sq).clamp_min(0)
    gap_sq = (products.own_sq + products.other_sq - 2 * products.own_other).clamp_min(0)
    gap_increment = products.other_increment - products.own_increment
    radius, gap = products.increment_sq.sqrt(), gap_sq.sqrt()
    own_norm, other_norm, shifted_norm = products.own_sq.sqrt(), products.other_sq.sqrt(), shifted_sq.sqrt()

    def angle(product: Tensor, *norms: Tensor) -> Tensor:
        return torch.rad2deg((product / (norms[0] * norms[1])).clamp(-1, 1).acos())

    return PairGeometry(
        plain_cosine=(products.own_other / (own_norm * other_norm)).clamp(-1, 1),
        cosine=((products.own_other + products.other_increment) / (shifted_norm * other_norm)).clamp(-1, 1),
        own_norm=own_norm,
        shifted_norm=shifted_norm,
        radius=radius,
        distance=gap,
        shifted_distance=(gap_sq - 2 * gap_increment + products.increment_sq).clamp_min(0).sqrt(),
        angle_to_gap=angle(gap_increment, radius, gap),
        angle_to_own=angle(products.own_increment, radius, own_norm),
    )


def positives(values_TV: Tensor) -> Tensor:
    """The diagonal: text i belongs to video i."""
    return values_TV.diagonal()


def negatives(values_TV: Tensor) -> Tensor:
    """Everything else, row by row.

    >>> negatives(torch.arange(9).view(3, 3)).tolist()
    [1, 2, 3, 5, 6, 7]
    """
    size = len(values_TV)
    return (
        values_TV.flatten()[1:].view(size - 1, size + 1)[:, :-1].reshape(-1) if size > 1 else values_TV[:0, 0]
    )


def unit(x: Tensor) -> Tensor:
    """Vectors at length one."""
    return F.normalize(x, dim=-1)
