"""One rank per query, under each tie policy, and metrics of ranks that can be checked by hand."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from gare.evaluate import rank_metrics as ranks_module
from gare.evaluate import ranks_of_targets, retrieval_metrics
from gare.evaluate.rank_metrics import recall_at

TIED = torch.tensor([[0.5, 0.5, 0.9, 0.5], [0.1, 0.7, 0.7, 0.2], [0.0, 0.1, 0.2, 0.1]])


@pytest.mark.parametrize(
    ("ties", "expected"),
    [
        ("optimistic", [2, 1, 1]),
        ("average", [3.0, 1.5, 1.0]),
        ("pessimistic", [4, 2, 1]),
        ("legacy", [2, 3, 4, 1, 2, 1]),
    ],
)
def test_each_tie_policy(ties, expected):
    assert ranks_of_targets(TIED, ties=ties).tolist() == expected


def test_pessimistic_is_the_default():
    assert retrieval_metrics(TIED).ties == "pessimistic"
    assert ranks_of_targets(TIED).tolist() == [4, 2, 1]


@pytest.mark.parametrize(("ties", "rank"), [("optimistic", 1), ("average", 2.5), ("pessimistic", 4)])
def test_a_constant_matrix_has_one_rank_per_query(ties, rank):
    metrics = retrieval_metrics(np.zeros((4, 4)), ties=ties)
    assert metrics.ranks.tolist() == [rank] * 4
    assert metrics.num_queries == 4


def test_legacy_gives_sixteen_ranks_for_a_constant_four_by_four():
    metrics = retrieval_metrics(np.zeros((4, 4)), ties="legacy")
    assert len(metrics.ranks) == 16
    assert (metrics.num_queries, metrics.recall_at_1) == (4, 0.25)


def test_one_query():
    metrics = retrieval_metrics(torch.tensor([[0.3, 0.9, 0.1]]), targets=[0])
    assert (metrics.median_rank, metrics.mean_rank, metrics.recall_at_1, metrics.recall_at_5) == (
        2.0,
        2.0,
        0.0,
        1.0,
    )


def test_metrics_by_hand():
    # Ranks 1, 2, 6, 11: half within five, three quarters within ten, median the mean of 2 and 6.
    scores = -torch.arange(60.0).expand(4, 60)
    metrics = retrieval_metrics(scores, targets=torch.tensor([0, 1, 5, 10]))
    assert metrics.ranks.tolist() == [1, 2, 6, 11]
    assert metrics.numbers == {
        "recall_at_1": 0.25,
        "recall_at_5": 0.5,
        "recall_at_10": 0.75,
        "recall_at_50": 1.0,
        "median_rank": 4.0,
        "mean_rank": 5.0,
    }


def test_more_candidates_than_queries_and_more_queries_than_candidates():
    scores = torch.tensor([[0.9, 0.2, 0.4]])
    assert retrieval_metrics(scores).ranks.tolist() == [1]
    assert retrieval_metrics(scores.T, targets=[0, 0, 0]).ranks.tolist() == [1, 1, 1]


def test_a_block_size_changes_nothing(monkeypatch):
    scores = torch.randint(0, 5, (37, 50)).float()
    expected = ranks_of_targets(scores)
    monkeypatch.setattr(ranks_module, "BLOCK_CELLS", 120)
    assert torch.equal(ranks_of_targets(scores), expected)


@pytest.mark.parametrize(
    "scores",
    [
        np.eye(3, dtype=np.float16),
        np.eye(3, dtype=">f4"),
        np.eye(3, dtype=np.uint8),
        np.eye(3)[::-1, ::-1],
        [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
        torch.eye(3, dtype=torch.bfloat16),
        torch.eye(3, requires_grad=True),
    ],
    ids=["half", "big-endian", "unsigned", "reversed", "lists", "bfloat16", "with gradient"],
)
def test_any_array_of_numbers(scores):
    assert retrieval_metrics(scores).ranks.tolist() == [1, 1, 1]


def test_a_read_only_array_is_neither_changed_nor_warned_about():
    scores = np.eye(3, dtype=np.float32)
    scores.flags.writeable = False
    assert retrieval_metrics(scores).recall_at_1 == 1.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_scores_are_refused(bad):
    scores = torch.eye(3)
    scores[1, 2] = bad
    with pytest.raises(ValueError, match=r"1 of 9 scores are NaN or infinite.*mask padding"):
        retrieval_metrics(scores)


@pytest.mark.parametrize(
    ("scores", "targets", "message"),
    [
        (torch.zeros(3, 2), None, "3 queries and 2 candidates.*pass targets"),
        (torch.zeros(3), None, r"must be \[queries, candidates\]"),
        (torch.zeros(0, 5), None, "not empty"),
        (torch.zeros(2, 0), None, "not empty"),
        (torch.zeros(2, 2), [0], "one index for each of 2 rows"),
        (torch.zeros(2, 2), [0, 2], r"targets\[1\] is 2, but indices must lie in 0…1"),
        (torch.zeros(2, 2), [0, -1], r"targets\[1\] is -1"),
        (torch.zeros(2, 2), torch.tensor([0.0, 1.0]), "must be integers"),
        (np.array([["a"]]), None, "array of numbers"),
    ],
)
def test_nonsense_is_refused_with_the_reason(scores, targets, message):
    with pytest.raises(ValueError, match=message):
        retrieval_metrics(scores, targets)


def test_an_unknown_tie_policy_lists_the_known_ones():
    with pytest.raises(ValueError, match="optimistic, average, pessimistic, legacy"):
        retrieval_metrics(torch.eye(2), ties="kind")


def test_metrics_are_frozen_and_compare_by_value():
    first, second = retrieval_metrics(TIED), retrieval_metrics(TIED)
    assert first == second
    with pytest.raises(AttributeError):
        first.recall_at_1 = 1.0


def test_recall_counts_an_average_rank_between_places_as_a_miss():
    assert recall_at(torch.tensor([1.0, 1.5]), 1) == 0.5


def test_evaluate_imports_without_video_store_or_server():
    program = (
        "import sys, gare.evaluate; "
        "print([name for name in ('av', 'lancedb', 'fastapi', 'typer') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
