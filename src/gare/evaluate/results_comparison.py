"""Two evaluations of the same queries, side by side with paired tests."""

from __future__ import annotations

from gare.errors import EvaluationError
from gare.evaluate.evaluation_results import (
    DIRECTIONS,
    HEADINGS,
    Direction,
    DirectionResult,
    EvaluationResult,
    format_metric,
    markdown_rows,
)
from gare.evaluate.rank_metrics import MetricName
from gare.evaluate.significance import (
    Interval,
    PairedTest,
    paired_bootstrap_intervals,
    paired_permutation_test,
)

Comparison = dict[Direction, dict[MetricName, PairedTest]]
DifferenceIntervals = dict[Direction, dict[MetricName, Interval]]

# What two results must share for their queries to be pairs and their numbers to mean the same.
SHARED_FIELDS = ("dataset", "split", "protocol", "rescoring", "num_texts", "num_videos", "num_missing_videos")


def compare_results(
    a: EvaluationResult, b: EvaluationResult, *, num_permutations: int = 10_000, seed: int = 0
) -> Comparison:
    """A paired permutation test per direction and metric; refuses results of different queries."""
    differing = [name for name in SHARED_FIELDS if getattr(a, name) != getattr(b, name)]
    if a.queries_hash and b.queries_hash and a.queries_hash != b.queries_hash:
        differing.append("queries_hash")
    if differing:
        listed = ", ".join(f"{name} ({getattr(a, name)} and {getattr(b, name)})" for name in differing)
        raise EvaluationError(
            f"the two results differ in {listed}; a paired test needs the same queries, measured the same "
            "way. Run 'gare evaluate' for both on one split with the same options, or ask which "
            "choice makes the difference: 'gare compare A B --explain'"
        )
    comparison: Comparison = {}
    for direction in DIRECTIONS:
        run_a: DirectionResult = getattr(a, direction)
        run_b: DirectionResult = getattr(b, direction)
        if run_a.groups != run_b.groups:
            raise EvaluationError(
                f"the {DIRECTIONS[direction]} queries of the two results belong to different videos; "
                "run 'gare evaluate' for both on the same manifest"
            )
        comparison[direction] = paired_permutation_test(
            run_a.ranks, run_b.ranks, groups=run_a.groups, num_permutations=num_permutations, seed=seed
        )
    return comparison


def difference_intervals(
    a: EvaluationResult, b: EvaluationResult, *, num_resamples: int = 2_000, seed: int = 0
) -> DifferenceIntervals:
    """95 % paired bootstrap intervals of B − A, for results that `compare_results` compares."""
    found: DifferenceIntervals = {}
    for direction in DIRECTIONS:
        run_a: DirectionResult = getattr(a, direction)
        run_b: DirectionResult = getattr(b, direction)
        found[direction] = paired_bootstrap_intervals(
            run_a.ranks, run_b.ranks, groups=run_a.groups, num_resamples=num_resamples, seed=seed
        )
    return found


def comparison_table(comparison: Comparison, intervals: DifferenceIntervals | None = None) -> str:
    """Both runs, their difference, its interval if given and its p-value as Markdown, recalls in percent."""
    rows = []
    for direction, tests in comparison.items():
        for name, test in tests.items():
            ends = [] if intervals is None else [_interval(name, intervals[direction][name])]
            rows.append(
                [
                    DIRECTIONS[direction],
                    HEADINGS[name],
                    format_metric(name, test.a),
                    format_metric(name, test.b),
                    format_metric(name, test.difference, spec="+z.1f"),
                    *ends,
                    f"{test.p_value:.4f}",
                ]
            )
    heading = [] if intervals is None else ["95 % of B − A"]
    return markdown_rows(["direction", "metric", "A", "B", "B − A", *heading, "p"], rows) + "\n"


def _interval(name: MetricName, interval: Interval) -> str:
    low, high = (format_metric(name, each, spec="+z.1f") for each in (interval.low, interval.high))
    return f"[{low}, {high}]"
