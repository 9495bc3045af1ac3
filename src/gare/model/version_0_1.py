"""Reads what gare 0.1 wrote: its settings, the names of its weights, and the fingerprint in its libraries.

Version 0.1 had `backbone` for `encoder` and `family` for its name, a section `increment` beside
`interaction`, and the baselines as a pooling with `increment.enabled = false`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from gare.errors import ConfigError
from gare.types import update_digest

_NAMES_OF_POOLING = {"cross_attention": "xpool", "token_wise": "token_wise"}
_OWN_KEYS = {
    "mean": {"mask_frames"},
    "text_conditioned": {"mask_frames", "pooling_temperature"},
    "xpool": {"num_heads", "dropout"},
    "token_wise": set[str](),
}
"""The settings that each baseline of version 0.1 still has."""


# --- settings -----------------------------------------------------------------------------------------------


def upgraded_model(values: dict[str, Any]) -> dict[str, Any]:
    """The settings of a model in today's form; those that are in it already stay as they are."""
    if "backbone" in values:
        values["encoder"] = _encoder(values.pop("backbone"), values.get("encoder"))
    interaction = values.get("interaction", {})
    if not isinstance(interaction, Mapping) or not isinstance(values.get("increment", {}), Mapping):
        return values
    pooling, name = interaction.get("pooling"), interaction.get("name", "gare")
    is_old = "increment" in values or pooling in _NAMES_OF_POOLING or (pooling and name in _OWN_KEYS)
    if is_old:
        increment = dict(values.pop("increment", {}))
        if values.get("preset") == "released":
            interaction = {"pooling": "text_conditioned", "mask_frames": False, **interaction}
        values["interaction"] = _interaction(dict(interaction), increment)
    return values


def _encoder(backbone: Any, encoder: Any) -> Any:
    if not isinstance(backbone, Mapping):
        return backbone
    named = {"name" if key == "family" else key: value for key, value in backbone.items()}
    if isinstance(encoder, Mapping) and named.get("name", encoder.get("name")) == encoder.get("name"):
        return {**encoder, **named}  # an old key beside new ones is an override
    return named


def _interaction(interaction: dict[str, Any], increment: dict[str, Any]) -> dict[str, Any]:
    enabled = increment.pop("enabled", None)
    pooling = interaction.get("pooling", "mean")
    name = interaction.pop("name", None) or _NAMES_OF_POOLING.get(pooling, "gare")
    if pooling in _NAMES_OF_POOLING:
        if enabled:
            raise ConfigError(
                f"interaction.pooling = '{pooling}' is a baseline without increments, called "
                f"interaction.name = '{name}' since version 0.2; leave increment.enabled out"
            )
        name = _NAMES_OF_POOLING[pooling]
    elif (enabled is False and name == "gare") or (name in _OWN_KEYS and "pooling" in interaction):
        name = pooling
    kept = {**interaction, **increment}
    if name in _OWN_KEYS:
        kept = {key: value for key, value in kept.items() if key in _OWN_KEYS[name]}
    return {"name": name, **kept}


# --- weights ------------------------------------------------------------------------------------------------

_PREFIXES = {"backbone.": "encoder.", "increment_net.": "interaction.increment_net."}


def upgraded_name(name: str, interaction: str) -> str:
    """Today's name of a weight; `interaction` is the name of the model's interaction.

    >>> upgraded_name("backbone.text.weight", "gare"), upgraded_name("pooling_net.norm1.bias", "xpool")
    ('encoder.text.weight', 'interaction.attention.norm1.bias')
    """
    prefixes = {
        **_PREFIXES,
        "pooling_net.": "interaction.attention." if interaction == "xpool" else "interaction.",
    }
    for old, new in prefixes.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def upgraded_state(state: Mapping[str, Tensor], interaction: str) -> dict[str, Tensor]:
    """Weights under today's names; optimiser states, which have `/moment` behind the name, likewise."""
    return {upgraded_name(name, interaction): tensor for name, tensor in state.items()}


# --- fingerprint --------------------------------------------------------------------------------------------

_OLD_INTERACTION = {
    "corrected_side": "text",
    "context": "frames",
    "query": "gap",
    "gap_direction": "video_minus_text",
    "normalise": False,
    "pooling": "mean",
    "pooling_temperature": 3.0,
    "mask_frames": True,
}
_OLD_INCREMENT = {"enabled": True, "num_heads": 1, "dropout": 0.3, "init": "normal"}
_OLD_CLASSES = {"clip": "ClipBackboneConfig", "mini": "MiniBackboneConfig", "tiny": "TinyBackboneConfig"}


def old_fingerprint(model: nn.Module, config: Any, written: Mapping[str, Any] | None = None) -> str | None:
    """What version 0.1 wrote into the libraries of this model; None for a model it could not have made.

    `written` are the settings as version 0.1 saved them, where they are known: they may hold values that no
    longer mean anything, such as the dropout of a net that a baseline does not have.
    """
    settings = _old_settings(config, written or {})
    if settings is None:
        return None
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16)
    for name, tensor in sorted(first_names(model.state_dict(), config.interaction.name).items()):
        update_digest(digest, name, tensor)
    return digest.hexdigest()


def first_names(state: Mapping[str, Tensor], interaction: str) -> dict[str, Tensor]:
    """Weights under the names that version 0.1 gave them."""
    return {_old_name(name, interaction): tensor for name, tensor in state.items()}


def _old_name(name: str, interaction: str) -> str:
    if name.startswith("encoder."):
        return "backbone." + name.removeprefix("encoder.")
    if name.startswith("interaction.increment_net."):
        return name.removeprefix("interaction.")
    if name.startswith("interaction."):
        own = name.removeprefix("interaction.attention." if interaction == "xpool" else "interaction.")
        return "pooling_net." + own
    return name


def _old_settings(config: Any, written: Mapping[str, Any]) -> dict[str, Any] | None:
    """The settings that were not the default in version 0.1, as it hashed them."""
    encoder, interaction = config.encoder, config.interaction
    if encoder.name not in _OLD_CLASSES or interaction.name not in {"gare", *_OWN_KEYS}:
        return None
    values = {key: value for key, value in interaction.to_values().items() if key != "name"}
    if interaction.name != "gare":
        values |= {"enabled": False, "pooling": interaction.name}
        values["pooling"] = {"xpool": "cross_attention"}.get(interaction.name, interaction.name)
    values |= {**written.get("increment", {}), **written.get("interaction", {})}
    old_encoder = encoder.changed_values()
    if "stochastic_depth" in old_encoder:
        old_encoder["skipped_blocks"] = old_encoder.pop("stochastic_depth")
    settings: dict[str, Any] = {
        "backbone": {"is": _OLD_CLASSES[encoder.name], **old_encoder},
        "increment": {"is": "IncrementConfig", **_differing(values, _OLD_INCREMENT)},
        "interaction": {"is": "Interaction", **_differing(values, _OLD_INTERACTION)},
    }
    rest = config.changed_values()
    return settings | {key: rest[key] for key in rest.keys() - {"encoder", "interaction"}}


def _differing(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {key: values[key] for key in defaults if key in values and values[key] != defaults[key]}
