"""Terms of DiffusionRet (denoising), PIG (pseudo-query) and Video-ColBERT (sigmoid).

Each is a few lines, so they share a file. Shapes: T texts, V videos, both B; text i belongs to video i.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gare.objective.loss_term import LossTerm, ScoredBatch
from gare.settings import PositiveFloat


@dataclass(frozen=True)
class Denoising(LossTerm):
    """The denoised scores of a query single out its own candidate, both ways summed (DiffusionRet)."""

    inverse_temperature: PositiveFloat = 100.0

    def __call__(self, batch: ScoredBatch) -> Tensor | None:
        parts = batch.pairs.parts
        if "denoised_TV" not in parts:
            return None
        both = (parts["denoised_TV"], parts["denoised_VT"])
        losses = [denoising(denoised, self.inverse_temperature) for denoised in both]
        return losses[0] + losses[1]


def denoising(
    denoised_QN: Tensor, inverse_temperature: float = 100.0, target_Q: Tensor | None = None
) -> Tensor:
    """Cross-entropy of denoised scores; the candidate of query i is the i-th unless told."""
    if target_Q is None:
        target_Q = torch.arange(len(denoised_QN), device=denoised_QN.device)
    return F.cross_entropy(inverse_temperature * denoised_QN, target_Q)


@dataclass(frozen=True)
class PseudoQuery(LossTerm):
    """The guess of a video's text is near that text (PIG); the text side is not detached, as published."""

    def __call__(self, batch: ScoredBatch) -> Tensor | None:
        query_BD = batch.pairs.parts.get("pseudo_query_VD")
        if query_BD is None or batch.text is None:
            return None
        return (2 - 2 * F.cosine_similarity(query_BD, batch.text.text_TD, dim=-1)).mean()


@dataclass(frozen=True)
class SigmoidPairs(LossTerm):
    """Each pair alone is right or wrong, on every level (Video-ColBERT, as in SigLIP)."""

    def __call__(self, batch: ScoredBatch) -> Tensor | None:
        parts = batch.pairs.parts
        levels = [x for name, x in parts.items() if name.startswith("sigmoid_scores:")]
        losses = [sigmoid_pairs(x, parts["sigmoid_scale"], parts["sigmoid_bias"]) for x in levels]
        return sum(losses[1:], start=losses[0]) if losses else None


def sigmoid_pairs(scores_BB: Tensor, scale: Tensor | float, bias: Tensor | float) -> Tensor:
    """−(1/B) Σ_ij log σ(z_ij (scale · s_ij + bias)), with z = 1 on the diagonal and −1 elsewhere.

    >>> sigmoid_pairs(torch.zeros(2, 2), 1.0, 0.0)
    tensor(1.3863)
    """
    sign_BB = 2 * torch.eye(len(scores_BB), dtype=scores_BB.dtype, device=scores_BB.device) - 1
    return -F.logsigmoid(sign_BB * (scale * scores_BB + bias)).sum() / len(scores_BB)
