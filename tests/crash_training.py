"""The writes of training that are stopped: a checkpoint, the best model, results, and a whole short run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crash_server import CrashServer, Outcome
from toy_data import recipe, write_dataset
from write_shim import Stop, read_trace

SCENES = ("checkpoint", "first best model", "best model", "last model", "results.json", "training run")


@dataclass
class TrainingStage:
    """An operation on a folder, ready to be done again and again."""

    name: str
    server: CrashServer
    template: Path
    config: str
    after: Any
    traced: str = ""
    """The folder whose writes are in the trace."""
    num_writes: int = 0
    kinds: list[str] = field(default_factory=list)

    def points(self, mode: str, stride: int = 1, offset: int = 0) -> Iterator[int]:
        for number in range(1 + offset % stride, self.num_writes + 1, stride):
            if mode != "torn" or self.kinds[number - 1] == "W":
                yield number

    def copy(self) -> Path:
        number = len(list(self.template.parent.glob("copy*")))
        return Path(shutil.copytree(self.template, self.template.parent / f"copy{number}"))

    def arguments(self, folder: Path) -> dict[str, Any]:
        return {"name": self.name, "folder": str(folder), "config": self.config}


def set_stage(name: str, server: CrashServer, folder: Path) -> TrainingStage:
    """Do what comes before the operation, then the operation itself once."""
    folder.mkdir(parents=True)
    values = recipe(write_dataset(folder / "data", videos=4), epochs=2, log_every=1)
    config = json.dumps(values)
    template = folder / "template"
    template.mkdir()
    server.do("train_before", name=name, folder=str(template), config=config)
    stage = TrainingStage(name, server, template, config, None)
    reference = stage.copy()
    trace = str(folder / "trace")
    done = server.run("train_step", Stop(str(reference), trace=trace), **stage.arguments(reference))
    done.get()
    stage.traced, stage.num_writes = str(reference), done.num_writes
    stage.kinds = [write.kind for write in read_trace(trace) if write.kind not in "FA"]
    stage.after = server.do("train_outcome", **stage.arguments(reference))
    assert not list(reference.rglob("*.part"))
    shutil.rmtree(reference)
    return stage


def try_point(stage: TrainingStage, at: int, mode: str) -> Outcome:
    """Stop at this write, check what is left, and do it again."""
    folder = stage.copy()
    try:
        outcome = stage.server.run(
            "train_step", Stop(str(folder), at=at, mode=mode), **stage.arguments(folder)
        )
        assert outcome.was_killed or outcome.code == 0, outcome.error
        check_after(stage, folder)
        return outcome
    except AssertionError as error:
        raise AssertionError(
            f"'{stage.name}' stopped {mode} write {at} of {stage.num_writes}: {error}"
        ) from error
    finally:
        shutil.rmtree(folder)


def check_after(stage: TrainingStage, folder: Path, *, is_acknowledged: bool = False) -> None:
    """What is left can be read and is old or new; done again, it is new, and nothing else is there."""
    left = stage.server.do("train_check", **stage.arguments(folder))
    assert left != "old" or not is_acknowledged, "what was acknowledged is gone"
    stage.server.do("train_step", **stage.arguments(folder))
    again = stage.server.do("train_outcome", **stage.arguments(folder))
    different = [key for key in stage.after if again.get(key) != stage.after[key]]
    assert not different, f"done again, it differs: {different}"
    # A file that was killed half-way may stay beside its place; a folder, which is large, may not.
    assert not [path for path in folder.rglob("*.part") if path.is_dir()], "unfinished folders stay"


# --- in the process -----------------------------------------------------------------------------------------

Task = Callable[..., Any]


def before(name: str, folder: Path, config: str) -> None:
    import gare.train.training_run as training_run

    state, settings = _state(config, 1)
    if name == "checkpoint":
        state.save(folder / "checkpoints")
        _advance(state, 2)
        state.save(folder / "checkpoints")
    if name == "best model":
        _keep(training_run, state, settings, folder, 1)
    if name == "results.json":
        _result(1).save(folder / "results.json")


def step(name: str, folder: Path, config: str) -> None:
    """The operation; from what a crash left as well."""
    import gare.train.training_run as training_run
    from gare import atomic
    from gare.train.train_state import has_checkpoint

    if name == "checkpoint":
        state, _ = _state(config, 0)
        state.load(folder / "checkpoints")
        _advance(state, 3)
        state.save(folder / "checkpoints")
    elif name in ("first best model", "best model"):
        state, settings = _state(config, 2)
        _keep(training_run, state, settings, folder, 2)
    elif name == "last model":
        state, _ = _state(config, 2)
        with atomic.replacing_folder(folder / "last") as part:
            state.model.save_pretrained(part)
    elif name == "results.json":
        _result(2).save(folder / "results.json")
    else:
        _, settings = _state(config, 0)
        out = folder / "run"
        resume = (out / "config.toml").is_file() and (
            has_checkpoint(out / "checkpoints") or (out / "last").exists()
        )
        with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
            training_run.train(settings, out, resume=resume)


def check(name: str, folder: Path, config: str) -> str:
    """Whether what is there is old or new; fails where it is neither."""
    from gare import GARE
    from gare.evaluate.evaluation_results import EvaluationResult
    from gare.train.train_state import has_checkpoint

    if name == "checkpoint":
        found, _ = _state(config, 0)
        damage = found.load(folder / "checkpoints")
        assert damage is None, damage
        right, _ = _state(config, found.progress.step)
        assert found.progress.step in (2, 3)
        _assert_equal(found.model.state_dict(), right.model.state_dict())
        return "new" if found.progress.step == 3 else "old"
    if name in ("first best model", "best model"):
        place = folder / "best"
        if name == "first best model" and not place.exists():
            return "old"
        selection = json.loads((place / "selection.json").read_text())
        right, _ = _state(config, selection["step"])
        _assert_equal(GARE.from_pretrained(place).state_dict(), right.model.state_dict())
        assert selection["recall_at_1"] == {1: 0.25, 2: 0.5}[selection["step"]]
        return "new" if selection["step"] == 2 else "old"
    if name == "last model":
        if not (folder / "last").exists():
            return "old"
        _assert_equal(
            GARE.from_pretrained(folder / "last").state_dict(), _state(config, 2)[0].model.state_dict()
        )
        return "new"
    if name == "results.json":
        number = EvaluationResult.read(folder / "results.json").seed
        assert number in (1, 2)
        return "new" if number == 2 else "old"
    out = folder / "run"
    for model in (out / "best", out / "last"):
        if model.exists():
            GARE.from_pretrained(model)
    if has_checkpoint(out / "checkpoints"):
        found, _ = _state(config, 0)
        assert found.load(out / "checkpoints") is None
    return "new" if (out / "last").exists() else "old"


def outcome(name: str, folder: Path, config: str) -> dict[str, Any]:
    """Everything that the operation leaves, but how fast it went."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        key = str(path.relative_to(folder))
        if path.is_dir() or "tensorboard" in key:
            continue
        if path.name == "metrics.jsonl":
            lines = map(json.loads, path.read_text().splitlines())
            found[key] = [{k: x for k, x in line.items() if k != "pairs_per_second"} for line in lines]
        elif "checkpoints" not in key:
            found[key] = path.read_bytes()
    if (folder / "checkpoints").exists():
        state, _ = _state(config, 0)
        state.load(folder / "checkpoints")
        found["step"] = state.progress.step
        found["weights"] = {name: x.numpy().tobytes() for name, x in state.model.state_dict().items()}
    return found


