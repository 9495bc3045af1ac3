"""The relaxed information bottleneck: increments of one video, seen over the texts, stay close to a Gaussian.

Shapes: T texts, V videos, D embedding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from gare.errors import check_choice
from gare.objective.loss_term import LossTerm, ScoredBatch
from gare.settings import NonNegativeFloat, PositiveFloat

STD_FLOOR = 1e-6


@dataclass(frozen=True)
class KlBottleneck(LossTerm):
    """The increments of a video stay close to a Gaussian: a bound on what they tell about the texts."""

    weight: NonNegativeFloat = 0.07
    """Its scale depends on the reduction."""
    reduction: Literal["event", "per_dimension"] = "per_dimension"
    anchor: Literal["video", "text"] = "video"
    """Statistics over the texts of each video, or over the videos of each text."""
    prior_std: PositiveFloat = 1.0
    normalise: bool = False
    """Take the statistics of unit increments."""

    def __call__(self, batch: ScoredBatch) -> Tensor | None:
        if batch.pairs.increment_TVD is None:
            return None
        return kl_bottleneck(
            batch.pairs.increment_TVD,
            anchor=self.anchor,
            prior_std=self.prior_std,
            reduction=self.reduction,
            normalise=self.normalise,
        )


def kl_bottleneck(
    increment_TVD: Tensor,
    *,
    anchor: Literal["video", "text"] = "video",
    prior_std: float = 1.0,
    reduction: Literal["event", "per_dimension"] = "per_dimension",
    normalise: bool = False,
) -> Tensor:
    """KL( N(mu, sigma²) ‖ N(0, prior_std² I) ), averaged over the anchors.

    Args:
        increment_TVD: Delta_ij.
        anchor: "video" takes mu and sigma over the texts for each video, "text" over the videos.
        prior_std: sigma of the prior.
        reduction: "event" sums the dimensions, "per_dimension" averages them: D times smaller.
        normalise: take the statistics of unit increments.
    """
    check_choice("anchor", anchor, ("video", "text"))
    check_choice("reduction", reduction, ("event", "per_dimension"))
    if normalise:
        increment_TVD = F.normalize(increment_TVD, dim=-1)
    over = 0 if anchor == "video" else 1
    if increment_TVD.shape[over] < 2:
        raise ValueError(
            f"the spread of increments needs at least two {('texts', 'videos')[over]} in the batch, got one"
        )
    # Increments of one anchor often differ by a thousandth of their size: measured from one of them, the
    # spread keeps its digits in float32. Neither statistic depends on where it is measured from.
    origin_ND = increment_TVD.select(over, 0).detach()
    offset_TVD = increment_TVD - origin_ND.unsqueeze(over)
    mean_ND = origin_ND + offset_TVD.mean(dim=over)
    std_ND = offset_TVD.std(dim=over) + STD_FLOOR
    kl_ND = (
        math.log(prior_std) - std_ND.log() + (std_ND.square() + mean_ND.square()) / (2 * prior_std**2) - 0.5
    )
    return kl_ND.sum(dim=-1).mean() if reduction == "event" else kl_ND.mean()
