"""What a run needs to go on as if it had never stopped: weights, optimiser, average, position.

Randomness is no part of it: every step seeds its own from the run's seed and its number.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer

from gare import atomic
from gare.errors import CheckpointError
from gare.model import GARE
from gare.model.model_files import load_state
from gare.model.version_0_1 import upgraded_state

POINTER, CHECKSUMS = "latest", "checksums.json"
NUM_KEPT = 2
"""Checkpoints that stay: the last, and the one before in case the last is damaged."""
MAX_LOG_SCALE = math.log(100)
"""A logit scale of 100, as everywhere in this field."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands; `step` is the number of steps done."""

    step: int = 0
    best_score: float = -1.0
    best_step: int = 0
    closed_step: int = -1
    """The step at which the last epoch was closed: evaluated, where due. Old checkpoints do not say."""

    @property
    def is_closed(self) -> bool:
        """Whether the end of an epoch at this step is done with."""
        return self.closed_step == self.step


class TrainState:
    """A run at one moment: the model, its optimiser, the average of its weights, and its progress.

    Args:
        ema_decay: how much of the average a step keeps; 0 keeps no average.
    """

    def __init__(self, model: GARE, optimizer: Optimizer, *, ema_decay: float = 0.0) -> None:
        self.model, self.optimizer, self._ema_decay = model, optimizer, ema_decay
        self.average: dict[str, Tensor] | None = None
        if ema_decay:
            self.average = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        self.progress = Progress()
        self._kept: list[str] = []  # names of whole checkpoints, the last one first

    @torch.no_grad()
    def step(self) -> None:
        """Move the weights by their gradients, and the average after them: one step more is done."""
        self.optimizer.step()
        if self.model.config.temperature.learnable:
            self.model.log_logit_scale.clamp_(max=MAX_LOG_SCALE)
        if self.average is not None:
            weights = {name: x for name, x in self.model.state_dict().items() if x.is_floating_point()}
            averages = [self.average[name] for name in weights]
            torch._foreach_lerp_(averages, list(weights.values()), 1 - self._ema_decay)
        self.progress = replace(self.progress, step=self.progress.step + 1)

    def improved(self, score: float) -> bool:
        """Note the score of the model as it is; true if none was better."""
        if score <= self.progress.best_score:
            return False
        self.progress = replace(self.progress, best_score=score, best_step=self.progress.step)
        return True

    def close_epoch(self) -> None:
        """Note that nothing is owed for the epoch that ends at this step."""
        self.progress = replace(self.progress, closed_step=self.progress.step)

    @contextmanager
    def averaged(self) -> Iterator[GARE]:
        """The model with its averaged weights, to evaluate or to save; afterwards its own are back."""
        if self.average is None:
            yield self.model
            return
        own = copy.deepcopy(self.model.state_dict())
        self.model.load_state_dict(self.average)
        yield self.model
        self.model.load_state_dict(own)

    def save(self, folder: Path) -> None:
        """Write a checkpoint beside those that are there, then point to it: a kill leaves a whole one.

        Nothing that `latest` points to is touched, also when the same step is saved again.
        """
        name = _unused_name(folder, self.progress.step)
        unfinished = folder / f"{name}{atomic.PART_SUFFIX}"
        remove_unfinished(folder)
        unfinished.mkdir(parents=True)
        try:
            self._write(unfinished)
            unfinished.replace(folder / name)
            atomic.flush(folder)
            atomic.write_text(folder / POINTER, name)
        except (OSError, SafetensorError):  # a full disk: give back what was taken
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        self._kept = [name, *self._kept][:NUM_KEPT]
        for other in _checkpoints(folder):
            if other.name not in self._kept:
                other.replace(other.with_name(other.name + atomic.PART_SUFFIX))
        remove_unfinished(folder)

    def load(self, folder: Path) -> str | None:
        """Go back to the last checkpoint, or to the one before if that is damaged: then a sentence says so.

        Checkpoints of version 0.1 have no checksums; they are read as they are.
        """
        damage: list[str] = []
        for source in _latest_first(folder):
            try:
                _verify(source)
                progress = Progress(**json.loads((source / "progress.json").read_text()))
                load_state(self.model, self._read(source / "model.safetensors"), source=str(source))
                _restore_optimizer(self.optimizer, self._read(source / "optimizer.safetensors"))
                average = source / "average.safetensors"
                self.average = self._read(average, str(self.model.device)) if average.exists() else None
            except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
                damage.append(f"{source.name}: {error}")
                continue
            self.progress, self._kept = progress, [source.name]
            if not damage:
                return None
            first, _, reason = damage[0].partition(": ")
            return f"the checkpoint {first} is damaged ({reason}); going on from {source.name}"
        raise CheckpointError(
            f"{folder} has no checkpoint that can be resumed ({'; '.join(damage) or 'none is there'}); "
            "start again in another folder"
        )

    def _write(self, folder: Path) -> None:
        save_file(_portable(self.model.state_dict()), folder / "model.safetensors")
        save_file(_portable(_optimizer_tensors(self.optimizer)), folder / "optimizer.safetensors")
        if self.average is not None:
            save_file(_portable(self.average), folder / "average.safetensors")
        (folder / "progress.json").write_text(json.dumps(asdict(self.progress)) + "\n")
        checksums = {file.name: _checksum(file) for file in sorted(folder.iterdir())}
        (folder / CHECKSUMS).write_text(json.dumps(checksums, indent=2) + "\n")
        for file in folder.iterdir():
            atomic.flush(file)
        atomic.flush(folder)

    def _read(self, file: Path, device: str = "cpu") -> dict[str, Tensor]:
        return upgraded_state(load_file(file, device), self.model.config.interaction.name)


