"""Encoders: an image tower and a text tower each. One file per family, and the table of all of them."""

from __future__ import annotations

from pathlib import Path

from gare.encoders.clip_encoder import ClipEncoder, ClipEncoderConfig
from gare.encoders.encoder import Encoder, EncoderConfig, ImageFormat
from gare.encoders.mini_encoder import MiniEncoder, MiniEncoderConfig
from gare.encoders.own_encoder import MODELS, EncoderProtocol, OwnEncoder, OwnEncoderConfig
from gare.encoders.tiny_encoder import TinyEncoder, TinyEncoderConfig
from gare.encoders.transformers_encoder import TransformersEncoder, TransformersEncoderConfig
from gare.registry import Registry

ENCODERS: Registry[type[Encoder]] = Registry(
    "encoder",
    {
        "clip": ClipEncoder,
        "mini": MiniEncoder,
        "tiny": TinyEncoder,
        "transformers": TransformersEncoder,
        "own": OwnEncoder,
    },
)
"""Every encoder, by the `name` in a model's settings."""


def build_encoder(
    config: EncoderConfig, *, weights: bool = True, tokenizer_folder: Path | None = None
) -> Encoder:
    """The towers that settings describe; `weights=False` when weights are loaded over them anyway."""
    return ENCODERS[config.name](config, weights=weights, tokenizer_folder=tokenizer_folder)


__all__ = [
    "ENCODERS",
    "MODELS",
    "ClipEncoder",
    "ClipEncoderConfig",
    "Encoder",
    "EncoderConfig",
    "EncoderProtocol",
    "ImageFormat",
    "MiniEncoder",
    "MiniEncoderConfig",
    "OwnEncoder",
    "OwnEncoderConfig",
    "TinyEncoder",
    "TinyEncoderConfig",
    "TransformersEncoder",
    "TransformersEncoderConfig",
    "build_encoder",
]
