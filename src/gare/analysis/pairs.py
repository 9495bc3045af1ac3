"""The vectors of every pair of a batch, and the inner products of every pair of a split.

The increment is added to one side of a pair, its *own* vector c (the text, or with corrected_side = "video"
the pooled video); the *other* vector is o. The gap is o − c. Probes are written in these terms, so they serve
both sides.

Shapes: T texts, V videos, D embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from gare.errors import EvaluationError
from gare.model import GARE
from gare.model.increment import IncrementNet
from gare.model.pooling import CrossAttentionPool
from gare.scoring import dense, factored
from gare.scoring.cards import increment_card
from gare.scoring.factored import PairProducts
from gare.scoring.few import QueryFirst
from gare.scoring.pooling import without_padding
from gare.types import IncrementWeights, TextFeatures, VideoFeatures

BLOCK = 64


@dataclass(frozen=True)
class PairVectors:
    """Every pair of a small batch: T × V × D numbers."""

    own_TVD: Tensor
    other_TVD: Tensor
    increment_TVD: Tensor
    """Zero for a baseline."""
    corrected_side: str = "text"

    def few(self, number: int) -> PairVectors:
        """The first pairs of the batch among themselves."""
        part = slice(0, number)
        return PairVectors(
            self.own_TVD[part, part],
            self.other_TVD[part, part],
            self.increment_TVD[part, part],
            self.corrected_side,
        )


@torch.no_grad()
def pair_vectors(model: GARE, text: TextFeatures, video: VideoFeatures) -> PairVectors:
    """Text, pooled video and increment of every pair, in the features' precision, without dropout."""
    interaction = model.config.interaction
    check_one_vector(model)
    frames_VFD = without_padding(video.frames_VFD, video.mask_VF, mask_frames=interaction.mask_frames)
    video = VideoFeatures(frames_VFD, video.mask_VF)
    text_TVD = text.text_TD[:, None].expand(-1, len(video), -1)
    if model.pooling_net is not None:
        net = QueryFirst(_weights(model.pooling_net, video))
        pooled_VTD = net(text_TVD.transpose(0, 1), video.frames_VFD, video.mask_VF)
        return PairVectors(text_TVD, pooled_VTD.transpose(0, 1), torch.zeros_like(text_TVD))
    pooled_TVD = dense.pool(text.text_TD, video, interaction)
    if model.increment_net is None:
        return PairVectors(text_TVD, pooled_TVD, torch.zeros_like(text_TVD))
    increment_TVD = increments(model, text, video)
    if interaction.corrected_side == "text":
        return PairVectors(text_TVD, pooled_TVD, increment_TVD, "text")
    return PairVectors(pooled_TVD, text_TVD, increment_TVD, "video")


@torch.no_grad()
def increments(model: GARE, text: TextFeatures, video: VideoFeatures) -> Tensor:
    """Delta_ij of every pair of a block, [T, V, D], in the precision of the features."""
    assert model.increment_net is not None
    psi = QueryFirst(_weights(model.increment_net, video))
    return dense.increments(text, video, psi, model.config.interaction)


def _weights(net: object, video: VideoFeatures) -> IncrementWeights:
    assert isinstance(net, IncrementNet | CrossAttentionPool)
    return net.weights().to(video.frames_VFD.dtype)


def check_one_vector(model: GARE) -> None:
    if model.config.interaction.pooling == "token_wise":
        raise EvaluationError(
            "interaction.pooling = 'token_wise' compares words with frames and has no video vector; "
            "analyse a model with another pooling"
        )


def products_of(vectors: PairVectors) -> PairProducts:
    """The inner products of a batch; `text` and `pooled` stand for own and other."""

    def dot(left_TVD: Tensor, right_TVD: Tensor) -> Tensor:
        return (left_TVD * right_TVD).sum(dim=-1)

    own_TVD, other_TVD, increment_TVD = vectors.own_TVD, vectors.other_TVD, vectors.increment_TVD
    return PairProducts(
        text_sq=dot(own_TVD, own_TVD),
        pooled_sq=dot(other_TVD, other_TVD),
        text_pooled=dot(own_TVD, other_TVD),
        increment_sq=dot(increment_TVD, increment_TVD),
        text_increment=dot(own_TVD, increment_TVD),
        pooled_increment=dot(other_TVD, increment_TVD),
    )


