"""What can be set. How settings are read, checked and written is in `settings.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from gare.errors import ConfigError
from gare.settings import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Range, Settings
from gare.types import Interaction


@dataclass(frozen=True)
class ClipBackboneConfig(Settings):
    """CLIP or SigLIP towers, run by transformers."""

    family: Literal["clip"] = "clip"
    source: str | None = None
    """Hub id or folder of pretrained towers (openai/clip-vit-base-patch32); none means random weights."""
    architecture: dict[str, Any] = field(default_factory=lambda: {"model_type": "clip"})
    """The transformers config (default: ViT-B/32); read off `source`, so a saved model needs no hub."""
    max_words: Annotated[int, Range(least=3)] = 32
    """Tokens a text, its start and end included."""


@dataclass(frozen=True)
class TinyBackboneConfig(Settings):
    """Random towers small enough for tests: a patch embedding and a bag of words with positions."""

    family: Literal["tiny"] = "tiny"
    dim: PositiveInt = 16
    image_size: PositiveInt = 32
    vocabulary: PositiveInt = 512
    max_words: PositiveInt = 16
    freeze_image: bool = False


@dataclass(frozen=True)
class MiniBackboneConfig(Settings):
    """EfficientNet-Lite0 and MiniLM-L6 from their packages, projected into one space."""

    family: Literal["mini"] = "mini"
    dim: PositiveInt = 384
    image_size: PositiveInt = 192
    max_words: PositiveInt = 32
    freeze_image: bool = False
    """Train neither the image tower nor its first blocks; the projection is always trained."""
    frozen_image_blocks: Annotated[int, Range(least=0, most=16)] = 0
    """How many of the image tower's first blocks stay as they are, the stem with them."""
    freeze_text: bool = False
    freeze_words: bool = False
    """Leave the word embeddings as they are: half of the text tower's weights."""
    dropout: Annotated[float, Range(least=0, below=0.5)] = 0.0
    """While training: of every sub-layer of the text tower, and twice as much of image features."""
    skipped_blocks: Annotated[float, Range(least=0, below=1)] = 0.0
    """While training: share of pictures that skip the last block of the image tower, fewer the earlier the
    block (stochastic depth)."""


BackboneConfig = ClipBackboneConfig | MiniBackboneConfig | TinyBackboneConfig


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
class IncrementConfig(Settings):
    """The increment net psi."""

    enabled: bool = True
    """False is the baseline: no psi, no increment."""
    num_heads: PositiveInt = 1
    """Of psi, or of cross-attention pooling: psi's network without its last layer. `dropout` likewise."""
    dropout: Annotated[float, Range(least=0, below=1)] = 0.3
    init: Literal["normal", "zero_output"] = "normal"
    """N(0, 0.02) for every weight, as the released code; or increments of zero, that is the baseline."""


@dataclass(frozen=True)
class TemperatureConfig(Settings):
    """The temperature of the contrastive loss."""

    value: PositiveFloat = 0.01
    learnable: bool = False


LEARNED_POOLING = ("cross_attention", "token_wise")
"""Ways to pool that have weights of their own: baselines, without increments."""


@dataclass(frozen=True)
class GareConfig(Settings):
    """Everything that defines a model, weights aside. `preset = "released"` follows the authors' code."""

    backbone: BackboneConfig = ClipBackboneConfig()
    temporal: TemporalConfig = TemporalConfig()
    increment: IncrementConfig = IncrementConfig()
    interaction: Interaction = Interaction()
    temperature: TemperatureConfig = TemperatureConfig()
    num_frames: PositiveInt = 12
    """Frames taken from a video file."""

    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {},
        "released": {
            "interaction": {"pooling": "text_conditioned", "pooling_temperature": 3.0, "mask_frames": False},
            "temperature": {"learnable": True},
        },
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        pooling = self.interaction.pooling
        if pooling not in LEARNED_POOLING:
            return
        if self.increment.enabled:
            raise ConfigError(
                f"interaction.pooling = '{pooling}' is a baseline without increments; "
                "set increment.enabled = false"
            )
        if not self.interaction.mask_frames or self.interaction.context != "frames":
            raise ConfigError(
                f"interaction.pooling = '{pooling}' always leaves padding out and has no other context; set "
                "interaction.mask_frames = true and interaction.context = 'frames'"
            )


@dataclass(frozen=True)
class ObjectiveConfig(Settings):
    """Terms of the training loss and their weights. `preset = "released"` follows the authors' code."""

    kl_weight: NonNegativeFloat = 0.07
    """Weight of the bottleneck; its scale depends on kl_reduction."""
    kl_reduction: Literal["event", "per_dimension"] = "per_dimension"
    kl_anchor: Literal["video", "text"] = "video"
    """Statistics over the texts of each video, or over the videos of each text."""
    kl_prior_std: PositiveFloat = 1.0
    kl_normalise: bool = False
    """Take the statistics of unit increments."""
    radius_weight: NonNegativeFloat = 0.01
    radius_variant: Literal["variance", "lse"] = "variance"
    radius_variance_cap: PositiveFloat = 0.5
    diversity_weight: NonNegativeFloat = 0.01
    diversity_variant: Literal["log_mean_exp", "orthogonal"] = "log_mean_exp"
    diversity_sharpness: PositiveFloat = 2.0
    teacher_weight: NonNegativeFloat = 1.0
    """Of agreeing with the teachers of a recipe that names some."""
    same_video: Literal["exclude", "released"] = "exclude"
    """Captions of one video in a batch: not negatives of each other, or negatives as in the released code."""

    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {},
        "released": {"kl_weight": 1e-4, "kl_reduction": "event", "same_video": "released"},
    }
