"""A run that is stopped anywhere and resumed leaves what an uninterrupted one leaves."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from gare.errors import GareError
from gare.train import RunConfig, train, training_run
from gare.train.train_state import TrainState
from toy_data import recipe, write_dataset

CPU = torch.device("cpu")
STEPS_PER_EPOCH = 2  # eight videos, four in a batch


class Killed(BaseException):
    """What a kill looks like from inside: nothing that the package catches."""


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("colours"))


def outcome(folder: Path) -> dict[str, Any]:
    """Everything that a run leaves, but how fast it went."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    metrics = [{key: x for key, x in line.items() if key != "pairs_per_second"} for line in lines]
    models = {
        f"{name}/{file}": (folder / name / file).read_bytes()
        for name, file in [
            ("best", "model.safetensors"),
            ("best", "config.json"),
            ("best", "selection.json"),
            ("last", "model.safetensors"),
        ]
    }
    return {"metrics": metrics, **models}


class Once:
    """Does something the first time that it is asked at a step."""

    def __init__(self, state_step: int, action) -> None:
        self._step, self._action = state_step, action

    def __call__(self, step: int) -> None:
        if step == self._step and self._action is not None:
            action, self._action = self._action, None
            action()

    start = before_step = lambda *_: None

    def after_step(self, step: int, loss: object) -> None:
        self(step + 1)


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def kill() -> None:
    raise Killed


def stop(monkeypatch, where: str, step: int) -> list[Once]:
    """Arrange for a run to be stopped at a step; returns what observes it."""
    what, _, place = where.partition(" ")
    once = Once(step, press_ctrl_c if what == "ctrl-c" else kill)
    if place == "in the step":
        return [once]
    owner, name = {
        "before the evaluation": (training_run, "_evaluate"),
        "in the evaluation": (training_run, "score_split"),
        "before best": (training_run, "_keep_if_best"),
        "after best": (training_run, "_keep_if_best"),
    }[place]
    original = getattr(owner, name)

    def stopped(first, *args, **options):
        done = original(first, *args, **options) if place == "after best" else None
        once(training_run_step())
        return done if place == "after best" else original(first, *args, **options)

    states: list[TrainState] = []
    create = TrainState.__init__
    monkeypatch.setattr(
        TrainState, "__init__", lambda self, *args, **kw: (create(self, *args, **kw), states.append(self))[0]
    )

    def training_run_step() -> int:
        return states[-1].progress.step

    monkeypatch.setattr(owner, name, stopped)
    return []


PLACES = [
    "ctrl-c in the step",
    "kill in the step",
    "kill before the evaluation",
    "ctrl-c in the evaluation",
    "kill in the evaluation",
    "kill before best",
    "kill after best",
]


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(
    ("epochs", "step", "changes"),
    [
        (1, STEPS_PER_EPOCH, {}),
        (3, 2 * STEPS_PER_EPOCH, {"ema_decay": 0.5}),
        (3, 3 * STEPS_PER_EPOCH, {"checkpoint_every": 200, "evaluate_every": 2}),
    ],
    ids=["only-epoch", "second-of-three", "last-of-three"],
)
def test_stopping_at_the_end_of_an_epoch_changes_nothing(
    manifest, tmp_path, monkeypatch, where, epochs, step, changes
):
    config = RunConfig.load(recipe(manifest, epochs=epochs, **changes))
    train(config, tmp_path / "whole", device=CPU)
    run = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        observers = stop(patch, where, step)
        try:
            assert (train(config, run, device=CPU, observers=observers) / "config.json").is_file()
        except (Killed, KeyboardInterrupt):
            best = train(config, run, resume=True, device=CPU)
            assert (best / "config.json").is_file()
    assert outcome(run) == outcome(tmp_path / "whole")


def test_a_run_that_lost_its_evaluation_to_an_earlier_version_gets_it(manifest, tmp_path):
    """Its checkpoint does not say whether the epoch was closed: evaluating again changes nothing."""
    config = RunConfig.load(recipe(manifest, epochs=2))
    train(config, tmp_path / "whole", device=CPU)
    run = tmp_path / "old"
    shutil.copytree(tmp_path / "whole", run)
    checkpoints = run / "checkpoints"
    latest = checkpoints / (checkpoints / "latest").read_text()
    for file in latest.glob("checksums*"):
        file.unlink()
    progress = json.loads((latest / "progress.json").read_text())
    (latest / "progress.json").write_text(
        json.dumps({key: progress[key] for key in ("step", "best_score", "best_step")})
    )
    shutil.rmtree(run / "last")
    train(config, run, resume=True, device=CPU)
    assert outcome(run) == outcome(tmp_path / "whole")


def test_a_run_whose_best_model_was_removed_says_so(manifest, tmp_path):
    config = RunConfig.load(recipe(manifest, epochs=1))
    best = train(config, tmp_path / "run", device=CPU)
    shutil.rmtree(best)
    with pytest.raises(GareError, match="best is missing"):
        train(config, tmp_path / "run", resume=True, device=CPU)