@torch.no_grad()
def split_products(model: GARE, text: TextFeatures, video: VideoFeatures) -> PairProducts:
    """The same for every text with every video, [T, V] each, without any of T × V × D."""
    check_one_vector(model)
    interaction, psi = model.config.interaction, model.increment_net
    parts: list[PairProducts] = []
    if psi is not None and interaction.context == "words":
        pool = model.score_cards(video).pool
        for texts in text.blocks(BLOCK):
            card = increment_card(texts.words_TWD, texts.mask_TW, psi.weights())
            parts.append(
                _full(factored.pair_products(texts, card, pool, interaction), len(texts), len(video))
            )
        return _swapped(_join(parts, dim=0), interaction.corrected_side)
    as_video = model.pooling_net is not None
    for videos in video.blocks(BLOCK):
        cards = model.score_cards(videos)
        rule = factored.AS_INCREMENT if as_video else interaction
        found = _full(factored.pair_products(text, cards.increment, cards.pool, rule), len(videos), len(text))
        parts.append(_map(found, lambda x: x.mT))
    products = _join(parts, dim=1)
    if as_video:  # cross-attention gives the video vector, at length one
        zero_TV = torch.zeros_like(products.text_sq)
        return PairProducts(
            products.text_sq,
            torch.ones_like(zero_TV),
            torch.as_tensor(products.text_increment),
            zero_TV,
            zero_TV,
            zero_TV,
        )
    return _swapped(products, interaction.corrected_side)


def _full(products: PairProducts, rows: int, columns: int) -> PairProducts:
    """Every product as a whole matrix: some come as a row, some as the number 0."""
    like = products.text_pooled
    return _map(
        products, lambda x: torch.as_tensor(x, dtype=like.dtype, device=like.device).expand(rows, columns)
    )


def _map(products: PairProducts, function: Callable[[Tensor], Tensor]) -> PairProducts:
    return PairProducts(**{name: function(value) for name, value in vars(products).items()})


def _join(parts: list[PairProducts], *, dim: int) -> PairProducts:
    return PairProducts(
        **{name: torch.cat([getattr(part, name) for part in parts], dim=dim) for name in vars(parts[0])}
    )


def _swapped(products: PairProducts, corrected_side: str) -> PairProducts:
    if corrected_side == "text":
        return products
    return replace(
        products,
        text_sq=products.pooled_sq,
        pooled_sq=products.text_sq,
        text_increment=products.pooled_increment,
        pooled_increment=products.text_increment,
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
    """Between Delta and o − c; not a number where there is no increment."""
    angle_to_own: Tensor
    """Between Delta and c."""


def pair_geometry(products: PairProducts) -> PairGeometry:
    own_sq, other_sq = torch.as_tensor(products.text_sq), torch.as_tensor(products.pooled_sq)
    increment_sq = torch.as_tensor(products.increment_sq)
    own_increment, other_increment = (
        torch.as_tensor(products.text_increment),
        torch.as_tensor(products.pooled_increment),
    )
    shifted_sq = (own_sq + 2 * own_increment + increment_sq).clamp_min(0)
    gap_sq = (own_sq + other_sq - 2 * products.text_pooled).clamp_min(0)
    gap_increment = other_increment - own_increment
    radius, gap = increment_sq.sqrt(), gap_sq.sqrt()
    own_norm, other_norm, shifted_norm = own_sq.sqrt(), other_sq.sqrt(), shifted_sq.sqrt()

    def angle(product: Tensor, *norms: Tensor) -> Tensor:
        return torch.rad2deg((product / (norms[0] * norms[1])).clamp(-1, 1).acos())

    return PairGeometry(
        plain_cosine=(products.text_pooled / (own_norm * other_norm)).clamp(-1, 1),
        cosine=((products.text_pooled + other_increment) / (shifted_norm * other_norm)).clamp(-1, 1),
        own_norm=own_norm,
        shifted_norm=shifted_norm,
        radius=radius,
        distance=gap,
        shifted_distance=(gap_sq - 2 * gap_increment + increment_sq).clamp_min(0).sqrt(),
        angle_to_gap=angle(gap_increment, radius, gap),
        angle_to_own=angle(own_increment, radius, own_norm),
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
    return F.normalize(x, dim=-1)
