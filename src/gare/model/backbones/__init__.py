"""Pairs of towers, one file per family."""

from __future__ import annotations

from pathlib import Path

from gare.config import BackboneConfig, ClipBackboneConfig, MiniBackboneConfig
from gare.model.backbones.base import Backbone, ImageFormat
from gare.model.backbones.tiny import TinyBackbone

__all__ = ["Backbone", "ImageFormat", "build_backbone"]


def build_backbone(
    config: BackboneConfig, *, weights: bool = True, tokenizer_folder: Path | None = None
) -> Backbone:
    """The towers a config describes; `weights=False` when weights are loaded over them anyway."""
    if isinstance(config, ClipBackboneConfig):
        from gare.model.backbones.clip import ClipBackbone  # transformers takes a second to import

        return ClipBackbone(config, weights=weights, tokenizer_folder=tokenizer_folder)
    if isinstance(config, MiniBackboneConfig):
        from gare.model.backbones.mini import MiniBackbone

        return MiniBackbone(config, weights=weights, tokenizer_folder=tokenizer_folder)
    return TinyBackbone(config)
