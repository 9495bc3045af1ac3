"""How sure a number is: bootstrap intervals, paired permutation tests, spread over seeds.

Shapes: Q queries, G groups, U distinct ranks, B resamples. Every metric is a function of how often each rank
occurs, so a resample is a row of counts, [B, U], and no resampled list of queries is ever formed.

Captions of one video are not independent. Where a video has several, pass `groups` (the video of each query):
whole videos are then resampled or swapped, as the cluster bootstrap does, and intervals are as wide as they
should be.

Why not scipy: it resamples lists of queries, and knows no groups.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gare.evaluate.rank_metrics import METRIC_NAMES, RECALL_CUTOFFS, Array, MetricName
from gare.settings import Settings

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Vector = Array | Sequence[float]
Seed = int | np.random.Generator

SIGNS = np.array([-1.0, 1.0])
PERMUTATIONS_AT_A_TIME = 1_000
# Differences of metrics are sums of rounded quotients: two that are equal on paper may differ by this much.
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Interval(Settings):
    """A percentile bootstrap interval."""

    low: float
    high: float


@dataclass(frozen=True)
class PairedTest:
    """Two runs on the same queries; `p_value` is two-sided."""

    a: float
    b: float
    p_value: float
    exact: bool
    """Every permutation was tried; otherwise a random sample of them."""

    @property
    def difference(self) -> float:
        """b − a."""
        return self.b - self.a


@dataclass(frozen=True)
class MeanStd:
    """Mean and sample standard deviation over seeds; one seed has no deviation (None)."""

    mean: float
    std: float | None
    num_seeds: int

    def __format__(self, spec: str) -> str:
        deviation = "n/a (one seed)" if self.std is None else format(self.std, spec)
        return f"{format(self.mean, spec)} ± {deviation}"


def mean_and_std(values: Sequence[float]) -> MeanStd:
    """Mean ± sample standard deviation (n − 1) of one metric over seeds.

    >>> f"{mean_and_std([47.0, 48.0, 49.0]):.1f}"
    '48.0 ± 1.0'
    """
    if not values:
        raise ValueError("there are no values; pass one per seed")
    return MeanStd(
        mean=statistics.fmean(values),
        std=statistics.stdev(values) if len(values) > 1 else None,
        num_seeds=len(values),
    )


def bootstrap_intervals(
    ranks: Vector,
    *,
    groups: Vector | None = None,
    confidence: float = 0.95,
    num_resamples: int = 2_000,
    seed: Seed = 0,
) -> dict[MetricName, Interval]:
    """A percentile interval for each metric, by resampling queries (or whole groups of them).

    Args:
        ranks: one 1-based rank per query.
        groups: the group of each query, such as its video; None treats queries as independent.
        confidence: how much of the bootstrap distribution the interval holds.
        num_resamples: how many resamples.
        seed: a seed or a numpy generator, which can draw multinomial counts directly.

    >>> interval = bootstrap_intervals([1] * 49 + [2] * 51)["recall_at_1"]
    >>> round(interval.low, 2), round(interval.high, 2)
    (0.39, 0.59)
    """
    if not 0 < confidence < 1 or num_resamples < 1:
        raise ValueError(
            "confidence must lie between 0 and 1 and num_resamples be positive, "
            f"got {confidence} and {num_resamples}"
        )
    rank_Q = _as_vector(ranks, "ranks")
    value_U = np.unique(rank_Q)
    rng = np.random.default_rng(seed)
    if groups is None:  # drawing queries is drawing ranks, each as likely as it is frequent
        frequency_U = _histogram(rank_Q, value_U)[0] / len(rank_Q)
        count_BU = rng.multinomial(len(rank_Q), frequency_U, size=num_resamples).astype(np.float64)
    else:
        count_GU = _histogram(rank_Q, value_U, _as_groups(groups, len(rank_Q)))
        num_groups = len(count_GU)
        weight_BG = rng.multinomial(num_groups, np.full(num_groups, 1 / num_groups), size=num_resamples)
        count_BU = weight_BG.astype(np.float64) @ count_GU
    metric_MB = _metrics_of_counts(value_U, count_BU)
    tail = (1 - confidence) / 2
    low_M, high_M = np.quantile(metric_MB, [tail, 1 - tail], axis=1)
    return {name: Interval(float(low_M[i]), float(high_M[i])) for i, name in enumerate(METRIC_NAMES)}


def paired_bootstrap_intervals(
    ranks_a: Vector,
    ranks_b: Vector,
    *,
    groups: Vector | None = None,
    confidence: float = 0.95,
    num_resamples: int = 2_000,
    seed: Seed = 0,
) -> dict[MetricName, Interval]:
    """A percentile interval for each metric's difference, b − a, by resampling queries with both their ranks.

    Args:
        ranks_a: one 1-based rank per query.
        ranks_b: the other run's ranks of the same queries, in the same order.
        groups: the group of each query, such as its video; whole groups are drawn.
        confidence: coverage of the interval.
        num_resamples: bootstrap resamples.
        seed: a seed or a numpy generator.

    >>> interval = paired_bootstrap_intervals([1] * 80 + [2] * 20, [1] * 90 + [2] * 10)["recall_at_1"]
    >>> interval.low > 0, interval.high < 0.2
    (True, True)
    """
    a_Q, b_Q = _as_vector(ranks_a, "ranks_a"), _as_vector(ranks_b, "ranks_b")
    if len(a_Q) != len(b_Q):
        raise ValueError(f"a paired interval needs the same queries, got {len(a_Q)} and {len(b_Q)} ranks")
    if not 0 < confidence < 1 or num_resamples < 1:
        raise ValueError(f"confidence must lie in (0, 1) and num_resamples be positive, got {confidence}")
    group_Q = np.arange(len(a_Q)) if groups is None else _as_groups(groups, len(a_Q))
    num_groups = int(group_Q.max()) + 1
    value_U, places = np.unique(np.concatenate([a_Q, b_Q]), return_inverse=True)
    place_a_Q, place_b_Q = places[: len(a_Q)], places[len(a_Q) :]
    rng = np.random.default_rng(seed)
    difference_MB = np.empty((len(METRIC_NAMES), num_resamples))
    for resample in range(num_resamples):  # one at a time: 60,000 queries need no more memory than one row
        drawn_G = np.bincount(rng.integers(0, num_groups, num_groups), minlength=num_groups)
        weight_Q = drawn_G[group_Q].astype(np.float64)
        counts = [np.bincount(place_Q, weight_Q, len(value_U)) for place_Q in (place_a_Q, place_b_Q)]
        metric_M2 = _metrics_of_counts(value_U, np.stack(counts))
        difference_MB[:, resample] = metric_M2[:, 1] - metric_M2[:, 0]
    tail = (1 - confidence) / 2
    low_M, high_M = np.quantile(difference_MB, [tail, 1 - tail], axis=1)
    return {name: Interval(float(low_M[i]), float(high_M[i])) for i, name in enumerate(METRIC_NAMES)}


def paired_permutation_test(
    ranks_a: Vector,
    ranks_b: Vector,
    *,
    groups: Vector | None = None,
    num_permutations: int = 10_000,
    seed: Seed = 0,
) -> dict[MetricName, PairedTest]:
    """Test each metric's difference between two runs by swapping their ranks, query by query.

    If the runs were equally good, each query's two ranks could as well have come the other way round. The
    p-value is the share of swaps with a difference at least as large as the one seen, in either direction:
    over all of them when there are no more than `num_permutations`, else over a random sample with the
    observed one added, (1 + hits) / (1 + sample), so it is never zero.

    Args:
        ranks_a: one 1-based rank per query.
        ranks_b: the other run's ranks of the same queries, in the same order.
        groups: the group of each query, such as its video; the queries of a group are swapped together.
        num_permutations: size of the random sample.
        seed: a seed or a numpy generator.

    >>> test = paired_permutation_test([1, 1, 1, 1, 2], [2, 2, 2, 2, 2])["recall_at_1"]
    >>> test.difference, test.p_value, test.exact
    (-0.8, 0.125, True)
    """
    if num_permutations < 1:
        raise ValueError(f"num_permutations must be positive, got {num_permutations}")
    a_Q, b_Q = _as_vector(ranks_a, "ranks_a"), _as_vector(ranks_b, "ranks_b")
    if len(a_Q) != len(b_Q):
        raise ValueError(f"a paired test needs the same queries, got {len(a_Q)} and {len(b_Q)} ranks")
    group_Q = np.arange(len(a_Q)) if groups is None else _as_groups(groups, len(a_Q))
    value_U = np.unique(np.concatenate([a_Q, b_Q]))
    # Queries on which the runs agree are the same either way; leaving them out makes more cases exact.
    is_changed_Q = a_Q != b_Q
    changed_Q = np.unique(group_Q[is_changed_Q], return_inverse=True)[1]
    gain_GU = _histogram(b_Q[is_changed_Q], value_U, changed_Q) - _histogram(
        a_Q[is_changed_Q], value_U, changed_Q
    )
    total_U = _histogram(np.concatenate([a_Q, b_Q]), value_U)[0]

    num_changed = len(gain_GU)
    exact = 2**num_changed <= num_permutations
    observed_a_M, observed_b_M = _both_runs(value_U, total_U, gain_GU.sum(axis=0)[None])[:, :, 0]
    hits_M, num_tried = np.zeros(len(METRIC_NAMES)), 0
    for sign_BG in _all_signs(num_changed) if exact else _random_signs(num_changed, num_permutations, seed):
        a_MB, b_MB = _both_runs(value_U, total_U, sign_BG @ gain_GU)
        is_as_large_MB = np.abs(b_MB - a_MB) >= np.abs(observed_b_M - observed_a_M)[:, None] - TOLERANCE
        hits_M += is_as_large_MB.sum(axis=1)
        num_tried += len(sign_BG)
    p_M = hits_M / num_tried if exact else (hits_M + 1) / (num_tried + 1)
    return {
        name: PairedTest(a=float(a), b=float(b), p_value=float(p), exact=exact)
        for name, a, b, p in zip(METRIC_NAMES, observed_a_M, observed_b_M, p_M, strict=True)
    }


def _both_runs(value_U: Floats, total_U: Floats, gain_BU: Floats) -> Floats:
    """Metrics [2, M, B] of runs a and b, whose counts add up to `total_U` and differ by `gain_BU`, b − a."""
    return np.stack([_metrics_of_counts(value_U, (total_U + sign * gain_BU) / 2) for sign in (-1, 1)])


def _all_signs(num_groups: int) -> Iterator[Floats]:
    pattern_B = np.arange(2**num_groups)[:, None]
    yield SIGNS[(pattern_B >> np.arange(num_groups)) & 1]


def _random_signs(num_groups: int, num_permutations: int, seed: Seed) -> Iterator[Floats]:
    rng = np.random.default_rng(seed)
    for start in range(0, num_permutations, PERMUTATIONS_AT_A_TIME):
        num_rows = min(PERMUTATIONS_AT_A_TIME, num_permutations - start)
        yield SIGNS[rng.integers(0, 2, size=(num_rows, num_groups))]


def _histogram(rank_Q: Floats, value_U: Floats, group_Q: Integers | None = None) -> Floats:
    """How often each rank occurs in each group, [G, U]; by default one group."""
    group_Q = np.zeros(len(rank_Q), dtype=np.int64) if group_Q is None else group_Q
    shape = int(group_Q.max(initial=-1)) + 1, len(value_U)
    cell_Q = group_Q * len(value_U) + np.searchsorted(value_U, rank_Q)
    return np.bincount(cell_Q, minlength=math.prod(shape)).reshape(shape).astype(np.float64)


def _metrics_of_counts(value_U: Floats, count_BU: Floats) -> Floats:
    """Every metric of every row of counts, [M, B], in the order of METRIC_NAMES."""
    cumulative_BU = count_BU.cumsum(axis=1)
    total_B = cumulative_BU[:, -1]
    recalls = [count_BU[:, value_U <= cutoff].sum(axis=1) / total_B for cutoff in RECALL_CUTOFFS.values()]
    lower_B, upper_B = (
        value_U[(cumulative_BU > middle_B[:, None]).argmax(axis=1)]
        for middle_B in ((total_B - 1) // 2, total_B // 2)
    )
    return np.stack([*recalls, (lower_B + upper_B) / 2, count_BU @ value_U / total_B])


def _as_vector(ranks: Vector, name: str) -> Floats:
    vector = np.asarray(ranks, dtype=np.float64)
    if vector.ndim != 1 or not len(vector) or not np.isfinite(vector).all() or vector.min() < 1:
        raise ValueError(f"{name} must be a non-empty vector of 1-based ranks, got shape {vector.shape}")
    return vector


def _as_groups(groups: Vector, num_queries: int) -> Integers:
    labels = np.asarray(groups)
    if labels.shape != (num_queries,):
        raise ValueError(
            f"groups must hold one label for each of {num_queries} queries, got {list(labels.shape)}"
        )
    return np.unique(labels, return_inverse=True)[1]
