"""A loss term from outside the package, written here alone and in docs/how-to/add-a-loss-term.md.

A class, a line, and a recipe that names it.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from gare.cli.main import app
from gare.errors import ConfigError
from gare.objective import TERMS, LossTerm, ScoredBatch
from gare.settings import NonNegativeFloat, PositiveFloat
from gare.train import RunConfig, train
from strangers import as_it_was, blocks, installed, points
from toy_data import recipe, write_dataset

PAGE = "add-a-loss-term.md"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class ShortTexts(LossTerm):
    """Text vectors should have a given length."""

    weight: NonNegativeFloat = 0.1
    length: PositiveFloat = 1.0

    def __call__(self, batch: ScoredBatch) -> torch.Tensor:
        return (batch.text.text_TD.norm(dim=1) - self.length).square().mean()


@pytest.fixture(autouse=True)
def short_texts():
    with as_it_was(TERMS):
        TERMS.register("short_texts", ShortTexts)
        yield


def write_recipe(folder: Path, more: str = "") -> Path:
    (folder / "data").mkdir(exist_ok=True)
    plain = RunConfig.load(recipe(write_dataset(folder / "data"), epochs=1))
    (folder / "recipe.toml").write_text(plain.to_toml() + more)
    return folder / "recipe.toml"


def test_the_page_shows_this_code_and_its_lines_run(tmp_path, monkeypatch, capsys):
    own, use = blocks(PAGE, "python")
    assert inspect.getsource(ShortTexts) in own
    write_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    exec(compile(use, PAGE, "exec"), dict(globals()))
    assert "term/short_texts" in (tmp_path / "runs/short/metrics.jsonl").read_text()


def test_an_installed_term_is_named_by_a_recipe_on_the_command_line(tmp_path):
    (lines,) = (block for block in blocks(PAGE, "toml") if "[objective.terms" in block)
    path, out = write_recipe(tmp_path, "\n" + lines), tmp_path / "run"
    TERMS._entries.pop("short_texts")
    with installed(tmp_path, "my_terms", blocks(PAGE, "python")[0], points(PAGE)):
        done = CliRunner().invoke(app, ["train", str(path), "--out", str(out), "--device", "cpu"])
        assert done.exit_code == 0, done.output + str(done.exception)
        assert TERMS["short_texts"].__module__ == "my_terms"
        assert RunConfig.load(out / "config.toml").objective.terms["short_texts"].length == 3


def run(tmp_path, name, weight):
    (tmp_path / "data").mkdir(exist_ok=True)
    plain = RunConfig.load(recipe(write_dataset(tmp_path / "data"), epochs=20, batch_size=8, chunk_size=3))
    own = f"\n[objective.terms.short_texts]\nweight = {weight}\nlength = 3\n"
    (tmp_path / f"{name}.toml").write_text(plain.to_toml() + own)
    train(RunConfig.load(tmp_path / f"{name}.toml"), tmp_path / name, device=CPU)
    lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


def test_a_recipe_that_names_it_trains_with_it(tmp_path, capsys):
    steps = run(tmp_path, "with", 10.0)
    first = steps[0]
    weights = {"contrastive": 1, "kl": 0.07, "radius": 0.01, "direction": 0.01, "short_texts": 10}
    by_hand = sum(weight * first[f"term/{name}"] for name, weight in weights.items())
    assert first["loss"] == pytest.approx(by_hand, rel=1e-5)  # weighted once, logged raw
    without = run(tmp_path, "without", 0.0)
    assert without[0]["term/short_texts"] == first["term/short_texts"]
    assert steps[-1]["term/short_texts"] < 0.8 * without[-1]["term/short_texts"]
    assert "short_texts" in capsys.readouterr().err  # shown beside the others


def test_its_settings_are_checked_saved_and_resumed(tmp_path):
    run(tmp_path, "run", 0.5)
    saved = RunConfig.load(tmp_path / "run" / "config.toml")
    assert saved.objective.terms["short_texts"] == ShortTexts(weight=0.5, length=3.0)
    train(saved, tmp_path / "run", resume=True, device=CPU)
    with pytest.raises(ConfigError, match="short_texts: length: must be greater than 0"):
        RunConfig.load(tmp_path / "run.toml", ["objective.terms.short_texts.length=0"])
    with pytest.raises(
        ConfigError, match=r"no loss term 'long_texts'; there are: .*teacher, .*, short_texts"
    ):
        RunConfig.load(tmp_path / "run.toml", ["objective.terms.long_texts.weight=1"])
