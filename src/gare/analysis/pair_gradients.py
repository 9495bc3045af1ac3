"""Where InfoNCE pulls the vectors of a pair, and how an update compares with a step of the trust region.

In L = mean InfoNCE of cos(t_i + Delta_ij, v_ij), t_i is pulled by its positive pair and by all its negative
pairs at once. The two pulls are kept apart, in closed form (`gare.theory`), video vectors and increments held
fixed as in the paper. Shapes: T texts, V videos, D embedding; text i belongs to video i.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gare.analysis.pairs import PairVectors
from gare.objective import symmetric_infonce
from gare.theory.trust_region import Direction, coupled_step, infonce_gradients, learned_step, step_error


@dataclass(frozen=True)
class Pulls:
    """The gradient on each text, split into the part of its positive pair and the part of its negatives."""

    positive_TD: Tensor
    negative_TD: Tensor

    @property
    def total_TD(self) -> Tensor:
        """The whole gradient on each text."""
        return self.positive_TD + self.negative_TD


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


@dataclass(frozen=True)
class StepComparison:
    """One update of the increments: the closed-form step to the new radius, and the real one."""

    analytic_TV: Tensor
    """alpha_ij, with the radius |Delta_ij| after the update."""
    learned_TV: Tensor
    """eta_ij: how far Delta_ij really moved against its gradient."""
    error_TV: Tensor
    feasible_TV: Tensor
    """Whether a point of that radius lies on the line along the gradient at all."""
    loss_before: float
    loss_analytic: float
    """InfoNCE after the closed-form step of every pair for which there is one."""


def compare_step(vectors: PairVectors, after_TVD: Tensor, *, temperature: float) -> StepComparison:
    """The update that took the increments of `vectors` to `after_TVD`."""
    before_TVD = vectors.increment_TVD
    gradient_TVD = increment_gradients(vectors, temperature=temperature)
    step = coupled_step(before_TVD, gradient_TVD, after_TVD.norm(dim=-1))
    learned_TV = learned_step(before_TVD, after_TVD, gradient_TVD)
    moved_TVD = torch.where(step.feasible_TV[..., None], step.increment_TVD, before_TVD)
    return StepComparison(
        analytic_TV=step.length_TV,
        learned_TV=learned_TV,
        error_TV=step_error(learned_TV, step.length_TV),
        feasible_TV=step.feasible_TV,
        loss_before=infonce(vectors, before_TVD, temperature),
        loss_analytic=infonce(vectors, moved_TVD, temperature),
    )


def infonce(vectors: PairVectors, increment_TVD: Tensor, temperature: float) -> float:
    """The symmetric InfoNCE of a batch with other increments in place of its own."""
    scores_TV = F.cosine_similarity(vectors.own_TVD + increment_TVD, vectors.other_TVD, dim=-1)
    return float(symmetric_infonce(scores_TV, 1 / temperature))
