"""Measuring retrieval without fooling anyone: ranks, metrics, protocols, rescoring, intervals, results."""

from gare.evaluate.comparison import compare_results, comparison_table
from gare.evaluate.metrics import METRIC_NAMES, MetricName, RetrievalMetrics, retrieval_metrics
from gare.evaluate.protocols import CaptionProtocol, TwoWayMetrics, evaluate_scores
from gare.evaluate.querybank import QueryBank, read_querybank
from gare.evaluate.ranks import TiePolicy, ranks_of_targets
from gare.evaluate.report import (
    EvaluationResult,
    check_gallery,
    evaluation_result,
    hash_queries,
    markdown_report,
)
from gare.evaluate.rescoring import Rescoring, dual_softmax, querybank_norm
from gare.evaluate.significance import (
    Interval,
    MeanStd,
    PairedTest,
    bootstrap_intervals,
    mean_and_std,
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
    "dual_softmax",
    "evaluate_scores",
    "evaluation_result",
    "hash_queries",
    "markdown_report",
    "mean_and_std",
    "paired_permutation_test",
    "querybank_norm",
    "ranks_of_targets",
    "read_querybank",
    "retrieval_metrics",
]
