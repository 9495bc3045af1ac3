"""Where InfoNCE pulls a text, and how much of that pull cancels.

In L = mean InfoNCE of cos(t_i + Delta_ij, v_ij), t_i is pulled by its positive pair and by all its negative
pairs at once. The probe keeps the two pulls apart, in closed form (`gare.theory`), video vectors and
increments held fixed as in the paper. Shapes: T texts, V videos, D embedding; text i belongs to video i.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gare.analysis.pairs import PairVectors, negatives, positives
from gare.theory.trust_region import Direction, infonce_gradients


@dataclass(frozen=True)
class Pulls:
    """The gradient on each text, split into the part of its positive pair and the part of its negatives."""

    positive_TD: Tensor
    negative_TD: Tensor

    @property
    def total_TD(self) -> Tensor:
        return self.positive_TD + self.negative_TD


@dataclass(frozen=True)
class DimensionStatistics:
    """Mean and variance over the rows, one number a dimension."""

    mean_D: Tensor
    variance_D: Tensor

    @classmethod
    def of(cls, rows_ND: Tensor) -> DimensionStatistics:
        return cls(rows_ND.mean(dim=0), rows_ND.var(dim=0, correction=0))


def increment_gradients(
    vectors: PairVectors, *, temperature: float, direction: Direction = "symmetric"
) -> Tensor:
    """dL/dDelta_ij, [T, V, D]: the gradient on the shifted vector of the pair, whichever side it is on."""
    shifted_TVD = vectors.own_TVD + vectors.increment_TVD
    origin_TD = shifted_TVD.new_zeros(len(shifted_TVD), shifted_TVD.shape[-1])
    return infonce_gradients(
        origin_TD, shifted_TVD, vectors.other_TVD, temperature=temperature, direction=direction
    ).increment_TVD


def text_pulls(vectors: PairVectors, *, temperature: float, direction: Direction = "symmetric") -> Pulls:
    """dL/dt_i, the sum over its pairs, positive and negatives apart."""
    if vectors.corrected_side == "text":
        gradient_TVD = increment_gradients(vectors, temperature=temperature, direction=direction)
    else:  # the increment is on the video, so the text is the fixed side: its gradient is of the same form
        swapped = PairVectors(
            vectors.other_TVD,
            vectors.own_TVD + vectors.increment_TVD,
            torch.zeros_like(vectors.increment_TVD),
        )
        gradient_TVD = increment_gradients(swapped, temperature=temperature, direction=direction)
    index = torch.arange(len(gradient_TVD))
    positive_TD = gradient_TVD[index, index]
    return Pulls(positive_TD, gradient_TVD.sum(dim=1) - positive_TD)


def cancellation(pulls: Pulls) -> Tensor:
    """|sum| / (|positive| + |negative|) of each text: 0 when the pulls cancel, 1 when they agree.

    >>> east, west = torch.tensor([[1.0, 0.0]]), torch.tensor([[-0.5, 0.0]])
    >>> cancellation(Pulls(east, west))
    tensor([0.3333])
    """
    size_T = pulls.positive_TD.norm(dim=-1) + pulls.negative_TD.norm(dim=-1)
    ratio_T: Tensor = pulls.total_TD.norm(dim=-1) / size_T.clamp_min(torch.finfo(size_T.dtype).tiny)
    return ratio_T


def common_cancellation(pulls: Pulls) -> float:
    """The same of the mean pulls: how much is left of what all texts of a batch are pulled by together.

    This belongs to a figure that draws the mean of each dimension. It says nothing of single texts, whose own
    parts need not cancel.

    >>> there, back = torch.tensor([[1.0, 1.0], [1.0, -1.0]]), torch.tensor([[-1.0, 0.0], [-1.0, 0.0]])
    >>> common_cancellation(Pulls(there, back))
    0.0
    """
    means = (pulls.positive_TD.mean(dim=0, keepdim=True), pulls.negative_TD.mean(dim=0, keepdim=True))
    return float(cancellation(Pulls(*means)))


def opposition(pulls: Pulls) -> Tensor:
    """Cosine between the two pulls of each text: −1 when they point against each other."""
    return F.cosine_similarity(pulls.positive_TD, pulls.negative_TD, dim=-1)


@torch.enable_grad()
def autograd_difference(vectors: PairVectors, *, temperature: float) -> float:
    """Largest difference of closed form and autograd, on increments and on texts, relative to the largest."""
    on_text = vectors.corrected_side == "text"
    increment_TVD = vectors.increment_TVD.detach().double().requires_grad_()
    own_TVD, other_TVD = vectors.own_TVD.double(), vectors.other_TVD.double()
    doubled = PairVectors(own_TVD, other_TVD, increment_TVD.detach(), vectors.corrected_side)
    text_TD = (own_TVD if on_text else other_TVD)[:, 0].clone().requires_grad_()
    text_TVD = text_TD[:, None].expand_as(own_TVD)
    own_TVD, other_TVD = (text_TVD, other_TVD) if on_text else (own_TVD, text_TVD)
    logits_TV = F.cosine_similarity(own_TVD + increment_TVD, other_TVD, dim=-1) / temperature
    target = torch.arange(len(logits_TV))
    loss = (F.cross_entropy(logits_TV, target) + F.cross_entropy(logits_TV.mT, target)) / 2
    expected = torch.autograd.grad(loss, (increment_TVD, text_TD))
    pulls = text_pulls(doubled, temperature=temperature)
    actual = (increment_gradients(doubled, temperature=temperature), pulls.total_TD)
    differences = []
    for found, wanted in zip(actual, expected, strict=True):
        scale = wanted.abs().max()
        differences.append((found - wanted).abs().max() / scale.where(scale > 0, torch.ones_like(scale)))
    return float(torch.stack(differences).max())


@dataclass(frozen=True)
class GradientNorms:
    """|dL/dDelta_ij|, mean over the pairs of a kind."""

    positive: float
    negative: float

    @classmethod
    def of(cls, gradient_TVD: Tensor) -> GradientNorms:
        norm_TV = gradient_TVD.norm(dim=-1)
        return cls(float(positives(norm_TV).mean()), float(negatives(norm_TV).mean()))
