"""Reads checkpoints of the authors' released code into a `GARE` with the preset "released".

Their state dict registers the increment net (`psi`) twice and carries modules that are never called. The
copy and those modules are left out.
"""

from __future__ import annotations

import logging
import os
import pickle
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from gare.errors import CheckpointError
from gare.model.gare import GARE
from gare.model.model_config import GareConfig
from gare.model.model_files import load_state

log = logging.getLogger("gare")

DUPLICATE = re.compile(r"agent\.psi\.")
DEAD = re.compile(r"weight_fc\.|psi\.(log_std_proj|layers\.\d+\.(mlp|linear2))\.")
TRANSPOSED = {"clip.text_projection", "clip.visual.proj"}
# Their names and ours: a whole key, or the part of it that differs.
NAMES = {
    r"^clip\.positional_embedding$": "encoder.text.embeddings.position_embedding.weight",
    r"^clip\.token_embedding\.": "encoder.text.embeddings.token_embedding.",
    r"^clip\.ln_final\.": "encoder.text.final_layer_norm.",
    r"^clip\.text_projection$": "encoder.text_projection.weight",
    r"^clip\.logit_scale$": "log_logit_scale",
    r"^clip\.visual\.class_embedding$": "encoder.vision.embeddings.class_embedding",
    r"^clip\.visual\.positional_embedding$": "encoder.vision.embeddings.position_embedding.weight",
    r"^clip\.visual\.conv1\.": "encoder.vision.embeddings.patch_embedding.",
    r"^clip\.visual\.ln_pre\.": "encoder.vision.pre_layrnorm.",
    r"^clip\.visual\.ln_post\.": "encoder.vision.post_layernorm.",
    r"^clip\.visual\.proj$": "encoder.image_projection.weight",
    r"^clip\.visual\.transformer\.resblocks\.": "encoder.vision.encoder.layers.",
    r"^clip\.transformer\.resblocks\.": "encoder.text.encoder.layers.",
    r"^frame_position_embeddings\.weight$": "temporal.position",
    r"^transformerClip\.resblocks\.": "temporal.layers.",
    r"^psi\.mean_proj\.": "interaction.increment_net.output.",
    r"^psi\.layers\.0\.cross_attn\.(q)_proj\.": "interaction.increment_net.query.",
    r"^psi\.layers\.0\.cross_attn\.(k)_proj\.": "interaction.increment_net.key.",
    r"^psi\.layers\.0\.cross_attn\.(v)_proj\.": "interaction.increment_net.value.",
    r"^psi\.layers\.0\.cross_attn\.out_proj\.": "interaction.increment_net.out.",
    r"^psi\.layers\.0\.linear1\.": "interaction.increment_net.residual.",
    r"^psi\.layers\.0\.layer_norm([123])\.": r"interaction.increment_net.norm\1.",
}
TOWER_LAYER = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn": "self_attn",
    "c_fc": "fc1",
    "c_proj": "fc2",
}
TEMPORAL_LAYER = {
    "attn.in_proj_": "attention_in.",
    "attn.out_proj": "attention_out",
    "ln_1": "norm1",
    "ln_2": "norm2",
    "mlp.c_fc": "expand",
    "mlp.c_proj": "contract",
}


@dataclass(frozen=True)
class LoadReport:
    """What became of each tensor of a released checkpoint."""

    loaded: list[str]
    duplicate: list[str]
    dead: list[str]
    unknown: list[str]


