"""`gare train --log-to`: what a tracker is told. With the real ones where they are installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from typer.testing import CliRunner

from gare import extras
from gare.cli.main import app
from gare.errors import MissingExtraError, TrainingError
from gare.train import RunConfig, log_sinks, train
from gare.train.log_sinks import open_sinks
from servers import HANG_S
from toy_data import recipe, write_dataset
from warm import run_python


class Tracker(ModuleType):
    """Stands for wandb or trackio: their three calls, and what they were called with."""

    def __init__(self, name, *, fails_at=None):
        super().__init__(name)
        self.calls, self.fails_at = [], fails_at

    def _note(self, call, **values):
        print(f"{call}!")  # as trackio does
        self.calls.append((call, values))
        if self.fails_at == call:
            raise RuntimeError("no network\nand more")

    def init(self, **values):
        self._note("init", **values)

    def log(self, metrics, step):
        self._note("log", metrics=metrics, step=step)

    def finish(self):
        self._note("finish")


@pytest.fixture
def tracker(monkeypatch):
    def install(name, **options):
        made = Tracker(name, **options)
        monkeypatch.setitem(sys.modules, name, made)
        monkeypatch.setattr(log_sinks, "require", lambda extra, user: None)
        return made

    return install


def run(folder: Path, *names, resume=False, epochs=1):
    config = RunConfig.load(recipe(write_dataset(folder / "data"), epochs=epochs))
    return train(config, folder / "my run", device=torch.device("cpu"), log_to=names, resume=resume)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_what_metrics_jsonl_has(name, tracker, tmp_path, capsys):
    made = tracker(name)
    run(tmp_path, name)
    assert "init!" not in capsys.readouterr().out
    calls = [call for call, _ in made.calls]
    assert (calls[0], calls[-1]) == ("init", "finish")
    begun = made.calls[0][1]
    assert (begun["project"], begun["config"]["selection_split"], begun["resume"]) == ("gare", "val", "allow")
    assert begun["name"].startswith("my run")
    logged = [json.loads(line) for line in (tmp_path / "my run/metrics.jsonl").read_text().splitlines()]
    sent = [values for call, values in made.calls if call == "log"]
    assert [values["step"] for values in sent] == [record["step"] for record in logged]
    assert sent[0]["metrics"]["loss"] == logged[0]["loss"]
    last = next(record for record in logged if "split" in record)
    values = next(values for values in sent if "val/text_to_video/recall_at_1" in values["metrics"])
    assert values["metrics"]["val/text_to_video/recall_at_1"] == last["text_to_video/recall_at_1"]


def test_a_resumed_run_is_the_same_run(tracker, tmp_path):
    made = tracker("wandb")
    run(tmp_path, "wandb")
    run(tmp_path, "wandb", resume=True)
    first, second = (values["id"] for call, values in made.calls if call == "init")
    assert first == second
    assert len(first) == 8


def test_a_tracker_that_does_not_start_is_an_error_and_closes_the_others(tracker, tmp_path):
    first, second = tracker("wandb"), tracker("trackio", fails_at="init")
    with pytest.raises(
        TrainingError, match=r"trackio does not start: no network\. Train without --log-to trackio"
    ):
        open_sinks(["wandb", "trackio"], tmp_path, {})
    assert [call for call, _ in first.calls] == ["init", "finish"]
    assert [call for call, _ in second.calls] == ["init"]


def test_a_tracker_that_fails_later_is_named_once_and_training_goes_on(tracker, tmp_path, capsys):
    made = tracker("wandb", fails_at="log")
    best = run(tmp_path, "wandb")
    assert best.is_dir()
    assert [call for call, _ in made.calls] == ["init", "log"]
    said = capsys.readouterr().err
    assert said.count("wandb failed (no network); training goes on, metrics.jsonl has everything") == 1


def test_a_missing_tracker_names_its_extra(monkeypatch, tmp_path):
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="gare train --log-to wandb needs wandb, not installed here"):
        open_sinks(["wandb"], tmp_path, {})
    done = CliRunner().invoke(app, ["train", "own_csv", "--out", str(tmp_path), "--log-to", "mlflow"])
    assert done.exit_code == 2
    assert "is not one of wandb, trackio" in " ".join(done.output.replace("│", " ").split())


REAL = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch
from gare.train import RunConfig, train
from toy_data import recipe, write_dataset
folder = Path.cwd()
config = RunConfig.load(recipe(write_dataset(folder / "data"), epochs=1))
print(train(config, folder / "run", device=torch.device("cpu"), log_to=[{name!r}]))
"""


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_the_real_tracker_without_a_network(name, tmp_path, monkeypatch):
    pytest.importorskip(name, reason=f"the extra '{name}' is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    code = REAL.format(tests=str(Path(__file__).parents[1]), name=name)
    done = run_python(["-c", code], cwd=tmp_path, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "run/best")
    kept = (
        list((tmp_path / "run").rglob("*.wandb"))
        if name == "wandb"
        else list((tmp_path / "trackio").rglob("*.db"))
    )
    assert kept
