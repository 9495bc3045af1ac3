"""Measuring retrieval: ranks, metrics, protocols, rescoring, intervals, results."""

from gare.evaluate.caption_protocols import CaptionProtocol, TwoWayMetrics, evaluate_scores
from gare.evaluate.evaluation_results import (
    EvaluationResult,
    check_gallery,
    evaluation_result,
    hash_queries,
    markdown_report,
)
from gare.evaluate.rank_metrics import (
    METRIC_NAMES,
    MetricName,
    RetrievalMetrics,
    TiePolicy,
    ranks_of_targets,
    retrieval_metrics,
)
from gare.evaluate.rescoring import QueryBank, Rescoring, dual_softmax, querybank_norm, read_querybank
from gare.evaluate.results_comparison import compare_results, comparison_table, difference_intervals
from gare.evaluate.significance import (
    Interval,
    MeanStd,
    PairedTest,
    bootstrap_intervals,
    mean_and_std,
    paired_bootstrap_intervals,
    paired_permutation_test,
)

__all__ = [
    "METRIC_NAMES",
    "CaptionProtocol",
    "EvaluationResult",
    "Interval",
    "MeanStd",
    "MetricName",
    "PairedTest",
    "QueryBank",
    "Rescoring",
    "RetrievalMetrics",
    "TiePolicy",
    "TwoWayMetrics",
    "bootstrap_intervals",
    "check_gallery",
    "compare_results",
    "comparison_table",
    "difference_intervals",
    "dual_softmax",
    "evaluate_scores",
    "evaluation_result",
    "hash_queries",
    "markdown_report",
    "mean_and_std",
    "paired_bootstrap_intervals",
    "paired_permutation_test",
    "querybank_norm",
    "ranks_of_targets",
    "read_querybank",
    "retrieval_metrics",
]
