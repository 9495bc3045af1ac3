"""Radii, the lengths of increments, should differ from pair to pair. Shapes: T texts, V videos."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from gare.errors import check_choice
from gare.objective.direction import log_mean_exp


def radius_spread(
    radius_TV: Tensor, *, cap: float = 0.5, variant: Literal["variance", "lse"] = "variance"
) -> Tensor:
    """Lower is more spread.

    "variance" is max(−mean_i Var_j r_ij, −cap): no gradient once the variance has reached the cap.
    "lse" is mean_i log mean_jk exp(−(r_ij − r_ik)²): the same pull, strongest on equal radii and fading.
    """
    check_choice("variant", variant, ("variance", "lse"))
    if radius_TV.shape[1] < 2:
        raise ValueError("the spread of radii needs at least two videos in the batch, got one")
    if variant == "variance":
        return -radius_TV.var(dim=1).mean().clamp(max=cap)
    difference_TVV = radius_TV[:, :, None] - radius_TV[:, None]
    return log_mean_exp(-difference_TVV.square()).mean()
