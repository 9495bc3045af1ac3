"""What a recipe may say about a training run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from gare.config import GareConfig, ObjectiveConfig
from gare.errors import ConfigError
from gare.settings import (
    NonNegativeFloat,
    NonNegativeInt,
    NotEmpty,
    PositiveFloat,
    PositiveInt,
    Range,
    Settings,
)

Split = Literal["train", "val", "test"]


@dataclass(frozen=True)
class DataConfig(Settings):
    """Where the pairs come from and how they are shown."""

    manifest: Annotated[str, NotEmpty()]
    """What `gare data prepare` made: its folder, or the manifest in it."""
    also_train: tuple[str, ...] = ()
    """More of them, whose training splits are added; `manifest` alone chooses the checkpoint. One named
    twice is shown twice as often (with caption_choice = "all")."""
    num_frames: PositiveInt = 12
    sampling: Literal["grid", "uniform"] = "grid"
    draw_frames: bool = False
    """Train on other frames of a video every time: its parts stay, the moment within them is drawn. With
    sampling = "uniform" only."""
    augmentation: Literal["off", "light", "strong", "randaugment"] = "off"
    caption_choice: Literal["all", "one_per_video"] = "all"
    """An epoch shows every caption once, or every video once with a caption drawn anew."""
    num_workers: NonNegativeInt = 0
    allow_missing: bool = False
    """Train and evaluate on the videos there are; the number missing is in every result."""
    preload: bool = False
    """Decode every training frame once and keep it on the device, where crops are cut: for images, and videos
    given as frames, that fit there."""
    cache_features: bool = False
    """Run the frozen image tower once over all frames and train on what it saw."""
    views: PositiveInt = 1
    """With cache_features: so many augmented variants of every clip are computed and one of them drawn."""
    mixed_share: Annotated[float, Range(least=0, below=0.5)] = 0.0
    """With preload: this share of a batch is blended with other pairs, pictures and captions (MixGen)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draw_frames and (self.sampling != "uniform" or self.cache_features):
            raise ConfigError(
                "data.draw_frames needs sampling = 'uniform' and cache_features = false: frames of a fixed "
                "grid, and features computed once, cannot vary"
            )
        if self.cache_features and (
            self.augmentation == "randaugment" or (self.augmentation != "off") != (self.views > 1)
        ):
            raise ConfigError(
                "data.cache_features computes every frame once, so it needs augmentation = 'off'; or several "
                "views with augmentation 'light' or 'strong', of which one is drawn"
            )
        if self.views > 1 and not self.cache_features:
            raise ConfigError("data.views needs cache_features = true: without it every draw is a new view")
        if self.mixed_share and not self.preload:
            raise ConfigError("data.mixed_share needs preload = true: pictures are blended on the device")
        if self.preload and (self.augmentation == "randaugment" or self.cache_features):
            raise ConfigError(
                "data.preload goes with augmentation 'off', 'light' or 'strong' and without cache_features; "
                "nothing else is done on the device"
            )


@dataclass(frozen=True)
class OptimizerConfig(Settings):
    """How weights move."""

    kind: Literal["adamw", "bert_adam"] = "adamw"
    """bert_adam: the released code's Adam, without bias correction and clipping each gradient too."""
    learning_rate: PositiveFloat = 1e-4
    """Of everything that is not a tower."""
    image_learning_rate: NonNegativeFloat = 1e-7
    text_learning_rate: NonNegativeFloat = 1e-7
    weight_decay: NonNegativeFloat = 0.2
    """Not applied to biases, LayerNorms, embeddings of positions and the temperature, except by bert_adam."""
    beta1: Annotated[float, Range(least=0, below=1)] = 0.9
    beta2: Annotated[float, Range(least=0, below=1)] = 0.98
    eps: PositiveFloat = 1e-6
    warmup: Annotated[float, Range(least=0, below=1)] = 0.1
    """Fraction of the steps with a rising rate; a cosine to zero follows."""
    clip_norm: PositiveFloat = 1.0


@dataclass(frozen=True, kw_only=True)
class RunConfig(Settings):
    """A recipe: everything that decides the outcome of a run."""

    data: DataConfig
    selection_split: Split
    """The split that chooses the checkpoint: no default, because test would be a choice one must see."""
    model: GareConfig = GareConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    init_from: str | None = None
    """A saved model to start from, for example of an earlier stage; its weights, not its config."""
    teachers: tuple[str, ...] = ()
    """Saved models whose mean scores of every batch the model learns too (objective.teacher_weight)."""
    seed: NonNegativeInt = 0
    epochs: PositiveInt = 5
    batch_size: PositiveInt = 128
    """Pairs a step, over all processes."""
    chunk_size: PositiveInt | None = None
    """Encode this many pairs at a time (GradCache): the same gradients in less memory."""
    numerics: Literal["clean", "released"] = "clean"
    """released: towers and their Adam state in float16 on a GPU, their gradients averaged over processes."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: towers under autocast, weights and everything after the towers in float32."""
    compile: bool = False
    gradient_checkpointing: bool = False
    ema_decay: Annotated[float, Range(least=0, below=1)] = 0.0
    """Evaluate and save an average of the weights; 0 is off."""
    evaluate_every: PositiveInt = 1
    """Epochs between looks at the selection split."""
    checkpoint_every: PositiveInt = 200
    """Steps between points a killed run resumes from; the end of an epoch is one too."""
    log_every: PositiveInt = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teachers and self.data.cache_features:
            raise ConfigError(
                "teachers need data.cache_features = false: they look at the frames with towers of their own"
            )