def load_released(
    path: str | os.PathLike[str],
    *,
    temporal: bool = True,
    num_heads: int = 1,
    pooling_temperature: float = 3.0,
) -> GARE:
    """Load a checkpoint of the authors' code, saved by torch or as safetensors, for inference.

    Args:
        path: the file. It is read without running any code in it.
        temporal: False for checkpoints trained on MSVD, where the authors skip the temporal transformer
            although its weights are in the file.
        num_heads: attention heads of the increment net. The weights do not tell; the released code uses one.
        pooling_temperature: 3 in the authors' training script, 5 if their parser's default was used.

    The result has the attribute `load_report`, a `LoadReport`.
    """
    state = _read(Path(path))
    known = {
        name: tensor for name, tensor in state.items() if not DUPLICATE.match(name) and not DEAD.match(name)
    }
    translated: dict[str, Tensor] = {}
    unknown = []
    for name, tensor in known.items():
        ours = _translate(name, tensor.float())
        unknown += [name] if not ours else []
        translated |= ours
    if not temporal:
        translated = {name: tensor for name, tensor in translated.items() if not name.startswith("temporal.")}
    model = GARE(_config(translated, Path(path), num_heads, pooling_temperature), pretrained_towers=False)
    load_state(model, translated, source=str(path))
    report = LoadReport(
        loaded=sorted(known.keys() - set(unknown)),
        duplicate=sorted(filter(DUPLICATE.match, state)),
        dead=sorted(name for name in state if DEAD.match(name)),
        unknown=sorted(unknown),
    )
    ignored = f"{len(report.duplicate)} duplicate, {len(report.dead)} dead and {len(unknown)} unknown"
    log.warning("%s: loaded %d tensors, ignored %s (model.load_report)", path, len(report.loaded), ignored)
    model.load_report = report  # type: ignore[assignment]
    return model.eval()


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise CheckpointError(
            f"{path} does not exist or is a folder; give a checkpoint file of the authors' code"
        )
    try:
        if path.suffix == ".safetensors":
            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{path} is neither a state dict saved by torch nor safetensors ({reason}); "
            "export it from the authors' code with torch.save(model.state_dict(), …)"
        ) from None
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise CheckpointError(
            f"{path} holds {type(state).__name__}, not a plain state dict of tensors; save model.state_dict()"
        )
    state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    for needed in ("clip.visual.proj", "clip.text_projection", "psi.mean_proj.weight"):
        if needed not in state:
            raise CheckpointError(
                f"{path} is not a checkpoint of the released GARE code: it has no '{needed}'. "
                "A model saved by this package is read with GARE.from_pretrained(folder)."
            )
    if any(name.startswith("psi.layers.1.") for name in state):
        raise CheckpointError(
            f"{path} has an increment net (psi) of several layers; the released code and this package use one"
        )
    return state


def _translate(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """One tensor of theirs under our name or names; empty if it is not known."""
    for pattern, replacement in NAMES.items():
        ours, count = re.subn(pattern, replacement, name)
        if count:
            break
    else:
        return {}
    if name in TRANSPOSED:
        tensor = tensor.mT
    if ours.startswith("temporal.layers."):
        for old, new in TEMPORAL_LAYER.items():
            ours = ours.replace(old, new)
    elif ".encoder.layers." in ours:
        for old, new in TOWER_LAYER.items():
            ours = ours.replace(f".{old}.", f".{new}.")
        if ".in_proj_" in ours:  # transformers keeps query, key and value apart
            prefix, part = ours.split("in_proj_")
            return {f"{prefix}{q}_proj.{part}": x for q, x in zip("qkv", tensor.chunk(3), strict=True)}
    return {ours: tensor}


def _config(state: dict[str, Tensor], path: Path, num_heads: int, pooling_temperature: float) -> GareConfig:
    """Read the sizes off the weights; heads are one per 64 dimensions in all of CLIP's ViT towers."""

    def num_layers(prefix: str) -> int:
        return len({name.removeprefix(prefix).split(".")[0] for name in state if name.startswith(prefix)})

    try:
        token_embedding = state["encoder.text.embeddings.token_embedding.weight"]
        text_positions = state["encoder.text.embeddings.position_embedding.weight"]
        patches = state["encoder.vision.embeddings.patch_embedding.weight"]
        image_positions = state["encoder.vision.embeddings.position_embedding.weight"]
        dim = state["encoder.image_projection.weight"].shape[0]
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error}; only ViT towers are supported") from None
    vocabulary, text_width = token_embedding.shape
    vision_width, patch = patches.shape[0], patches.shape[-1]
    architecture = {
        "model_type": "clip",
        "projection_dim": dim,
        "text_config": {
            "hidden_size": text_width,
            "intermediate_size": 4 * text_width,
            "num_hidden_layers": num_layers("encoder.text.encoder.layers."),
            "num_attention_heads": max(1, text_width // 64),
            "max_position_embeddings": text_positions.shape[0],
            "vocab_size": vocabulary,
            "projection_dim": dim,
            "bos_token_id": vocabulary - 2,
            "eos_token_id": vocabulary - 1,
        },
        "vision_config": {
            "hidden_size": vision_width,
            "intermediate_size": 4 * vision_width,
            "num_hidden_layers": num_layers("encoder.vision.encoder.layers."),
            "num_attention_heads": max(1, vision_width // 64),
            "patch_size": patch,
            "image_size": patch * round((image_positions.shape[0] - 1) ** 0.5),
            "projection_dim": dim,
        },
    }
    frame_positions = state.get("temporal.position", torch.empty(1, dim))
    return GareConfig.load(
        {
            "preset": "released",
            "encoder": {"name": "clip", "architecture": architecture},
            "interaction": {"num_heads": num_heads, "pooling_temperature": pooling_temperature},
            "temporal": {
                "num_layers": num_layers("temporal.layers."),
                "num_heads": max(1, dim // 64),
                "max_frames": frame_positions.shape[0],
            },
        }
    )
