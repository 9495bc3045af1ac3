"""NeighborRetr's terms: central videos count more, everything is matched alike, neighbours keep their order.

Shapes: T texts, V videos, both B; text i belongs to video i.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gare.objective.loss_term import LossTerm, ScoredBatch
from gare.settings import NonNegativeFloat, PositiveFloat, PositiveInt


@dataclass(frozen=True)
class Centrality(LossTerm):
    """InfoNCE in which a text or video near all tokens of the batch counts more."""

    def __call__(self, batch: ScoredBatch) -> Tensor | None:
        parts = batch.pairs.parts
        if "contrastive_weight_T" not in parts:
            return None
        logits_TV = batch.pairs.scores_TV * batch.logit_scale
        forth = -(parts["contrastive_weight_T"] * logits_TV.log_softmax(dim=1).diagonal()).mean()
        back = -(parts["contrastive_weight_V"] * logits_TV.mT.log_softmax(dim=1).diagonal()).mean()
        return (forth + back) / 2


@dataclass(frozen=True)
class UniformMatching(LossTerm):
    """Merged scores follow a transport plan, in which every video is matched as often as any other."""

    temperature: PositiveFloat = 3.0
    """The published option for it (0.1) is never read; the neighbours' 3 is used in its place."""
    plan_share: NonNegativeFloat = 0.7
    iterations: PositiveInt = 50

    def __call__(self, batch: ScoredBatch) -> Tensor | None:
        scores_TV = batch.pairs.parts.get("merged_scores")
        if scores_TV is None:
            return None
        return (self._one_way(scores_TV) + self._one_way(scores_TV.mT)) / 2

    def _one_way(self, scores_BB: Tensor) -> Tensor:
        target_BB = transport_target(scores_BB, self.plan_share, self.iterations)
        return -(target_BB * (self.temperature * scores_BB).log_softmax(dim=1)).sum(dim=1).mean()


@dataclass(frozen=True)
class NeighborAdjusting(LossTerm):
    """Near candidates are partly right, less so where they are near everything."""

    num_neighbors: PositiveInt = 20
    """Nearest candidates; at most three fewer than the batch has."""
    temperature: PositiveFloat = 3.0

    def __call__(self, batch: ScoredBatch) -> Tensor | None:
        parts, scores_TV = batch.pairs.parts, batch.pairs.scores_TV
        number = min(self.num_neighbors, len(scores_TV) - 3)
        if "video_centrality" not in parts or number < 1:
            return None
        forth = neighbor_adjusting(scores_TV, parts["video_centrality"], number, self.temperature)
        back = neighbor_adjusting(scores_TV.mT, parts["text_centrality"], number, self.temperature)
        return (forth + back) / 2


@torch.no_grad()
def transport_target(scores_BB: Tensor, plan_share: float = 0.7, iterations: int = 50) -> Tensor:
    """The transport plan of raw scores with equal marginals, mixed with the identity, [B, B]."""
    size = len(scores_BB)
    marginal = -math.log(2 * size)
    row_B, column_B = scores_BB.new_zeros(size), scores_BB.new_zeros(size)
    for _ in range(iterations):
        row_B = marginal - (scores_BB + column_B).logsumexp(dim=1)
        column_B = marginal - (scores_BB + row_B[:, None]).logsumexp(dim=0)
    plan_BB = (scores_BB + row_B[:, None] + column_B).exp() * (2 * size)
    identity_BB = torch.eye(size, dtype=plan_BB.dtype, device=plan_BB.device)
    return plan_share * plan_BB + (1 - plan_share) * identity_BB


def neighbor_adjusting(scores_BB: Tensor, centrality_B: Tensor, number: int, temperature: float) -> Tensor:
    """Cross-entropy over the nearest candidates and the true one, which share the target."""
    size = len(scores_BB)
    itself_BB = torch.eye(size, dtype=torch.bool, device=scores_BB.device)
    nearest_BK = scores_BB.detach().masked_fill(itself_BB, float("-inf")).topk(number, dim=1).indices
    is_near_BB = torch.zeros_like(itself_BB).scatter(1, nearest_BK, True)
    inside_BB = is_near_BB | itself_BB
    relative_BB = _between(scores_BB, inside_BB) - _between(centrality_B.expand_as(scores_BB), inside_BB)
    share_BB = (temperature * relative_BB).masked_fill(~is_near_BB, float("-inf")).softmax(dim=1)
    share_BB = torch.where(itself_BB, torch.ones_like(share_BB), share_BB)
    log_BB = scores_BB.masked_fill(~inside_BB, float("-inf")).log_softmax(dim=1)
    product_BB = share_BB * log_BB.masked_fill(~inside_BB, 0)
    return -(product_BB.sum(dim=1) / share_BB.sum(dim=1)).mean()


def _between(values_BB: Tensor, inside_BB: Tensor) -> Tensor:
    """Rows scaled so that values outside the neighbourhood run from zero to one; equal ones become zero."""
    least_B1 = values_BB.masked_fill(inside_BB, float("inf")).amin(dim=1, keepdim=True)
    most_B1 = values_BB.masked_fill(inside_BB, float("-inf")).amax(dim=1, keepdim=True)
    span_B1 = most_B1 - least_B1
    return (values_BB - least_B1) / torch.where(span_B1 > 0, span_B1, 1)