def has_checkpoint(folder: Path) -> bool:
    """Whether a run can be resumed from this folder."""
    return (folder / POINTER).is_file()


def _unused_name(folder: Path, step: int) -> str:
    names = {path.name for path in _checkpoints(folder)}
    plain = f"step-{step:08d}"
    candidates = (plain if number == 1 else f"{plain}-{number}" for number in range(1, len(names) + 2))
    return next(name for name in candidates if name not in names)


def _checkpoints(folder: Path) -> list[Path]:
    """The finished checkpoints of a folder, the last one first."""
    found = {path: re.fullmatch(r"step-(\d+)(?:-(\d+))?", path.name) for path in folder.glob("step-*")}
    order = {path: (int(name[1]), int(name[2] or 1)) for path, name in found.items() if name}
    return sorted(order, key=lambda path: order[path], reverse=True)


def _latest_first(folder: Path) -> list[Path]:
    """What can be resumed, in the order to try it: what `latest` points to, then the others."""
    try:
        pointed_to = [folder / (folder / POINTER).read_text().strip()]
    except (OSError, ValueError):
        pointed_to = []
    return pointed_to + [path for path in _checkpoints(folder) if path not in pointed_to]


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed process had begun to write, or to remove."""
    for path in folder.glob(f"*{atomic.PART_SUFFIX}"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _checksum(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _verify(checkpoint: Path) -> None:
    """Refuse a checkpoint with a file that is missing or not as it was written."""
    stored = checkpoint / CHECKSUMS
    if not stored.exists():
        return
    for name, expected in json.loads(stored.read_text()).items():
        if not (checkpoint / name).is_file():
            raise ValueError(f"{name} is missing")
        if _checksum(checkpoint / name) != expected:
            raise ValueError(f"{name} does not have the checksum it was saved with")


def _portable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}/{key}": torch.as_tensor(value)
        for group in optimizer.param_groups
        for name, parameter in zip(group["names"], group["params"], strict=True)
        for key, value in optimizer.state[parameter].items()
    }


def _restore_optimizer(optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    for group in optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            found = {
                key.rpartition("/")[2]: x for key, x in tensors.items() if key.rpartition("/")[0] == name
            }
            # Adam counts its steps on the CPU, unless it is fused; moments live with the parameter.
            on_cpu = not group.get("fused")
            optimizer.state[parameter] = {
                key: x if key == "step" and on_cpu else x.to(parameter.device) for key, x in found.items()
            }