def _state(config: str, num_steps: int) -> tuple[Any, Any]:
    """A model after so many steps, always the same."""
    import torch

    from gare.train import RunConfig
    from gare.train.distributed import Processes
    from gare.train.optimizers import build_optimizer
    from gare.train.starting_model import build_model
    from gare.train.train_state import TrainState

    settings = RunConfig.load(json.loads(config))
    model = build_model(settings, Processes(0, 1, torch.device("cpu")))
    state = TrainState(model, build_optimizer(model, settings.optimizer))
    _advance(state, num_steps)
    return state, settings


def _advance(state: Any, num_steps: int) -> None:
    """Steps that move every weight by an amount of its own."""
    import torch

    while state.progress.step < num_steps:
        for parameter in state.model.parameters():
            parameter.grad = torch.full_like(parameter, 1.0)
        state.step()


def _keep(training_run: Any, state: Any, settings: Any, folder: Path, num_right: int) -> None:
    """Keep the model as one that found so many of four videos first."""
    from types import SimpleNamespace

    import torch

    from gare.evaluate.caption_protocols import evaluate_scores

    right = torch.arange(4) < num_right
    metrics = evaluate_scores(torch.diag(torch.where(right, 1.0, -1.0)), torch.arange(4))
    source = SimpleNamespace(manifest=SimpleNamespace(header=SimpleNamespace(name="colours")))
    training_run._keep_if_best(state, metrics, settings, source, folder / "best")


def _result(seed: int) -> Any:
    import torch

    from gare.evaluate.caption_protocols import evaluate_scores
    from gare.evaluate.evaluation_results import evaluation_result

    metrics = evaluate_scores(torch.eye(4), torch.arange(4))
    facts = {"dataset": "colours", "split": "test", "selected_on": "val"}
    return evaluation_result(metrics, **facts, config_fingerprint="c", weights_hash="w", seed=seed)


def _assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    import torch

    assert one.keys() == other.keys()
    wrong = [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]
    assert not wrong, f"wrong weights: {wrong[:3]}"
