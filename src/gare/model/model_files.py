"""A saved model is a folder: config.json, model.safetensors and, where it has one of its own, a tokeniser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from gare.encoders.hub_folder import refuse_pointer
from gare.errors import CheckpointError, ConfigError
from gare.model.model_config import GareConfig
from gare.model.version_0_1 import upgraded_state

CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FOLDER = "config.json", "model.safetensors", "tokenizer"


class SavedModel(NamedTuple):
    """What the folder of a saved model holds."""

    config: GareConfig
    state: dict[str, Tensor]
    tokenizer_folder: Path | None
    written_by_0_1: dict[str, Any] | None


def read_folder(folder: Path) -> SavedModel:
    """What `save_pretrained` wrote."""
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{folder} has no {name}; a model is a folder written by save_pretrained, of gare or of "
                f"transformers{_hint_at_folder_below(folder)}"
            )
    refuse_pointer(folder / WEIGHTS_FILE)
    try:
        values = {**json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))}
        config = GareConfig.load(values)
        state = upgraded_state(load_file(folder / WEIGHTS_FILE), config.interaction.name)
    except (ConfigError, TypeError, json.JSONDecodeError, UnicodeDecodeError, SafetensorError) as error:
        raise CheckpointError(f"{folder} is not a GARE model that this version can read: {error}") from None
    tokenizer_folder = folder / TOKENIZER_FOLDER
    return SavedModel(
        config,
        state,
        tokenizer_folder if tokenizer_folder.is_dir() else None,
        values if "backbone" in values else None,
    )


def _hint_at_folder_below(folder: Path) -> str:
    """Where a model lies below a folder: in a cache of the hub, it is two folders deeper."""
    inside = [path for depth in ("*", "snapshots/*") for path in folder.glob(f"{depth}/{CONFIG_FILE}")]
    return f". Did you mean {inside[0].parent}?" if len(inside) == 1 else ""


def load_state(model: nn.Module, state: dict[str, Tensor], *, source: str) -> None:
    """Load weights that must fit exactly; say which do not."""
    expected = model.state_dict()
    missing, unexpected = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
    misshapen = [
        f"{name} {list(state[name].shape)} instead of {list(expected[name].shape)}"
        for name in sorted(expected.keys() & state.keys())
        if state[name].shape != expected[name].shape
    ]
    problems = [
        f"{len(names)} {what} (first: {names[0]})"
        for names, what in ((missing, "missing"), (unexpected, "unexpected"), (misshapen, "of another shape"))
        if names
    ]
    if problems:
        raise CheckpointError(f"the weights in {source} do not fit its config: {', '.join(problems)}")
    model.load_state_dict(state)
