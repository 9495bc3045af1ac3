"""Encoders that are no GARE models, as models: they rank by the plain cosine.

A folder tells by its files what is in it. `GARE.from_pretrained` asks here before it reads a GARE model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gare.encoders import EncoderConfig, TransformersEncoderConfig
from gare.encoders.other_libraries import (
    OpenClipModel,
    SentenceTransformersModel,
    dual_encoder_in,
    is_gare_module,
    is_open_clip,
    is_sentence_transformers,
)
from gare.encoders.own_encoder import describe
from gare.errors import CheckpointError
from gare.model.model_config import GareConfig
from gare.model.model_files import CONFIG_FILE

_OF_TRANSFORMERS = {"text_config", "vision_config", "architectures", "transformers_version"}


def plain_config(encoder: EncoderConfig) -> GareConfig:
    """A model that is nothing but an encoder: the cosine of a text and the mean of a video's frames."""
    return GareConfig.load(
        {
            "encoder": encoder.to_values(),
            "temporal": {"num_layers": 0},
            "interaction": {"name": "mean"},
        }
    )


def encoder_of_folder(folder: Path) -> EncoderConfig | None:
    """The settings of the encoder in a folder; None where it holds a GARE model, or something unknown."""
    if is_sentence_transformers(folder):
        if is_gare_module(folder):
            return None
        inside = dual_encoder_in(folder)
        if inside is None:
            return describe(SentenceTransformersModel(folder))
        return TransformersEncoderConfig(source=str(inside))
    if is_open_clip(str(folder)):
        return describe(OpenClipModel(str(folder)))
    config = _read_config(folder)
    if "model_type" in config:
        return TransformersEncoderConfig(source=str(folder))
    if config.keys() & _OF_TRANSFORMERS:
        raise CheckpointError(
            f"{folder / CONFIG_FILE} does not say which model of transformers this is (model_type); download "
            "or save it again"
        )
    return None


def _read_config(folder: Path) -> dict[str, Any]:
    """What config.json says; nothing where there is none, or where it is that of a GARE model."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        return {}
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("it has no settings by name")
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is damaged ({error}): this is not a GARE model that this version can read, nor one of "
            "transformers; download or save it again"
        ) from None
    return values
