"""One rank per query under a stated tie rule, and recall, median and mean of those ranks.

Recalls are fractions; only tables print percent. Shapes: Q queries, N candidates.

Public text-video code finds ranks with `np.where(np.sort(-x) - diag == 0)`, which returns one rank for
*every* candidate that ties with the target. Here each query has one rank; "legacy" reproduces the bug, for
comparison only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

MetricName = Literal["recall_at_1", "recall_at_5", "recall_at_10", "recall_at_50", "median_rank", "mean_rank"]
RECALL_CUTOFFS: dict[MetricName, int] = {
    "recall_at_1": 1,
    "recall_at_5": 5,
    "recall_at_10": 10,
    "recall_at_50": 50,
}
METRIC_NAMES: tuple[MetricName, ...] = (*RECALL_CUTOFFS, "median_rank", "mean_rank")
TiePolicy = Literal["optimistic", "average", "pessimistic", "legacy"]
Array = Tensor | npt.NDArray[Any]

# The matrix is compared in blocks of this many cells: they stay in cache and need no second matrix.
BLOCK_CELLS = 2**20


@dataclass(frozen=True)
class Rivals:
    """How many candidates score above each query's target and how many equal it; every tie policy follows."""

    above_Q: Tensor
    tied_Q: Tensor

    def ranks(self, ties: TiePolicy) -> Tensor:
        """The 1-based ranks: int64, but float64 for "average", and more than Q of them for "legacy".

        >>> rivals = Rivals(above_Q=torch.tensor([0, 1]), tied_Q=torch.tensor([0, 2]))
        >>> rivals.ranks("optimistic"), rivals.ranks("pessimistic"), rivals.ranks("legacy")
        (tensor([1, 2]), tensor([1, 4]), tensor([1, 2, 3, 4]))
        """
        best_Q = self.above_Q + 1
        if ties == "optimistic":
            return best_Q
        if ties == "average":
            return best_Q + self.tied_Q.double() / 2
        if ties == "pessimistic":
            return best_Q + self.tied_Q
        if ties == "legacy":
            return _legacy_ranks(best_Q, self.tied_Q + 1)
        raise ValueError(f"unknown tie policy {ties!r}; choose one of {', '.join(get_args(TiePolicy))}")


def ranks_of_targets(scores: Array, targets: Array | None = None, ties: TiePolicy = "pessimistic") -> Tensor:
    """The 1-based rank of each query's target.

    Args:
        scores: [queries, candidates], higher is better, finite.
        targets: the index of the right candidate for each query; by default query i belongs to candidate i.
        ties: what a candidate with exactly the target's score does to its rank: nothing ("optimistic"), half
            a place ("average"), a whole place ("pessimistic"). "legacy" is the field's bug: one rank per tied
            candidate.

    >>> ranks_of_targets(torch.tensor([[0.9, 0.1, 0.3], [0.5, 0.5, 0.7]]))
    tensor([1, 3])
    """
    return count_rivals(as_matrix(scores), targets).ranks(ties)


def count_rivals(scores_QN: Tensor, targets: Array | None = None) -> Rivals:
    """Count what stands above and level with each query's target; `targets` default to the diagonal."""
    target_Q = _as_targets(targets, scores_QN)
    above_Q, level_Q = count_above_and_level(scores_QN, scores_QN.gather(1, target_Q[:, None]))
    return Rivals(above_Q, level_Q - 1)


def count_above_and_level(scores_QN: Tensor, threshold_Q1: Tensor) -> tuple[Tensor, Tensor]:
    """How many scores of each row are above its threshold, and how many equal it."""
    rows = max(1, BLOCK_CELLS // scores_QN.shape[1])
    blocks = list(zip(torch.split(scores_QN, rows), torch.split(threshold_Q1, rows), strict=True))
    above_Q = torch.cat([(scores > threshold).sum(dim=1) for scores, threshold in blocks])
    level_Q = torch.cat([(scores == threshold).sum(dim=1) for scores, threshold in blocks])
    return above_Q, level_Q


def as_matrix(scores: Array) -> Tensor:
    """Scores as a finite, non-empty matrix on their own device; a numpy array becomes a tensor."""
    matrix = scores.detach() if isinstance(scores, Tensor) else _from_numpy(np.asarray(scores))
    if matrix.ndim != 2 or not matrix.numel():
        raise ValueError(f"scores must be [queries, candidates] and not empty, got {list(matrix.shape)}")
    # aminmax carries NaN through, so two numbers tell whether all are finite.
    if not all(torch.isfinite(extreme) for extreme in torch.aminmax(matrix)):
        num_bad = int((~torch.isfinite(matrix)).sum())
        raise ValueError(
            f"{num_bad:,} of {matrix.numel():,} scores are NaN or infinite and have no rank; "
            "mask padding before scoring, and leave no padding in the matrix"
        )
    return matrix


def as_index(index: Array, *, name: str, length: int, below: int, device: torch.device) -> Tensor:
    """`index` as an int64 tensor of `length` positions in [0, below)."""
    positions = index.detach() if isinstance(index, Tensor) else _from_numpy(np.asarray(index))
    if positions.dtype == torch.bool or positions.is_floating_point() or positions.is_complex():
        raise ValueError(f"{name} must be integers, got {positions.dtype}")
    if positions.shape != (length,):
        raise ValueError(f"{name} must hold one index for each of {length} rows, got {list(positions.shape)}")
    outside = (positions < 0) | (positions >= below)
    if outside.any():
        row = int(outside.nonzero()[0])
        raise ValueError(f"{name}[{row}] is {int(positions[row])}, but indices must lie in 0…{below - 1}")
    return positions.to(device, torch.int64)


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

    Examples:
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

    >>> recall_at(torch.tensor([1, 2, 6, 11]), 5)
    0.5
    """
    return int((ranks <= cutoff).sum()) / len(ranks)


def median(ranks: Tensor) -> float:
    """The middle rank, or the mean of the two middle ones (`Tensor.median` would take the lower).

    >>> median(torch.tensor([9, 1, 4, 2]))
    3.0
    """
    ordered = ranks.sort().values
    return float(ordered[(len(ranks) - 1) // 2] + ordered[len(ranks) // 2]) / 2


def _as_targets(targets: Array | None, scores_QN: Tensor) -> Tensor:
    num_queries, num_candidates = scores_QN.shape
    if targets is not None:
        return as_index(
            targets, name="targets", length=num_queries, below=num_candidates, device=scores_QN.device
        )
    if num_candidates < num_queries:
        raise ValueError(
            f"{num_queries} queries and {num_candidates} candidates: not every query has a target on the "
            "diagonal; pass targets, the index of the right candidate for each query"
        )
    return torch.arange(num_queries, device=scores_QN.device)


def _from_numpy(array: npt.NDArray[Any]) -> Tensor:
    if array.dtype.kind not in "iuf":
        raise ValueError(f"expected an array of numbers, got dtype {array.dtype}")
    # torch refuses negative strides and foreign byte order, warns of read-only memory, and can do little with
    # unsigned integers: such arrays are copied, others are not.
    dtype = array.dtype.newbyteorder("=") if array.dtype.kind == "f" else np.dtype(np.int64)
    return torch.from_numpy(np.require(array, dtype, ["C", "W"]))


def _legacy_ranks(best_Q: Tensor, num_level_Q: Tensor) -> Tensor:
    """Every place of each tie, query after query: what np.where finds in the sorted row."""
    first_Q = num_level_Q.cumsum(0) - num_level_Q
    start = (best_Q - first_Q).repeat_interleave(num_level_Q)
    return start + torch.arange(len(start), device=start.device)
