"""The model a run starts from: new, or with the weights of a saved one; on its device, compiled if asked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch._functorch.config as functorch_config

from gare.encoders.encoder import Part
from gare.errors import CheckpointError, ConfigError
from gare.model import GARE
from gare.model.model_files import TOKENIZER_FOLDER, load_state
from gare.train.distributed import Processes
from gare.train.run_config import RunConfig

_FREEZING: dict[str, Part] = {"freeze_image": "image", "freeze_text": "text"}
"""Settings of encoders, and what they keep as it is."""


def build_model(config: RunConfig, processes: Processes) -> GARE:
    """The model of a recipe, the same for the same seed."""
    torch.manual_seed(config.seed)
    with _explain_lack_of_memory():
        model = _start(config).to(processes.device)
    if config.numerics == "released" and processes.device.type == "cuda":
        model.encoder.half()
    if config.gradient_checkpointing:
        model.encoder.enable_gradient_checkpointing()
    if config.compile:
        compile_towers(model)
    return model


def _start(config: RunConfig) -> GARE:
    if config.start_from:
        return _go_on(config, config.start_from)
    if config.init_from is None:
        return GARE(config.model)
    start = GARE.from_pretrained(config.init_from)
    tokenizer = Path(config.init_from) / TOKENIZER_FOLDER
    model = GARE(
        config.model, pretrained_towers=False, tokenizer_folder=tokenizer if tokenizer.is_dir() else None
    )
    _copy_weights(start, model, config.init_from)
    return model


def _go_on(config: RunConfig, name: str) -> GARE:
    """A named model as it is, or GARE on top of one that has no increments."""
    start = GARE.from_pretrained(name)
    if start.interaction.has_increments:
        model = start
    else:
        model = GARE(replace(config.model, encoder=start.config.encoder), pretrained_towers=False)
        model.encoder = start.encoder  # with its weights and its tokeniser
    for flag, part in _FREEZING.items():
        if getattr(config.model.encoder, flag, False):
            model.encoder.freeze(part)
            if hasattr(model.config.encoder, flag):
                model.encoder.config = replace(model.encoder.config, **{flag: True})
    model.config = replace(model.config, encoder=model.encoder.config)
    return model.train()


@contextmanager
def _explain_lack_of_memory() -> Iterator[None]:
    """Turn refusals of a tensor that is too large, for which torch has no class, into a message."""
    try:
        yield
    except (RuntimeError, TypeError, MemoryError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if not re.search("memory|allocat|overflow", reason, re.IGNORECASE):
            raise
        raise ConfigError(
            f"the model of this recipe does not fit into memory ({reason}); "
            "choose smaller sizes in model.encoder and model.temporal"
        ) from None


def compile_towers(model: GARE) -> None:
    """torch.compile both towers; the rest is a few large matrix products."""
    # What a product in backward reads may be computed again from what is kept anyway: an activation, a norm.
    functorch_config.ban_recompute_materialized_backward = False
    # A model and its teachers share code, and each is a variant of it; at the eighth torch would give up.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    model.encoder.compile_towers()


def _copy_weights(start: GARE, model: GARE, name: str) -> None:
    """Everything the two share; what only the new model has (the increment net, say) keeps its own start."""
    state, found = model.state_dict(), start.state_dict()
    shared = {key for key in state.keys() & found.keys() if state[key].shape == found[key].shape}
    if not (model.config.temperature.learnable and start.config.temperature.learnable):
        shared -= {"log_logit_scale"}  # a fixed temperature is a setting, not a weight
    if not any(key.startswith("encoder.") for key in shared):
        raise CheckpointError(
            f"init_from {name} shares no towers with this model; check model.encoder in the recipe"
        )
    load_state(model, {**state, **{key: found[key] for key in shared}}, source=name)
