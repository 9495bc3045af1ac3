"""DMAE's terms: hard negatives count twice, and hiding what matters must lower the score by a margin.

Shapes: T texts, V videos, both B; text i belongs to video i.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gare.objective.loss_term import LossTerm, ScoredBatch
from gare.settings import NonNegativeFloat, PositiveFloat

PROBABILITY_FLOOR = 1e-6


@dataclass(frozen=True)
class HardNegative(LossTerm):
    """NegNCE: InfoNCE, and a penalty on negatives that score above a positive."""

    negative_weight: NonNegativeFloat = 0.5

    def __call__(self, batch: ScoredBatch) -> Tensor:
        scores_TV, scale = batch.pairs.scores_TV, batch.logit_scale
        forth = negative_aware(scores_TV, scale, self.negative_weight)
        return (forth + negative_aware(scores_TV.mT, scale, self.negative_weight)) / 2


@dataclass(frozen=True)
class PartialMargin(LossTerm):
    """TPM: a matched pair scores higher than with its important tokens hidden, by a margin."""

    margin: PositiveFloat = 0.6

    def __call__(self, batch: ScoredBatch) -> Tensor | None:
        whole_3B = batch.pairs.parts.get("whole_3B")
        if whole_3B is None:
            return None
        missing_3B = self.margin - whole_3B + batch.pairs.parts["hidden_3B"]
        return missing_3B.clamp_min(0).mean(dim=1).sum()


def negative_aware(scores_BB: Tensor, scale: Tensor | float, negative_weight: float) -> Tensor:
    """−log p_ii, and −log(1 − p_ij) of negatives above the positive of their row or column."""
    share_BB = (scores_BB * scale).softmax(dim=1).clamp(PROBABILITY_FLOOR, 1 - PROBABILITY_FLOOR)
    right_B = scores_BB.diagonal()
    is_hard_BB = (scores_BB > right_B[:, None]) | (scores_BB > right_B)
    is_hard_BB = is_hard_BB & ~torch.eye(len(scores_BB), dtype=torch.bool, device=scores_BB.device)
    penalty_BB = -(1 - share_BB).log() * is_hard_BB
    penalty = penalty_BB.sum() / is_hard_BB.sum().clamp_min(1)
    return -share_BB.diagonal().log().mean() + negative_weight * penalty
