"""Rows × seeds: the table, and that finished cells are never computed again."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from gare.train import RunConfig
from toy_data import recipe, write_dataset
from warm import run_gare as run

TABLE = """
title = "Losses"
[[rows]]
name = "baseline"
set = ["model.increment.enabled=false"]
[[rows]]
name = "full GARE"
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ablation")
    manifest = write_dataset(folder / "data")
    (folder / "recipe.toml").write_text(RunConfig.load(recipe(manifest, epochs=2)).to_toml())
    (folder / "table.toml").write_text(TABLE)
    return folder


def test_a_table_of_rows_and_seeds(files):
    ablate = [
        "ablate",
        files / "table.toml",
        "--recipe",
        files / "recipe.toml",
        "--out",
        files / "out",
        "--device",
        "cpu",
    ]

    def stamps() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (files / "out").rglob("*.safetensors")}

    begun = run(*ablate, "--seeds", 1, "--jobs", 2)
    assert begun.returncode == 0, begun.stderr
    early = stamps()
    first = run(*ablate, "--seeds", 2)
    assert first.returncode == 0, first.stderr
    assert early
    assert early.items() < stamps().items()
    assert "| baseline |" in first.stdout
    assert "p against baseline" in first.stdout
    assert (files / "out" / "table.md").read_text() == first.stdout.rstrip("\n") + "\n"
    numbers = json.loads((files / "out" / "table.json").read_text())
    assert [row["seeds"] for row in numbers["rows"]] == [[0, 1], [0, 1]]
    assert numbers["rows"][0]["text_to_video"]["recall_at_1"]["p_value"] is None
    assert 0 < numbers["rows"][1]["text_to_video"]["recall_at_1"]["p_value"] <= 1
    assert len({each for row in numbers["rows"] for each in row["weights"]}) == 4
    assert numbers["queries_hash"]
    head, *lines = (files / "out" / "ranks.csv").read_text().splitlines()
    assert head.split(",")[2:] == [f"{row['name']}/{seed}" for row in numbers["rows"] for seed in (0, 1)]
    forward = [line.split(",")[2:4] for line in lines if line.startswith("text_to_video,")]
    hits = [rank == "1" for row in forward for rank in row]
    expected = numbers["rows"][0]["text_to_video"]["recall_at_1"]["mean"]
    assert sum(hits) / len(hits) == pytest.approx(expected)
    with (files / "out" / "selection.csv").open() as file:
        evaluations = list(csv.DictReader(file))
    chosen = [each for each in evaluations if each["chosen"] == "1"]
    assert [(each["row"], each["seed"]) for each in chosen] == [
        (row["name"], str(seed)) for row in numbers["rows"] for seed in (0, 1)
    ]
    for each in chosen:  # the best of its run
        own = [one for one in evaluations if (one["row"], one["seed"]) == (each["row"], each["seed"])]
        best = max(float(one["text_to_video/recall_at_1"]) for one in own)
        assert float(each["text_to_video/recall_at_1"]) == best

    late = stamps()
    second = run(*ablate, "--seeds", 2)
    assert second.stdout == first.stdout
    assert stamps() == late
    alone = run(*ablate, "--seeds", 2, "--without", "full GARE")
    assert "| baseline |" in alone.stdout
    assert "full GARE" not in alone.stdout
    mistaken = run(*ablate, "--without", "full")
    assert (mistaken.returncode, "the rows are baseline, full GARE" in mistaken.stderr) == (1, True)


def test_train_evaluate_compare(files):
    for seed in (0, 1):
        out = files / f"run{seed}"
        trained = run(
            "train", files / "recipe.toml", "--out", out, "--device", "cpu", "--set", f"seed={seed}"
        )
        assert trained.returncode == 0, trained.stderr
        assert trained.stdout.strip() == str(out / "best")
        evaluated = run(
            "evaluate", out / "best", "--data", files / "data", "--frames", 3, "--device", "cpu",
            "--out", out / "results.json", "--rescore", "dsl", "--legacy-ties",
        )  # fmt: skip
        assert evaluated.returncode == 0, evaluated.stderr
        assert "selected on val" in evaluated.stdout
        assert "rescored: DSL" in evaluated.stdout
    compared = run("compare", files / "run0" / "results.json", files / "run1" / "results.json")
    assert compared.returncode == 0, compared.stderr
    same = run("train", files / "recipe.toml", "--out", files / "run0", "--device", "cpu")
    assert (same.returncode, "already holds a run" in same.stderr) == (1, True)


def test_a_split_that_is_not_there_is_told_before_anything_is_trained(files, tmp_path):
    table = ["ablate", files / "table.toml", "--recipe", files / "recipe.toml"]
    result = run(*table, "--out", tmp_path / "out", "--split", "tset", "--device", "cpu")
    assert result.returncode == 1
    assert "no split 'tset'" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_told_without_a_traceback(files, tmp_path):
    (tmp_path / "taken").touch()
    result = run("train", files / "recipe.toml", "--out", tmp_path / "taken" / "run", "--device", "cpu")
    assert result.returncode == 1
    assert "there is a file where a folder is needed" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "missing.toml", "--out", "x"], "does not exist"),
        (["evaluate", "missing", "--data", "x", "--selected-on", "val"], "is not a folder here"),
        (["evaluate", "missing", "--data", "x"], "is not a folder here"),
        (["evaluate", "gare-mini", "--data", "x"], "say it with --selected-on"),
        (["evaluate", "missing", "--data", "x", "--out", "."], ". is a folder; name a file"),
        (["evaluate", "missing", "--data", "x", "--out", "taken/x"], "taken: there is a file where a folder"),
        (["train", ".", "--out", "x"], ". is a folder; give the path of a TOML file"),
    ],
)
def test_mistakes_are_told_without_a_traceback(arguments, message, tmp_path):
    (tmp_path / "taken").touch()
    result = run(*arguments, cwd=tmp_path)
    assert result.returncode == 1
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
