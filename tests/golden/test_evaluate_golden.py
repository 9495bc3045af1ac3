"""Real 1,000 × 1,000 matrices of MSR-VTT 1k-A must give exactly the numbers in shared/EVALUATION.md."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import pytest

from gare.evaluate import evaluate_scores, retrieval_metrics

GOLDEN = Path(__file__).resolve().parents[2].parent / "shared" / "golden"
pytestmark = pytest.mark.skipif(
    not GOLDEN.is_dir(), reason=f"{GOLDEN} is absent; put the shared folder beside the checkout"
)

# recall@1, @5, @10 in percent, median rank, mean rank.
TEXT_TO_VIDEO = {"video": (48.0, 73.0, 82.9, 2, 13.129), "titles": (29.7, 55.8, 66.6, 4, 26.743)}
VIDEO_TO_TEXT = {
    ("video", "optimistic"): (46.0, 74.1, 82.8, 2, 8.674),
    ("video", "pessimistic"): (45.6, 74.1, 82.7, 2, 8.686),
    ("titles", "optimistic"): (28.4, 54.9, 66.8, 4, 27.087),
    ("titles", "pessimistic"): (28.1, 54.9, 66.8, 4, 27.099),
}


def load(name):
    return np.load(GOLDEN / f"msrvtt_1ka_scores_{name}.npy")


def published(metrics):
    recalls = (metrics.recall_at_1, metrics.recall_at_5, metrics.recall_at_10)
    return (*(round(100 * recall, 9) for recall in recalls), metrics.median_rank, round(metrics.mean_rank, 9))


@pytest.mark.parametrize("name", ["video", "titles"])
@pytest.mark.parametrize("ties", ["optimistic", "average", "pessimistic"])
def test_text_to_video_is_the_same_under_every_policy(name, ties):
    """No two videos tie: only captions are duplicated."""
    assert published(retrieval_metrics(load(name), ties=ties)) == TEXT_TO_VIDEO[name]
    assert published(evaluate_scores(load(name)).text_to_video[ties]) == TEXT_TO_VIDEO[name]


@pytest.mark.parametrize(("name", "ties"), VIDEO_TO_TEXT)
def test_video_to_text(name, ties):
    assert published(retrieval_metrics(load(name).T, ties=ties)) == VIDEO_TO_TEXT[name, ties]
    assert published(evaluate_scores(load(name)).video_to_text[ties]) == VIDEO_TO_TEXT[name, ties]


@pytest.mark.parametrize("name", ["video", "titles"])
def test_average_ties_equal_a_slow_loop(name):
    columns = load(name).T.tolist()
    ranks = []
    for query, column in enumerate(columns):
        above = sum(score > column[query] for score in column)
        tied = column.count(column[query]) - 1
        ranks.append(1 + above + tied / 2)
    metrics = evaluate_scores(load(name)).video_to_text["average"]
    assert metrics.ranks.tolist() == ranks
    assert metrics.mean_rank == pytest.approx(statistics.fmean(ranks))
    assert metrics.median_rank == statistics.median(ranks)


def test_legacy_reproduces_the_bug():
    metrics = evaluate_scores(load("video")).video_to_text["legacy"]
    assert len(metrics.ranks) == 1012
    assert metrics.num_queries == 1000
    assert f"{100 * metrics.recall_at_1:.2f}" == "45.45"
    assert f"{metrics.mean_rank:.2f}" == "8.83"


@pytest.mark.parametrize("name", ["video", "titles"])
def test_legacy_is_the_line_of_code_it_imitates(name):
    scores = load(name).T
    negated = -scores
    expected = np.where(np.sort(negated, axis=1) - np.diag(negated)[:, None] == 0)[1] + 1
    assert retrieval_metrics(scores, ties="legacy").ranks.tolist() == expected.tolist()
