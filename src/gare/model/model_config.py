"""The settings of a model. What an encoder or an interaction can be told stands beside its class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from gare.encoders import ENCODERS, ClipEncoderConfig, EncoderConfig
from gare.interaction import INTERACTIONS, GapAwareConfig, InteractionConfig
from gare.model.version_0_1 import upgraded_model
from gare.settings import ByName, NonNegativeInt, PositiveFloat, PositiveInt, Settings


@dataclass(frozen=True)
class TemporalConfig(Settings):
    """The transformer over the frames of a video."""

    num_layers: NonNegativeInt = 4
    """0 leaves the frames as the image tower gave them (the released code does so for MSVD)."""
    num_heads: PositiveInt | None = None
    """None: one head per 64 dimensions, as CLIP's text tower."""
    max_frames: PositiveInt = 77
    init: Literal["text_tower", "random"] = "text_tower"
    """Start from the first layers of the text tower where it has the same shape (CLIP), else at random."""


@dataclass(frozen=True)
class TemperatureConfig(Settings):
    """The temperature of the contrastive loss."""

    value: PositiveFloat = 0.01
    learnable: bool = False


@dataclass(frozen=True)
class GareConfig(Settings):
    """Everything that defines a model, weights aside. `preset = "released"` follows the authors' code."""

    encoder: Annotated[EncoderConfig, ByName(ENCODERS)] = ClipEncoderConfig()
    temporal: TemporalConfig = TemporalConfig()
    interaction: Annotated[InteractionConfig, ByName(INTERACTIONS, default="gare")] = GapAwareConfig()
    temperature: TemperatureConfig = TemperatureConfig()
    num_frames: PositiveInt = 12
    """Frames taken from a video file."""

    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {},
        "released": {
            "interaction": {
                "name": "gare",
                "pooling": "text_conditioned",
                "pooling_temperature": 3.0,
                "mask_frames": False,
            },
            "temperature": {"learnable": True},
        },
    }

    @classmethod
    def upgraded(cls, values: dict[str, Any]) -> dict[str, Any]:
        return upgraded_model(values)
