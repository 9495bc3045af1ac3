"""Radii, the lengths of increments, should differ from pair to pair. Shapes: T texts, V videos."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from gare.errors import check_choice
from gare.objective.direction_term import log_mean_exp
from gare.objective.loss_term import LossTerm, ScoredBatch
from gare.settings import NonNegativeFloat, PositiveFloat

RadiusVariant = Literal["variance", "lse", "paper_lse"]
AboveCap = Literal["cap", "zero"]


@dataclass(frozen=True)
class RadiusSpread(LossTerm):
    """The lengths of a text's increments differ from video to video."""

    weight: NonNegativeFloat = 0.01
    variant: RadiusVariant = "variance"
    """paper_lse is the form the appendix displays; lse compares radii two by two."""
    variance_cap: PositiveFloat = 0.5
    """The variance at which the pull ends; used by variance alone."""
    above_cap: AboveCap = "cap"
    """The term's value there: −cap, or zero as the released code logs it. The gradient is zero in both."""

    def __call__(self, batch: ScoredBatch) -> Tensor | None:
        if batch.pairs.increment_TVD is None:
            return None
        radius_TV = batch.pairs.increment_TVD.norm(dim=-1)
        return radius_spread(radius_TV, cap=self.variance_cap, variant=self.variant, above_cap=self.above_cap)


def radius_spread(
    radius_TV: Tensor,
    *,
    cap: float = 0.5,
    variant: RadiusVariant = "variance",
    above_cap: AboveCap = "cap",
) -> Tensor:
    """Lower is more spread.

    "variance" is max(−mean_i Var_j r_ij, −cap): no gradient once the variance is above the cap. With
    `above_cap = "zero"` it is 0 there: the logged loss jumps by cap, and what is learned stays the same.
    "lse" is mean_i log mean_jk exp(−(r_ij − r_ik)²): the same pull, strongest on equal radii and fading.
    "paper_lse" is mean_i log[1 + mean_j exp(−(r_ij − mean_j r_ij)²)], as the paper's appendix displays it.
    """
    check_choice("variant", variant, ("variance", "lse", "paper_lse"))
    check_choice("above_cap", above_cap, ("cap", "zero"))
    if radius_TV.shape[1] < 2:
        raise ValueError("the spread of radii needs at least two videos in the batch, got one")
    if variant == "variance":
        variance = radius_TV.var(dim=1).mean()
        if above_cap == "zero":
            return -variance.where(variance <= cap, 0.0)
        return -variance.clamp(max=cap)
    if variant == "paper_lse":
        from_mean_TV = radius_TV - radius_TV.mean(dim=1, keepdim=True)
        return (-from_mean_TV.square()).exp().mean(dim=1).log1p().mean()
    difference_TVV = radius_TV[:, :, None] - radius_TV[:, None]
    return log_mean_exp(-difference_TVV.square()).mean()
