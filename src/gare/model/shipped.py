"""Models that come with the package: only what was trained is in it, the rest is in the towers' packages.

docs/models/ has the way from data to weights; `pack` is its last step.
"""

from __future__ import annotations

import hashlib
import json
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import torch
from safetensors.torch import load, save_file
from torch import Tensor

from gare.config import GareConfig
from gare.errors import CheckpointError

SHIPPED = ("gare-mini",)
_WEIGHTS, _CONFIG, _DIGEST = "weights.safetensors", "config.json", "weights.sha256"
_SCALE = ".scale"


def weights_folder(name: str) -> Traversable:
    return files("gare.model") / "weights" / name


def read_shipped(name: str) -> tuple[GareConfig, dict[str, Tensor]]:
    """Configuration and trained weights in float32; damaged files are refused."""
    folder = weights_folder(name)
    try:
        content = (folder / _WEIGHTS).read_bytes()
        digest = (folder / _DIGEST).read_text(encoding="utf-8").strip()
        config = GareConfig.load(json.loads((folder / _CONFIG).read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise CheckpointError(f"this installation has no {name} ({error}); install gare again") from None
    if hashlib.sha256(content).hexdigest() != digest:
        raise CheckpointError(f"the weights of {name} are damaged: their sha256 differs; install gare again")
    stored = load(content)
    return config, {key: _restore(key, stored) for key in stored if not key.endswith(_SCALE)}


def pack(model_folder: Path, target: Path) -> int:
    """Write what `read_shipped` reads, without what the packages bring. Returns its bytes.

    The text tower's matrices are kept in 8 bits with a scale a row, the rest in half precision: in the image
    tower too, 8 bits move scores more than twice as much.
    """
    from gare.model.gare import GARE

    model = GARE.from_pretrained(model_folder)
    packaged = GARE(model.config).half().state_dict()
    trained: dict[str, Tensor] = {}
    for key, tensor in model.state_dict().items():
        if key.startswith("backbone.") and torch.equal(tensor.half(), packaged[key]):
            continue
        if not (key.startswith("backbone.text.") and tensor.ndim == 2):
            trained[key] = tensor.half()
            continue
        scale_R = (tensor.abs().amax(dim=1) / 127).clamp(min=1e-7).half()
        steps_RC = (tensor / scale_R.float()[:, None]).round().clamp(-127, 127)
        trained[key], trained[key + _SCALE] = steps_RC.to(torch.int8), scale_R
    target.mkdir(parents=True, exist_ok=True)
    save_file({key: tensor.contiguous() for key, tensor in trained.items()}, target / _WEIGHTS)
    content = (target / _WEIGHTS).read_bytes()
    (target / _DIGEST).write_text(hashlib.sha256(content).hexdigest() + "\n", encoding="utf-8")
    (target / _CONFIG).write_text(json.dumps(model.config.to_values(), indent=2) + "\n", encoding="utf-8")
    return len(content)


def _restore(key: str, stored: dict[str, Tensor]) -> Tensor:
    tensor = stored[key].float()
    scale_R = stored.get(key + _SCALE)
    return tensor if scale_R is None else tensor * scale_R.float()[:, None]
