"""What a run needs to go on as if it had never stopped: weights, optimiser, average, position.

Randomness is no part of it: every step seeds its own from the run's seed and its number.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer

from gare.errors import CheckpointError
from gare.model import GARE
from gare.model.files import load_state

POINTER = "latest"


@dataclass(frozen=True)
class Progress:
    """Where a run stands; `step` is the number of steps done."""

    step: int = 0
    best_score: float = -1.0
    best_step: int = 0


def save_checkpoint(
    folder: Path, model: GARE, optimizer: Optimizer, average: dict[str, Tensor] | None, progress: Progress
) -> None:
    """Write beside the last one, then point to it: a kill at any moment leaves one whole checkpoint."""
    name = f"step-{progress.step:08d}"
    target, unfinished = folder / name, folder / f"{name}.part"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    save_file(_portable(model.state_dict()), unfinished / "model.safetensors")
    save_file(_portable(_optimizer_tensors(optimizer)), unfinished / "optimizer.safetensors")
    if average is not None:
        save_file(_portable(average), unfinished / "average.safetensors")
    (unfinished / "progress.json").write_text(json.dumps(asdict(progress)) + "\n")
    for file in unfinished.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    shutil.rmtree(target, ignore_errors=True)
    unfinished.replace(target)
    pointer = folder / f"{POINTER}.part"
    pointer.write_text(name)
    pointer.replace(folder / POINTER)
    for other in folder.glob("step-*"):
        if other.name != name:
            shutil.rmtree(other, ignore_errors=True)


def load_checkpoint(
    folder: Path, model: GARE, optimizer: Optimizer
) -> tuple[Progress, dict[str, Tensor] | None]:
    """Put the last checkpoint back into model and optimiser."""
    try:
        target = folder / (folder / POINTER).read_text().strip()
        progress = Progress(**json.loads((target / "progress.json").read_text()))
        load_state(model, load_file(target / "model.safetensors"), source=str(target))
        _restore_optimizer(optimizer, load_file(target / "optimizer.safetensors"))
        average_file = target / "average.safetensors"
        return progress, load_file(average_file) if average_file.exists() else None
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder} has no checkpoint that can be resumed ({error}); start again in another folder"
        ) from None


def has_checkpoint(folder: Path) -> bool:
    return (folder / POINTER).is_file()


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
