"""Which choice explains a reported number."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from gare.cli.main import app
from gare.errors import EvaluationError
from gare.evaluate import dual_softmax, evaluate_scores, evaluation_result, paired_bootstrap_intervals
from gare.evaluate.difference_explained import GridCandidates, ResultCandidates, explain, explanation_markdown
from gare.evaluate.named_measures import MAIN_MEASURES, Measure
from gare.evaluate.protocol_grid import Protocol, ProtocolGrid
from gare.evaluate.reported_numbers import is_mteb_result, parse_reported, read_mteb_result
from gare.evaluate.score_files import write_scores
from gare.evaluate.score_table import table_of_matrix


def make_table(seed=0, num_videos=40, captions=2, gain=0.5):
    generator = torch.Generator().manual_seed(seed)
    video_of_text = torch.arange(num_videos * captions) % num_videos
    scores = torch.randn(len(video_of_text), num_videos, generator=generator) / 4
    scores[torch.arange(len(video_of_text)), video_of_text] += gain
    return table_of_matrix(scores.clamp(-1, 1), video_of_text=video_of_text)


def printed(grid, protocol, names=("R@1", "R@5", "R@10", "MnR")):
    """Numbers as a paper prints them."""
    found = grid.measure(protocol).ranks
    measures = map(Measure.named, names)
    return ",".join(f"{each}={each.percent(each.of_ranks(found), '.2f')}" for each in measures)


@pytest.mark.parametrize(
    "changes",
    [
        {"rescoring": "dsl"},
        {"captions": "mean_caption"},
        {"subset": "chosen"},
        {"direction": "video_to_text"},
        {"precision": "bfloat16", "rescoring": "dsl"},
        {"subset": "chosen", "captions": "first_caption"},
    ],
)
def test_the_choice_that_was_made_is_found(changes):
    grid = ProtocolGrid(make_table(), torch.arange(20))
    reported = parse_reported(printed(grid, Protocol(**changes)))
    found = explain(GridCandidates(grid, MAIN_MEASURES), reported, "text_to_video", most_changes=2)
    assert not found.base.matches
    assert changes in [tried.changes for tried in found.matches]
    assert found.nearest.matches
    assert "Explained by" in explanation_markdown(found)


def test_a_number_that_nothing_gives_is_left_unexplained():
    grid = ProtocolGrid(make_table())
    base = Measure.named("R@1").of_ranks(grid.measure(Protocol()).ranks)
    found = explain(
        GridCandidates(grid, MAIN_MEASURES),
        parse_reported("R@1=99.99,R@5=99.99"),
        "text_to_video",
        most_changes=2,
    )
    assert found.matches == []
    assert found.base.remains == pytest.approx(0.9999 - base)
    text = explanation_markdown(found)
    assert "remain unexplained" in text
    assert "None of" in text


def test_a_single_number_says_how_many_protocols_match_it():
    grid = ProtocolGrid(make_table())
    reported = parse_reported(printed(grid, Protocol(rescoring="dsl"), names=("R@1",)))
    found = explain(GridCandidates(grid, MAIN_MEASURES), reported, "text_to_video", most_changes=2)
    matching = sum(tried.matches for tried in found.tried)
    assert f"{matching:,} of {len(found.tried):,} protocols match" in explanation_markdown(found)
    assert found.interval.low < found.base.numbers["R@1"] < found.interval.high


def make_result(table, **fields):
    known = {
        "dataset": "d",
        "split": "test",
        "selected_on": "none",
        "config_fingerprint": "c",
        "weights_hash": "w",
    }
    return evaluation_result(evaluate_scores(table.scores_TV, table.video_T), **{**known, **fields})


def test_a_results_file_explains_by_what_it_holds():
    result = make_result(make_table())
    back = result.video_to_text.by_ties["pessimistic"]
    reported = parse_reported(f"R@1={100 * back.recall_at_1:.2f},MnR={back.mean_rank:.3f}")
    found = explain(
        ResultCandidates(result, (Measure.named("R@1"), Measure.named("MnR"))),
        reported,
        "text_to_video",
        most_changes=2,
    )
    assert {"direction": "video_to_text"} in [tried.changes for tried in found.matches]


def test_the_paired_interval_is_that_of_resampled_queries():
    a = [1, 2, 3, 1, 5, 1, 2, 9, 1, 1]
    b = [1, 1, 1, 1, 4, 1, 2, 9, 2, 1]
    interval = paired_bootstrap_intervals(a, b)["recall_at_1"]
    assert interval.low < 0.1 < interval.high
    same = paired_bootstrap_intervals(a, a)
    assert all(each.low == each.high == 0 for each in same.values())
    grouped = paired_bootstrap_intervals(a, b, groups=[0] * 5 + [1] * 5)["recall_at_1"]
    assert (grouped.low, grouped.high) == (pytest.approx(-0.2), pytest.approx(0.4))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("R@1=many", "neither a file nor a number"),
        ("R@1=120", "R@1 cannot be 120"),
        ("wrong=5", "not a measure known here"),
        (",", "no number was given"),
        ("R@1=53,8", "names a measure twice"),
        ("R@99999999999999999999=3", "not a measure known here"),
        ("missing.json", "neither a file nor a number"),
    ],
)
def test_reported_numbers_that_make_no_sense_are_refused(text, message):
    with pytest.raises(EvaluationError, match=message):
        parse_reported(text)


def test_a_number_stands_for_what_rounds_to_it():
    (number,) = parse_reported("53.8").numbers["text_to_video"]
    assert number.is_met_by(0.53751)
    assert number.is_met_by(0.5385)
    assert not number.is_met_by(0.5374)
    assert number.shown() == "R@1=53.8"


@pytest.fixture
def files(tmp_path):
    table = make_table()
    write_scores(table, tmp_path / "a.safetensors")
    make_result(table).save(tmp_path / "a.json")
    make_result(make_table(1), split="val").save(tmp_path / "b.json")
    ranks = ProtocolGrid(table).measure(Protocol(ties="trec")).ranks
    names = ("ndcg_at_10", "recall_at_1", "hit_rate_at_1", "mrr_at_10")
    scores = {name: round(Measure.named(name).of_ranks(ranks), 5) for name in names}
    mteb = {"task_name": "T", "scores": {"test": [{"hf_subset": "default", **scores, "main_score": 1}]}}
    (tmp_path / "mteb.json").write_text(json.dumps(mteb))
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_compare_explains_a_result_of_mteb(files):
    assert len(read_mteb_result(files / "mteb.json").numbers["text_to_video"]) == 3
    outcome = run("compare", files / "a.safetensors", files / "mteb.json", "--changes", 1)
    assert outcome.exit_code == 0
    assert "nothing is to be explained" in outcome.stdout


@pytest.mark.parametrize(
    "values",
    [
        {"mteb_dataset_name": "T", "test": {"evaluation_time": 1.0, "recall_at_1": 0.5}},
        {"mteb_version": "1.0", "dataset_revision": "x", "test": {"en": {"recall_at_1": 0.5}}},
        {"task_name": "T", "scores": {"test": [{"recall_at_1": 0.5, "ndcg_at_10": None}]}},
    ],
)
def test_results_of_other_versions_of_mteb_are_read(tmp_path, values):
    (tmp_path / "mteb.json").write_text(json.dumps(values))
    assert is_mteb_result(values)
    (number,) = read_mteb_result(tmp_path / "mteb.json").numbers["text_to_video"]
    assert (str(number.measure), number.value) == ("R@1", 0.5)


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ({}, "has 0 splits"),
        ([], "has 0 splits"),
        ({"test": [{"recall_at_1": 0.1}], "dev": [{"recall_at_1": 0.2}]}, "has 2 splits"),
        ({"test": [{"accuracy": 0.1}]}, "is it a retrieval task"),
        ({"test": [{"recall_at_1": None}]}, "is it a retrieval task"),
        ({"test": [{"recall_at_1": float("nan")}]}, "recall_at_1 is nan"),
        ({"test": [{"recall_at_1": 53.8}]}, "between 0 and 1"),
        ({"test": [{"recall_at_1": "0.5"}]}, "between 0 and 1"),
    ],
)
def test_results_of_mteb_without_numbers_are_refused(tmp_path, scores, message):
    (tmp_path / "mteb.json").write_text(json.dumps({"task_name": "T", "scores": scores}))
    with pytest.raises(EvaluationError, match=message):
        read_mteb_result(tmp_path / "mteb.json")


def test_compare_explains_a_typed_number_as_json(files):
    grid = ProtocolGrid(make_table())
    number = printed(grid, Protocol(captions="first_caption"))
    outcome = run("compare", files / "a.safetensors", number, "--json", "--changes", 1)
    found = json.loads(outcome.stdout)["text_to_video"]
    assert found["explained_by"] == [{"captions": "first_caption"}]
    assert found["num_tried"] == 1 + len(list(grid.changed(Protocol(), 1)))


def test_compare_tests_what_remains_query_by_query(files):
    outcome = run("compare", files / "a.safetensors", files / "b.json", "--changes", 1, "--json")
    paired = json.loads(outcome.stdout)["video_to_text"]["paired"]
    assert paired["interval"]["low"] <= paired["difference"] <= paired["interval"]["high"]
    assert paired["num_queries"] == 40


def test_two_results_of_other_splits_are_explained_if_asked(files):
    refused = run("compare", files / "a.json", files / "b.json")
    assert isinstance(refused.exception, EvaluationError)
    assert "--explain" in str(refused.exception)
    outcome = run("compare", files / "a.json", files / "b.json", "--explain")
    assert outcome.exit_code == 0
    assert "**text→video**: reported" in outcome.stdout


def test_two_results_have_an_interval_of_their_difference(files):
    make_result(make_table(2)).save(files / "c.json")
    outcome = run("compare", files / "a.json", files / "c.json")
    assert "| 95 % of B − A |" in outcome.stdout
    found = json.loads(run("compare", files / "a.json", files / "c.json", "--json").stdout)
    test = found["text_to_video"]["recall_at_1"]
    assert test["interval"]["low"] <= test["difference"] <= test["interval"]["high"]


def test_two_files_of_scores_of_one_system(files):
    table = make_table()
    rescored = table_of_matrix(dual_softmax(table.scores_TV), video_of_text=table.video_T)
    write_scores(rescored, files / "b.safetensors")
    outcome = run("compare", files / "a.safetensors", files / "b.safetensors", "--changes", 1, "--json")
    found = json.loads(outcome.stdout)["text_to_video"]
    assert found["explained_by"] == [{"rescoring": "dsl"}]
    assert found["paired"]["changes"] == {"rescoring": "dsl"}
    assert found["paired"]["num_changed"] == 0
