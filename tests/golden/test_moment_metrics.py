"""Moment retrieval and highlights to the digits that the benchmark's own evaluator prints."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gare.data.moment_annotations import MomentQuery, read_moments
from gare.errors import DataError, EvaluationError
from gare.evaluate.moment_metrics import (
    IOU_THRESHOLDS,
    MomentPrediction,
    moment_metrics,
    overlaps,
    read_predictions,
)
from warm import run_gare as run

SHARED = Path(__file__).resolve().parents[3] / "shared"
GOLDEN = SHARED / "golden" / "qvhighlights"
VAL = SHARED / "annotations" / "qvhighlights" / "highlight_val_release.jsonl"
needs_shared = pytest.mark.skipif(not GOLDEN.exists(), reason="../shared/golden/qvhighlights is not here")


@needs_shared
def test_the_numbers_are_those_of_the_evaluator():
    queries = read_moments("qvhighlights", VAL)
    found = moment_metrics(queries, read_predictions(GOLDEN / "sample_val_preds.jsonl"))
    expected = json.loads((GOLDEN / "sample_val_metrics.json").read_text())
    assert {name: round(value, 2) for name, value in found.summary().items()} == expected["brief"]
    for length, by_iou in found.mean_average_precision.items():
        for iou, value in by_iou.items():
            assert round(value, 2) == expected[length]["MR-mAP"][str(iou)]
    for iou, value in found.recall.items():
        assert round(value, 2) == expected["full"]["MR-R1"][str(iou)]


@needs_shared
def test_the_command_prints_them():
    files = ["--predictions", str(GOLDEN / "sample_val_preds.jsonl"), "--data", str(VAL)]
    done = run("evaluate", "--task", "moments", *files, "--json")
    assert done.returncode == 0, done.stderr
    expected = json.loads((GOLDEN / "sample_val_metrics.json").read_text())["brief"]
    assert json.loads(done.stdout) == {"num_queries": 1550, **expected}


@needs_shared
@pytest.mark.parametrize(
    ("dataset", "file", "count"),
    [
        ("qvhighlights", "qvhighlights/highlight_train_release.jsonl", 7218),
        ("activitynet", "activitynet/val_1.json", 17505),
        ("didemo", "didemo/val_data.json", 4180),
    ],
)
def test_real_annotations_are_read(dataset, file, count):
    queries = read_moments(dataset, SHARED / "annotations" / file)
    assert len(queries) == count
    assert len({query.id for query in queries}) == count


def test_charades_sta(tmp_path):
    file = tmp_path / "charades_sta_test.txt"
    file.write_text("3MSZA 24.3 30.4##person turn a light on.\n3MSZA 7 2##a person sits.\n")
    assert read_moments("charades_sta", file) == [
        MomentQuery("1", "3MSZA", "person turn a light on.", ((24.3, 30.4),)),
        MomentQuery("2", "3MSZA", "a person sits.", ((2.0, 7.0),)),
    ]
    file.write_text("3MSZA 24.3##no end\n")
    with pytest.raises(DataError, match="line 1"):
        read_moments("charades_sta", file)


@pytest.mark.parametrize(
    "content", ["", "not json", "[]", '{"qid": 1}', '{"qid": 1, "query": "x", "vid": "v"}']
)
def test_a_file_of_another_kind_is_refused_in_words(tmp_path, content):
    file = tmp_path / "moments.jsonl"
    file.write_text(content + "\n")
    with pytest.raises(DataError, match="moments"):
        read_moments("qvhighlights", file)


QUERY = MomentQuery(
    "1", "v", "a dog", ((0.0, 10.0), (20.0, 30.0)), 40.0, ((0, (4.0, 2.0, 0.0)), (10, (3.0, 3.0, 3.0)))
)


def test_a_perfect_answer_has_a_hundred_per_cent():
    saliency = [0.0] * 20
    saliency[0], saliency[10] = 0.5, 1.0
    answer = MomentPrediction(((0, 10, 0.9), (20, 30, 0.8)), tuple(saliency))
    found = moment_metrics([QUERY], {"1": answer})
    assert all(value == 100 for value in found.recall.values())
    assert all(value == 100 for value in found.mean_average_precision["full"].values())
    assert found.highlight_hit == {"Fair": 100, "Good": 100, "VeryGood": 0}


def test_predictions_and_queries_must_be_the_same():
    with pytest.raises(EvaluationError, match="1 queries have no prediction and 1"):
        moment_metrics([QUERY], {"2": MomentPrediction(())})


WINDOWS = st.tuples(st.floats(0, 100), st.floats(0.1, 50)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(st.lists(WINDOWS, min_size=1, max_size=4), st.lists(WINDOWS, min_size=1, max_size=12))
def test_precision_falls_with_the_threshold_and_never_beats_the_truth(true, given_windows):
    query = MomentQuery("1", "v", "x", tuple(true), 200.0)
    answer = MomentPrediction(tuple((*window, -float(place)) for place, window in enumerate(given_windows)))
    found = moment_metrics([query], {"1": answer})
    values = [found.mean_average_precision["full"][iou] for iou in IOU_THRESHOLDS]
    assert values == sorted(values, reverse=True)
    assert all(0 <= value <= 100 + 1e-9 for value in values)
    itself = overlaps(np.array(true), np.array(true))
    assert np.allclose(np.diag(itself), 1)
