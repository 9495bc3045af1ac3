"""Models that come with the package: every weight in one file, checked by its sha256 before it is used.

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

from gare.errors import CheckpointError
from gare.model.model_config import GareConfig

SHIPPED = ("gare-mini",)
_FIRST_MINI = "196d147ff183c562bdf81361e32baea0"
FORMER_FINGERPRINTS = {
    _FIRST_MINI: ("c0bad08451b943bb78feb9605e6ea55d", "14a41cacc85dfdc6b19c3356f0ce8983"),
}
"""The fingerprint of a model, and those of its earlier files, whose libraries it opens as well.

The weights that make the vectors of a video have the same bits in all of them. The earlier files left the
word embeddings to a package, in full precision; later they have 8 bits. The first gare-mini is no longer in
the package, but somebody may have saved it."""
REPLACED = {"gare-mini": (_FIRST_MINI, *FORMER_FINGERPRINTS[_FIRST_MINI])}
"""Fingerprints under which libraries know a shipped model that a better one of the same name has replaced."""
_WEIGHTS, _CONFIG, _DIGEST = "weights.safetensors", "config.json", "weights.sha256"
_SCALE = ".scale"


def weights_folder(name: str) -> Traversable:
    """Where the package keeps the weights of a shipped model."""
    return files("gare.model") / "weights" / name


def read_shipped(name: str) -> tuple[GareConfig, dict[str, Tensor]]:
    """Configuration and all weights in float32; damaged files are refused."""
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
    """Write what `read_shipped` reads. Returns the bytes of its weights.

    | weights | kept in |
    | --- | --- |
    | the text tower's matrices, its word embeddings among them | 8 bits, a scale a row |
    | other matrices and convolutions; embeddings of positions | half precision |
    | biases, norms and their statistics | as they are: 0.5 MB |

    The image tower in 8 bits would move scores more than twice as much.
    """
    from gare.model.gare import GARE

    model = GARE.from_pretrained(model_folder)
    packed: dict[str, Tensor] = {}
    for key, tensor in model.state_dict().items():
        if tensor.ndim < 2 or not tensor.is_floating_point():
            packed[key] = tensor
        elif _has_eight_bits(key, tensor):
            scale_R = (tensor.abs().amax(dim=1) / 127).clamp(min=1e-7).half()
            steps_RC = (tensor / scale_R.float()[:, None]).round().clamp(-127, 127)
            packed[key], packed[key + _SCALE] = steps_RC.to(torch.int8), scale_R
        else:
            packed[key] = tensor.half()
    target.mkdir(parents=True, exist_ok=True)
    save_file({key: tensor.contiguous() for key, tensor in packed.items()}, target / _WEIGHTS)
    content = (target / _WEIGHTS).read_bytes()
    (target / _DIGEST).write_text(hashlib.sha256(content).hexdigest() + "\n", encoding="utf-8")
    (target / _CONFIG).write_text(json.dumps(model.config.to_values(), indent=2) + "\n", encoding="utf-8")
    return len(content)


def _has_eight_bits(key: str, tensor: Tensor) -> bool:
    """Positions and token types are few and are added to every word: they are kept better."""
    is_place = key.endswith(("position_embeddings.weight", "token_type_embeddings.weight"))
    return key.startswith("encoder.text.") and tensor.ndim == 2 and not is_place


def _restore(key: str, stored: dict[str, Tensor]) -> Tensor:
    tensor, scale_R = stored[key], stored.get(key + _SCALE)
    if scale_R is not None:
        return tensor.float() * scale_R.float()[:, None]
    return tensor.float() if tensor.is_floating_point() else tensor
