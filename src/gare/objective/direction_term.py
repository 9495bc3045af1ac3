"""Increments of one text towards different videos should point different ways.

Shapes: T texts, V videos, D embedding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gare.errors import check_choice
from gare.objective.loss_term import LossTerm, ScoredBatch
from gare.settings import NonNegativeFloat, PositiveFloat

DirectionVariant = Literal["log_mean_exp", "orthogonal", "paper_orthogonal"]


@dataclass(frozen=True)
class DirectionDiversity(LossTerm):
    """The directions of a text's increments differ from video to video."""

    weight: NonNegativeFloat = 0.01
    variant: DirectionVariant = "log_mean_exp"
    """paper_orthogonal divides by B², as the appendix displays it; orthogonal by the pairs, B (B − 1)."""
    sharpness: PositiveFloat = 2.0
    """The larger, the more the closest directions count; used by log_mean_exp alone."""
    log_floor: NonNegativeFloat = 0.0
    """Added inside the logarithm of log_mean_exp; the released code adds 1e-8."""

    def __call__(self, batch: ScoredBatch) -> Tensor | None:
        if batch.pairs.increment_TVD is None:
            return None
        return direction_diversity(
            batch.pairs.increment_TVD,
            sharpness=self.sharpness,
            variant=self.variant,
            log_floor=self.log_floor,
        )


def direction_diversity(
    increment_TVD: Tensor,
    *,
    sharpness: float = 2.0,
    variant: DirectionVariant = "log_mean_exp",
    log_floor: float = 0.0,
) -> Tensor:
    """Closeness of the increment directions of each text, averaged over texts; lower is more diverse.

    "log_mean_exp" is mean_i log(mean_jk exp(−sharpness (1 − z_ij·z_ik)) + log_floor), j = k included.
    "orthogonal" is mean_i mean_{j≠k} (z_ij·z_ik)².
    "paper_orthogonal" is mean_i 1/B² Σ_{j≠k} (z_ij·z_ik)² for B videos, as the paper's appendix displays it.
    """
    check_choice("variant", variant, ("log_mean_exp", "orthogonal", "paper_orthogonal"))
    unit_TVD = F.normalize(increment_TVD, dim=-1)
    cosine_TVV = unit_TVD @ unit_TVD.mT
    if variant == "log_mean_exp":
        log_T = log_mean_exp(-sharpness * (1 - cosine_TVV))
        if log_floor:
            log_T = log_T.logaddexp(log_T.new_tensor(log_floor).log())
        return log_T.mean()
    num_videos = cosine_TVV.shape[-1]
    if num_videos < 2:
        raise ValueError("directions need at least two videos in the batch, got one")
    others_VV = ~torch.eye(num_videos, dtype=torch.bool, device=cosine_TVV.device)
    divisor = num_videos * (num_videos if variant == "paper_orthogonal" else num_videos - 1)
    return (cosine_TVV.square() * others_VV).sum(dim=(1, 2)).mean() / divisor


def log_mean_exp(x_TVV: Tensor) -> Tensor:
    """log of the mean of exp over the last two dimensions, [T]."""
    return x_TVV.flatten(1).logsumexp(dim=1) - math.log(x_TVV.shape[1] * x_TVV.shape[2])
