"""Checkpoints of training: whole after a stop at any file operation; damage is seen when they are read."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
import torch
from test_train_interruptions import outcome

from gare import GARE, atomic
from gare.errors import CheckpointError, ConfigError, TrainingError
from gare.train import RunConfig, train, train_state
from gare.train.distributed import Processes
from gare.train.optimizers import build_optimizer
from gare.train.run_log import RunLog
from gare.train.starting_model import build_model
from gare.train.train_state import TrainState, has_checkpoint
from toy_data import recipe, write_dataset

CPU = torch.device("cpu")


class Killed(BaseException):
    """What a kill looks like from inside: nothing that the package catches."""


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("colours"))


@pytest.fixture(scope="module")
def config(manifest):
    return RunConfig.load(recipe(manifest, epochs=2))


def new_state(config: RunConfig) -> TrainState:
    model = build_model(config, Processes(0, 1, CPU))
    return TrainState(model, build_optimizer(model, config.optimizer), ema_decay=0.5)


def advance(state: TrainState) -> None:
    """A step that moves every weight by an amount of its own."""
    for parameter in state.model.parameters():
        parameter.grad = torch.full_like(parameter, 1.0)
    state.step()


def contents(state: TrainState) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.model.state_dict().items()}


class Operations:
    """Stops at the n-th file operation, before it or half way through; after that nothing is written."""

    def __init__(self, patch: pytest.MonkeyPatch, stop_at: int, *, torn: bool) -> None:
        self._left, self._torn, self.stopped = stop_at, torn, False
        for owner, name in [
            (train_state, "save_file"),
            (train_state.shutil, "rmtree"),
            (Path, "mkdir"),
            (Path, "write_text"),
            (Path, "replace"),
            (Path, "unlink"),
            (os, "replace"),
            (atomic, "flush"),
        ]:
            patch.setattr(owner, name, self._counted(name, getattr(owner, name)))

    def _counted(self, name, original):
        def operation(*args, **options):
            if self.stopped:  # a process that is dead cleans up nothing
                raise Killed
            self._left -= 1
            if self._left == 0:
                self.stopped = True
                if self._torn:
                    _half(name, original, args, options)
                raise Killed
            return original(*args, **options)

        return operation


def _half(name, original, args, options) -> None:
    if name == "save_file":
        original(*args, **options)
        os.truncate(args[1], os.path.getsize(args[1]) // 2)
    elif name == "write_text":
        original(args[0], args[1][: len(args[1]) // 2], **options)
    elif name == "rmtree":
        for file in sorted(Path(args[0]).glob("*"))[:1]:
            os.remove(file)


@pytest.mark.parametrize("torn", [False, True], ids=["before", "half-way"])
def test_a_stop_at_any_file_operation_of_a_save_leaves_a_whole_checkpoint(
    config, tmp_path, monkeypatch, torn
):
    """Saves of steps 1, 2 and 2 again: what `load` finds is the last save that ended, or the one after."""
    again = new_state(config)
    for stop_at in count(1):
        folder, state = tmp_path / f"{stop_at}", new_state(config)
        ended, begun = None, None
        with monkeypatch.context() as patch:
            operations = Operations(patch, stop_at, torn=torn)
            try:
                for step in (1, 2, 2):
                    if state.progress.step < step:
                        advance(state)
                    begun = (step, contents(state))
                    state.save(folder)
                    ended = begun
            except Killed:
                pass
        if ended is None and not has_checkpoint(folder):
            continue  # stopped in the very first save: there is nothing to lose yet
        again.load(folder)
        assert again.progress.step in {(ended or begun)[0], begun[0]}, stop_at
        found = contents(again)
        expected = begun[1] if again.progress.step == begun[0] else ended[1]
        assert all(torch.equal(found[name], expected[name]) for name in expected), stop_at
        again.save(folder)  # and goes on
        again.load(folder)
        assert not list(folder.glob(f"*{atomic.PART_SUFFIX}"))
        if not operations.stopped:
            break
    assert stop_at > 30  # operations, so that it is seen when the patches miss them


def test_a_run_stopped_at_any_file_operation_ends_as_an_uninterrupted_one(config, tmp_path, monkeypatch):
    """Every seventh operation of the run, so that all kinds and both epochs are met in some seconds."""
    train(config, tmp_path / "whole", device=CPU)
    expected = outcome(tmp_path / "whole")
    for stop_at in count(1, 7):
        run = tmp_path / f"{stop_at}"
        with monkeypatch.context() as patch:
            operations = Operations(patch, stop_at, torn=True)
            with suppress(Killed):
                train(config, run, device=CPU)
        if not operations.stopped:
            break
        train(config, run, resume=(run / "config.toml").exists(), device=CPU)
        assert outcome(run) == expected, stop_at


def test_the_last_two_checkpoints_are_kept(config, tmp_path):
    state = new_state(config)
    for _ in range(4):
        advance(state)
        state.save(tmp_path)
    state.close_epoch()
    state.save(tmp_path)  # the same step, with more known: beside the other
    kept = sorted(path.name for path in tmp_path.glob("step-*"))
    assert len(kept) == 2
    assert all(name.startswith("step-00000004") for name in kept)
    assert (tmp_path / "latest").read_text() == kept[-1]
    again = new_state(config)
    again.load(tmp_path)
    assert again.progress.is_closed


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def latest(folder: Path) -> Path:
    return folder / (folder / "latest").read_text()


@pytest.mark.parametrize(
    "file", ["model.safetensors", "optimizer.safetensors", "average.safetensors", "progress.json"]
)
@pytest.mark.parametrize("damage", [flip_a_bit, Path.unlink], ids=["flipped", "deleted"])
def test_damage_is_seen_and_the_checkpoint_before_it_is_taken(config, tmp_path, file, damage):
    state = new_state(config)
    advance(state)
    state.save(tmp_path)
    expected = contents(state)
    advance(state)
    state.save(tmp_path)
    damage(latest(tmp_path) / file)
    again = new_state(config)
    said = again.load(tmp_path)
    assert again.progress.step == 1
    assert all(torch.equal(tensor, expected[name]) for name, tensor in contents(again).items())
    assert said is not None
    assert "step-00000002 is damaged" in said
    assert file in said
    assert "going on from step-00000001" in said
    advance(again)
    again.save(tmp_path)  # does not count the damaged one among the two
    damage(latest(tmp_path) / file)
    assert new_state(config).load(tmp_path) is not None


def test_nothing_whole_left_is_refused_and_each_reason_given(config, tmp_path):
    state = new_state(config)
    for _ in range(2):
        advance(state)
        state.save(tmp_path)
    for folder in tmp_path.glob("step-*"):
        flip_a_bit(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"step-00000002: model\.safetensors .*step-00000001: model\.s"):
        new_state(config).load(tmp_path)


def test_a_run_says_that_it_goes_on_from_the_checkpoint_before(config, tmp_path, capfd):
    train(config, tmp_path / "whole", device=CPU)
    run = tmp_path / "damaged"
    shutil.copytree(tmp_path / "whole", run)
    shutil.rmtree(run / "last")
    flip_a_bit(latest(run / "checkpoints") / "model.safetensors")
    train(config, run, resume=True, device=CPU)
    assert "is damaged" in capfd.readouterr().err
    assert outcome(run) == outcome(tmp_path / "whole")


def test_a_checkpoint_without_checksums_is_accepted(config, tmp_path):
    """Version 0.1 wrote none."""
    state = new_state(config)
    advance(state)
    state.save(tmp_path)
    (latest(tmp_path) / "checksums.json").unlink()
    assert new_state(config).load(tmp_path) is None


@pytest.mark.parametrize("where", ["save_file", "pointer", "metrics", "best"])
def test_a_full_disk_stops_the_run_with_a_message(config, tmp_path, monkeypatch, where):
    run, full = tmp_path / "run", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    calls = count(1)

    def fails_after_a_while(original):
        def write(*args, **options):
            if next(calls) >= 5:
                raise full
            return original(*args, **options)

        return write

    owner, name = {
        "save_file": (train_state, "save_file"),
        "pointer": (train_state.atomic, "write_text"),
        "metrics": (RunLog, "_write"),
        "best": (GARE, "save_pretrained"),
    }[where]
    if where == "best":
        calls = count(5)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails_after_a_while(getattr(owner, name)))
        with pytest.raises(TrainingError, match=r"the disk is full.*--resume") as caught:
            train(config, run, device=CPU)
    assert str(run) in str(caught.value)
    assert not list((run / "checkpoints").glob(f"*{atomic.PART_SUFFIX}"))
    train(config, tmp_path / "whole", device=CPU)
    train(config, run, resume=True, device=CPU)
    assert outcome(run) == outcome(tmp_path / "whole")


@pytest.mark.parametrize("vocabulary", [10**15, 10**30])
def test_a_model_that_no_memory_can_hold_is_a_message(manifest, tmp_path, vocabulary):
    settings = recipe(manifest)
    settings["model"] = {**settings["model"], "encoder": {"name": "tiny", "vocabulary": vocabulary}}
    with pytest.raises(ConfigError, match="model of this recipe does not fit into memory"):
        train(RunConfig.load(settings), tmp_path / "run", device=CPU)
