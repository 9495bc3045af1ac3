"""From ranks to recall at k, median rank and mean rank. Recalls are fractions; only tables print percent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from gare.evaluate.ranks import Array, TiePolicy, ranks_of_targets

MetricName = Literal["recall_at_1", "recall_at_5", "recall_at_10", "recall_at_50", "median_rank", "mean_rank"]
RECALL_CUTOFFS: dict[MetricName, int] = {
    "recall_at_1": 1,
    "recall_at_5": 5,
    "recall_at_10": 10,
    "recall_at_50": 50,
}
METRIC_NAMES: tuple[MetricName, ...] = (*RECALL_CUTOFFS, "median_rank", "mean_rank")


@dataclass(frozen=True)
class RetrievalMetrics:
    """What one direction of retrieval scored, with the ranks it came from."""

    recall_at_1: float
    recall_at_5: float
    recall_at_10: float
    recall_at_50: float
    median_rank: float
    """The mean of the two middle ranks when there is an even number of them."""
    mean_rank: float
    num_queries: int
    ties: TiePolicy
    ranks: Tensor = field(repr=False, compare=False)
    """1-based, on the CPU; one per query, except under "legacy" ties, where a tied query has several."""

    @property
    def numbers(self) -> dict[MetricName, float]:
        """The six metrics by name."""
        return {name: getattr(self, name) for name in METRIC_NAMES}


def retrieval_metrics(
    scores: Array, targets: Array | None = None, ties: TiePolicy = "pessimistic"
) -> RetrievalMetrics:
    """Measure one direction of retrieval: each row is a query, each column a candidate.

    Args:
        scores: [queries, candidates], a tensor or a numpy array; higher is better. NaN and infinity are
            refused.
        targets: the index of the right candidate for each query; by default query i belongs to candidate i.
        ties: "optimistic", "average" or "pessimistic"; "legacy" reproduces a bug of the field, for comparison
            only.

    Example:
        >>> import torch
        >>> metrics = retrieval_metrics(torch.tensor([[0.9, 0.1], [0.8, 0.2]]))
        >>> metrics.recall_at_1, metrics.median_rank, metrics.ranks
        (0.5, 1.5, tensor([1, 2]))
    """
    return metrics_of_ranks(ranks_of_targets(scores, targets, ties), num_queries=len(scores), ties=ties)


def metrics_of_ranks(ranks: Tensor, *, num_queries: int, ties: TiePolicy) -> RetrievalMetrics:
    """The metrics of 1-based ranks. Recalls divide by the number of ranks; under "legacy" that is the bug."""
    ranks = ranks.cpu()
    return RetrievalMetrics(
        **{name: recall_at(ranks, cutoff) for name, cutoff in RECALL_CUTOFFS.items()},
        median_rank=median(ranks),
        mean_rank=ranks.sum().item() / len(ranks),
        num_queries=num_queries,
        ties=ties,
        ranks=ranks,
    )


def recall_at(ranks: Tensor, cutoff: int) -> float:
    """The fraction of ranks at or above place `cutoff`.

    >>> import torch
    >>> recall_at(torch.tensor([1, 2, 6, 11]), 5)
    0.5
    """
    return int((ranks <= cutoff).sum()) / len(ranks)


def median(ranks: Tensor) -> float:
    """The middle rank, or the mean of the two middle ones (`Tensor.median` would take the lower).

    >>> import torch
    >>> median(torch.tensor([9, 1, 4, 2]))
    3.0
    """
    ordered = ranks.sort().values
    return float(ordered[(len(ranks) - 1) // 2] + ordered[len(ranks) // 2]) / 2
