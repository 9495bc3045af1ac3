"""What several verbs read from the command line in the same way: a device, a file of sentences."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gare.errors import QueryError

if TYPE_CHECKING:
    import torch


def choose_device(name: str, *, or_cpu: bool = False) -> torch.device:
    """The device of `--device`; `auto` is the GPU if there is one.

    Args:
        or_cpu: where a machine has no GPU at all, take the CPU and say so.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise typer.BadParameter(
            f"'{name}' is not a device; use auto, cpu or cuda", param_hint="--device"
        ) from None
    if device.type not in ("cpu", "cuda"):
        raise typer.BadParameter(f"'{name}' is not supported; use auto, cpu or cuda", param_hint="--device")
    if device.type == "cuda" and or_cpu and not torch.cuda.is_available():
        typer.echo("no GPU is here; the CPU is used", err=True)
        return torch.device("cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise typer.BadParameter(
            f"'{name}' is not here ({torch.cuda.device_count()} GPUs found); use --device cpu",
            param_hint="--device",
        )
    return device


def read_lines(path: Path) -> list[str]:
    """The lines of a text file that are not blank."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise QueryError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise QueryError(f"{path} is not UTF-8 text; give a text file with one sentence a line") from None
    kept = [line.strip() for line in lines if line.strip()]
    if not kept:
        raise QueryError(f"{path} is empty; write one sentence a line")
    return kept
