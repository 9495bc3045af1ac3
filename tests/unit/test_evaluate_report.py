"""results.json, its table, the gallery guard and `gare compare`."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import typer
from typer.testing import CliRunner

from gare import __version__
from gare.cli.compare_command import compare
from gare.errors import EvaluationError, GareError
from gare.evaluate import (
    EvaluationResult,
    check_gallery,
    compare_results,
    comparison_table,
    dual_softmax,
    evaluate_scores,
    evaluation_result,
    hash_queries,
    markdown_report,
    retrieval_metrics,
)


def random_scores(seed, num_texts=40, num_videos=40, gain=2.0):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(num_texts, num_videos, generator=generator)
    scores[torch.arange(num_texts), torch.arange(num_texts) % num_videos] += gain
    return scores


def make_result(scores=None, video_of_text=None, **provenance):
    scores = random_scores(0) if scores is None else scores
    metrics = evaluate_scores(scores, video_of_text)
    fields = {
        "dataset": "msrvtt",
        "split": "test",
        "selected_on": "val",
        "seed": 0,
        "config_fingerprint": "0123456789ab",
        "weights_hash": "ba9876543210",
    }
    return evaluation_result(metrics, **{**fields, **provenance})


def test_a_result_survives_the_file(tmp_path):
    result = make_result(random_scores(1, 40, 10), torch.arange(40) % 10, queries_hash="abc", seed=None)
    result.save(tmp_path / "run" / "results.json")
    assert EvaluationResult.read(tmp_path / "run" / "results.json") == result
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["results.json"]


def test_the_file_says_where_the_numbers_come_from(tmp_path):
    scores = random_scores(1)
    make_result(scores, num_missing_videos=3).save(tmp_path / "results.json")
    text = (tmp_path / "results.json").read_text()
    saved = json.loads(text)
    assert {
        name: saved[name] for name in ("dataset", "split", "selected_on", "protocol", "rescoring", "seed")
    } == {
        "dataset": "msrvtt",
        "split": "test",
        "selected_on": "val",
        "protocol": "max_caption",
        "rescoring": "none",
        "seed": 0,
    }
    assert saved["gare_version"] == __version__
    assert (saved["num_texts"], saved["num_videos"], saved["num_missing_videos"]) == (40, 40, 3)
    main = saved["text_to_video"]["by_ties"]["pessimistic"]
    assert main["recall_at_1"] == retrieval_metrics(scores).recall_at_1
    assert saved["video_to_text"]["ranks"] == retrieval_metrics(scores.T).ranks.tolist()
    assert set(saved["text_to_video"]["by_ties"]) == {"pessimistic", "average", "optimistic", "legacy"}
    interval = saved["text_to_video"]["intervals"]["recall_at_1"]
    assert interval["low"] <= main["recall_at_1"] <= interval["high"]
    assert f'"ranks": {saved["text_to_video"]["ranks"]}\n' in text  # on one line


def test_captions_of_one_video_are_kept_together():
    result = make_result(random_scores(1, 40, 10), torch.arange(40) % 10)
    assert result.text_to_video.groups == tuple(i % 10 for i in range(40))
    assert result.video_to_text.groups is None
    assert make_result().text_to_video.groups is None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda saved: saved.update(recall=1.0), "unknown key .recall."),
        (lambda saved: saved.pop("selected_on"), ".selected_on. is missing"),
        (lambda saved: saved.update(selected_on=""), "selected_on"),
        (lambda saved: saved.update(num_texts="40"), "num_texts"),
        (lambda saved: saved["text_to_video"]["ranks"].pop(), "40 queries, but 39 ranks"),
        (lambda saved: saved.update(num_videos=41), "40 texts and 41 videos, but queries for"),
        (lambda saved: saved["text_to_video"]["by_ties"].pop("average"), "by_ties must hold"),
        (lambda saved: saved["text_to_video"]["intervals"].pop("mean_rank"), "intervals must hold"),
        (lambda saved: saved["text_to_video"]["intervals"]["mean_rank"].update(width=1), "width"),
        (
            lambda saved: saved["video_to_text"]["by_ties"]["average"].update(recall_at_1=48.0),
            "must be at most 1",
        ),
    ],
)
def test_a_damaged_file_is_refused_with_the_reason(tmp_path, damage, message):
    path = tmp_path / "results.json"
    make_result().save(path)
    saved = json.loads(path.read_text())
    damage(saved)
    path.write_text(json.dumps(saved))
    with pytest.raises(EvaluationError, match=message) as caught:
        EvaluationResult.read(path)
    assert "gare evaluate" in str(caught.value)


def test_a_missing_or_foreign_file_is_refused(tmp_path):
    with pytest.raises(EvaluationError, match=r"cannot read.*No such file"):
        EvaluationResult.read(tmp_path / "results.json")
    with pytest.raises(EvaluationError, match="cannot read"):
        EvaluationResult.read(tmp_path)
    (tmp_path / "notes.json").write_text("R@1 48.0")
    with pytest.raises(EvaluationError, match="Expecting value"):
        EvaluationResult.read(tmp_path / "notes.json")


def test_results_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_result().split = "val"


def test_the_table_prints_percentages_and_all_three_policies():
    scores = torch.eye(4)
    scores[0, 1] = 1.0
    lines = markdown_report(make_result(scores)).splitlines()
    assert lines[0].startswith("**msrvtt**, split test, selected on val · 4 texts, 4 videos")
    assert lines[4].startswith("| text→video | pessimistic | 75.0 [25.0, 100.0] | 100.0 [100.0, 100.0] |")
    assert lines[6].startswith("| text→video | optimistic | 100.0 | 100.0 |")
    assert "average" in lines[5]
    assert not any("legacy" in line for line in lines)


def test_the_legacy_row_is_labelled():
    scores = torch.eye(4)
    scores[0, 1] = 1.0
    report = markdown_report(make_result(scores), legacy=True)
    assert "| text→video | legacy bug, for comparison only: 5 ranks for 4 queries | 80.0 |" in report


def test_rescored_rows_have_a_table_of_their_own():
    scores = random_scores(0)
    rescored = make_result(dual_softmax(scores), rescoring="dsl")
    main, other = markdown_report(make_result(scores), rescored=[rescored]).split("Rescored in the light of")
    assert "DSL" not in main
    assert other.count("rescored: DSL") == 6
    alone = markdown_report(rescored)
    assert alone.count("| direction |") == 1
    assert "Rescored in the light of other queries" in alone


def test_missing_videos_are_printed():
    assert "**2 videos missing" in markdown_report(make_result(num_missing_videos=2))


def test_the_gallery_guard():
    assert check_gallery(expected=670, found=670) == 0
    assert check_gallery(expected=670, found=668, allow_missing=True) == 2
    with pytest.raises(EvaluationError, match=r"found 668 of 670 videos.*--allow-missing"):
        check_gallery(expected=670, found=668)
    with pytest.raises(EvaluationError, match="found 671 videos, but the split has 670"):
        check_gallery(expected=670, found=671, allow_missing=True)
    assert issubclass(EvaluationError, GareError)


def test_the_hash_of_queries_depends_on_their_order():
    assert hash_queries(["a", "b"], ["x"]) == hash_queries(["a", "b"], ["x"])
    assert (
        len({hash_queries(*case) for case in ((["a", "b"], ["x"]), (["b", "a"], ["x"]), (["a"], ["b", "x"]))})
        == 3
    )


def test_comparing_a_run_with_a_better_one():
    worse, better = make_result(random_scores(0, gain=1.0)), make_result(random_scores(0, gain=3.0))
    test = compare_results(worse, better)["text_to_video"]["recall_at_1"]
    assert test.a == worse.text_to_video.main.recall_at_1
    assert test.b == better.text_to_video.main.recall_at_1
    assert test.p_value < 0.01
    table = comparison_table({"text_to_video": {"recall_at_1": test}})
    assert table.splitlines()[2].startswith("| text→video | R@1 | ")
    assert f"| +{100 * test.difference:.1f} |" in table


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"split": "val"}, r"split \(test and val\)"),
        ({"dataset": "msvd"}, r"dataset \(msrvtt and msvd\)"),
        ({"rescoring": "dsl"}, r"rescoring \(none and dsl\)"),
        ({"num_missing_videos": 1}, "num_missing_videos"),
        ({"queries_hash": "other"}, r"queries_hash \(one and other\)"),
        ({"scores": random_scores(0, 39, 39)}, r"num_texts \(40 and 39\)"),
    ],
)
def test_results_of_different_queries_are_not_compared(other, message):
    with pytest.raises(EvaluationError, match=message):
        compare_results(make_result(queries_hash="one"), make_result(**{"queries_hash": "one", **other}))


def test_captions_of_other_videos_are_not_compared():
    first = make_result(random_scores(0, 20, 10), torch.arange(20) % 10)
    second = make_result(random_scores(0, 20, 10), torch.arange(20) // 2)
    with pytest.raises(EvaluationError, match="belong to different videos"):
        compare_results(first, second)


@pytest.fixture
def run_compare(tmp_path):
    app = typer.Typer()
    app.command()(compare)
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    make_result(random_scores(0, gain=1.0)).save(paths[0])
    make_result(random_scores(0, gain=3.0), selected_on="test").save(paths[1])
    return lambda *options: CliRunner().invoke(app, [*map(str, paths), *options])


def test_compare_prints_a_table_and_keeps_notes_off_stdout(run_compare):
    outcome = run_compare()
    assert outcome.exit_code == 0
    assert outcome.stdout.count("| text→video |") == outcome.stdout.count("| video→text |") == 6
    assert "warning" not in outcome.stdout
    assert "A was selected on val, B on test" in outcome.stderr


def test_compare_prints_json(run_compare):
    printed = json.loads(run_compare("--json").stdout)
    test = printed["text_to_video"]["recall_at_1"]
    assert test["difference"] == pytest.approx(test["b"] - test["a"])
    assert 0 < test["p_value"] < 0.01
    assert set(printed) == {"a", "b", "text_to_video", "video_to_text"}
