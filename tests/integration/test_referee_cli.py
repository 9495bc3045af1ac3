"""From a model to files of scores, and from those files back to the same numbers, in real processes."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
import torch

from gare.evaluate import EvaluationResult
from gare.train import RunConfig, train
from toy_data import recipe, write_dataset
from warm import run_gare as run


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("colours"))


@pytest.fixture(scope="module")
def measured(manifest, tmp_path_factory):
    """A folder with every file that `gare evaluate` writes."""
    best = train(
        RunConfig.load(recipe(manifest, epochs=1)),
        tmp_path_factory.mktemp("runs") / "run",
        device=torch.device("cpu"),
    )
    folder = tmp_path_factory.mktemp("out")
    outs = {"--out": "results.json", "--scores-out": "scores.safetensors", "--run-out": "run.trec"}
    outs |= {"--qrels-out": "qrels.txt", "--ranks-out": "ranks.csv"}
    options = [each for option, name in outs.items() for each in (option, folder / name)]
    outcome = run("evaluate", best, "--data", manifest, "--frames", 3, "--device", "cpu", *options)
    assert outcome.returncode == 0, outcome.stderr
    return folder


def protocols(*arguments):
    outcome = run("evaluate", "--scores", *arguments, "--json")
    assert outcome.returncode == 0, outcome.stderr
    found = json.loads(outcome.stdout)
    return {direction: found[direction] for direction in ("text_to_video", "video_to_text")}


def test_every_file_gives_the_numbers_of_the_model(measured, manifest):
    result = EvaluationResult.read(measured / "results.json")
    of_matrix = protocols(measured / "scores.safetensors")
    of_run = protocols(measured / "run.trec", "--qrels", measured / "qrels.txt")
    assert of_matrix == of_run
    for direction, rows in of_run.items():
        by_ties = getattr(result, direction).by_ties
        assert rows[0]["changes"] == {}
        for row in rows:
            ties = row["protocol"]["ties"]
            if set(row["changes"]) <= {"ties"} and ties in by_ties:
                assert row["numbers"]["R@1"] == by_ties[ties].recall_at_1
                assert row["numbers"]["MnR"] == by_ties[ties].mean_rank
    with (measured / "ranks.csv").open() as file:
        rows = list(csv.DictReader(file))
    forward = [
        int(row["above"]) + 1 + int(row["tied"]) for row in rows if row["direction"] == "text_to_video"
    ]
    assert tuple(forward) == result.text_to_video.ranks


def test_a_matrix_in_the_order_of_a_dataset(measured, manifest, tmp_path):
    from gare.evaluate.score_files import read_scores

    table = read_scores(measured / "scores.safetensors")
    np.save(tmp_path / "scores.npy", table.scores_TV.numpy())
    assert read_scores(tmp_path / "scores.npy", data=manifest, split="test").text_ids == table.text_ids
    outcome = run(
        "evaluate", "--scores", tmp_path / "scores.npy", "--data", manifest, "--out", tmp_path / "r.json"
    )
    assert outcome.returncode == 0, outcome.stderr
    assert "| rescoring: dsl | 8 | 8 |" in outcome.stdout
    assert "- dsl: dual softmax" in outcome.stdout
    assert "left out: captions any_caption (every video has one text)" in outcome.stderr
    assert EvaluationResult.read(tmp_path / "r.json").selected_on == "unknown"


def test_compare_finds_that_the_model_and_its_scores_are_one(measured):
    outcome = run("compare", measured / "scores.safetensors", measured / "results.json", "--changes", 1)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.count("nothing is to be explained") == 2
    assert "0 of 8 ranks differ" in outcome.stdout


def test_a_matrix_by_place_is_compared_with_a_run_by_name(measured, tmp_path):
    """The qrels of the run do not fit a matrix without ids, whose diagonal is right."""
    from gare.evaluate.score_files import read_scores

    np.save(tmp_path / "scores.npy", read_scores(measured / "scores.safetensors").scores_TV.numpy())
    files = [tmp_path / "scores.npy", measured / "run.trec"]
    outcome = run("compare", *files, "--qrels-b", measured / "qrels.txt", "--changes", 1)
    assert outcome.returncode == 0, outcome.stderr
    assert "nothing is to be explained" in outcome.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["evaluate", "--scores", "."], 1, ". is a folder; give a file"),
        (["evaluate", "--scores", "none.npy"], 1, "there is no file none.npy"),
        (["evaluate", "--scores", "run.trec"], 1, "--qrels FILE"),
        (["evaluate", "--scores", "scores.safetensors", "--subset", "99"], 1, "there are 8 videos"),
        (
            ["evaluate", "--scores", "scores.safetensors", "--run-out", "no/run.trec"],
            1,
            "there is no folder no",
        ),
        (["evaluate", "--scores", "scores.safetensors", "--scores-out", "x.npy"], 2, "something.safetensors"),
        (["evaluate", "model", "--scores", "scores.safetensors"], 2, "does not go with"),
        (["evaluate", "model", "--data", "x", "--subset", "5"], 2, "they are for --scores"),
        (["compare", "scores.safetensors", "R@1=lots"], 1, "neither a file nor a number"),
        (["compare", "scores.safetensors", "R@1=5", "--direction", "up"], 2, "not one of"),
    ],
)
def test_mistakes_are_said_without_a_traceback(measured, arguments, status, message):
    outcome = run(*arguments, cwd=measured)
    assert outcome.returncode == status
    assert message in " ".join(outcome.stderr.replace("│", " ").split())
    assert "Traceback" not in outcome.stderr
