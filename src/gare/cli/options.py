"""What several verbs ask for in the same way."""

from __future__ import annotations

import torch
import typer


def choose_device(name: str) -> torch.device:
    """The device of `--device`; `auto` is the GPU if there is one."""
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
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise typer.BadParameter(
            f"'{name}' is not here ({torch.cuda.device_count()} GPUs found); use --device cpu",
            param_hint="--device",
        )
    return device
