"""The paper's trust region against what was learned. Shapes: T texts, V videos, D embedding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gare.analysis.gradients import increment_gradients
from gare.analysis.pairs import PairVectors
from gare.objective import symmetric_infonce
from gare.theory.trust_region import coupled_step, learned_step, step_error, uncoupled_step


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


@dataclass(frozen=True)
class LearnedDirection:
    """Increments of a trained model against the best first-order step of the same length from zero."""

    agreement_TV: Tensor
    """Cosine of Delta_ij and −gradient at Delta = 0."""
    loss_plain: float
    loss_learned: float
    loss_uncoupled: float
    """With −|Delta_ij| ĝ_ij in place of the learned increments."""
    loss_coupled: float
    """With one coupled step from the learned increments, radii kept."""
    first_order: float
    """What the coupled step promises to first order: Σ −alpha_ij |g_ij|, never positive."""


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


def compare_direction(vectors: PairVectors, *, temperature: float) -> LearnedDirection:
    """At inference there is no update; but the learned increments can be held to the closed form."""
    increment_TVD = vectors.increment_TVD
    zero_TVD = torch.zeros_like(increment_TVD)
    plain = PairVectors(vectors.own_TVD, vectors.other_TVD, zero_TVD, vectors.corrected_side)
    at_zero_TVD = increment_gradients(plain, temperature=temperature)
    at_learned_TVD = increment_gradients(vectors, temperature=temperature)
    radius_TV = increment_TVD.norm(dim=-1)
    coupled = coupled_step(increment_TVD, at_learned_TVD, radius_TV)
    return LearnedDirection(
        agreement_TV=F.cosine_similarity(increment_TVD, -at_zero_TVD, dim=-1),
        loss_plain=infonce(vectors, zero_TVD, temperature),
        loss_learned=infonce(vectors, increment_TVD, temperature),
        loss_uncoupled=infonce(vectors, uncoupled_step(at_zero_TVD, radius_TV), temperature),
        loss_coupled=infonce(vectors, coupled.increment_TVD, temperature),
        first_order=-float((coupled.length_TV * at_learned_TVD.norm(dim=-1)).sum()),
    )


def infonce(vectors: PairVectors, increment_TVD: Tensor, temperature: float) -> float:
    scores_TV = F.cosine_similarity(vectors.own_TVD + increment_TVD, vectors.other_TVD, dim=-1)
    return float(symmetric_infonce(scores_TV, 1 / temperature))
