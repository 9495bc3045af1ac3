"""The settings of a training run, as a recipe writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from gare.errors import ConfigError
from gare.model import GareConfig
from gare.objective import ObjectiveConfig
from gare.settings import (
    ByName,
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
class FramesConfig(Settings):
    """How frames arrive in training; `name` says which way."""

    name: str


@dataclass(frozen=True)
class StreamConfig(FramesConfig):
    """Frames are decoded and augmented anew every time: any number of videos, in little memory."""

    name: Literal["stream"] = "stream"
    augmentation: Literal["off", "light", "strong", "randaugment"] = "off"
    draw_frames: bool = False
    """Train on other frames of a video every time: its segments stay, the moment within them is drawn. With
    sampling = "uniform" only."""


@dataclass(frozen=True)
class PreloadConfig(FramesConfig):
    """Every training frame is decoded once and kept on the device, where crops are cut out of it.

    For images, and videos given as frames, that fit there.
    """

    name: Literal["preload"] = "preload"
    augmentation: Literal["off", "light", "strong"] = "off"
    draw_frames: bool = False
    """Train on other frames of a video every time, as with stream."""
    mixed_share: Annotated[float, Range(least=0, below=0.5)] = 0.0
    """This share of a batch is blended with other pairs, pictures and captions (MixGen)."""
    word_dropout: Annotated[float, Range(least=0, below=1)] = 0.0
    """Leave out each word of a caption with this probability, drawn anew every time."""
    word_swaps: Annotated[float, Range(least=0, below=1)] = 0.0
    """Let each word of a caption change places with the next with this probability, drawn anew every time."""


@dataclass(frozen=True)
class CachedConfig(FramesConfig):
    """A frozen image tower encodes every frame once; training starts from its features."""

    name: Literal["cached"] = "cached"
    augmentation: Literal["off", "light", "strong"] = "off"
    views: PositiveInt = 1
    """How many augmented variants of every clip are encoded; a step draws one of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.augmentation != "off") != (self.views > 1):
            raise ConfigError(
                "every frame is encoded once, so augmentation is 'off'; or there are several views, with "
                "augmentation 'light' or 'strong', of which one is drawn"
            )


FRAMES_CONFIGS: Mapping[str, type[FramesConfig]] = {
    "stream": StreamConfig,
    "preload": PreloadConfig,
    "cached": CachedConfig,
}


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
    frames: Annotated[FramesConfig, ByName(FRAMES_CONFIGS, default="stream")] = StreamConfig()
    """How frames arrive: `frames = "preload"`, or a table `[data.frames]` with `name` and its settings."""
    caption_choice: Literal["all", "one_per_video"] = "all"
    """An epoch shows every caption once, or every video once with a caption drawn anew."""
    num_workers: NonNegativeInt = 0
    allow_missing: bool = False
    """Train and evaluate on the videos there are; the number missing is in every result."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_drawn = isinstance(self.frames, StreamConfig | PreloadConfig) and self.frames.draw_frames
        if is_drawn and self.sampling != "uniform":
            raise ConfigError("draw_frames needs sampling = 'uniform': frames of a fixed grid cannot vary")

    @classmethod
    def upgraded(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Read `preload`, `cache_features` and the four keys beside them as settings of `frames`."""
        frames = values.get("frames", {})
        frames = {"name": frames} if isinstance(frames, str) else frames
        if not isinstance(frames, Mapping) or not isinstance(frames.get("name", ""), str):
            return values
        frames = {"name": "stream", **frames}
        for flag in _OLD_FLAGS.keys() & values.keys():
            if not isinstance(values[flag], bool):
                raise ConfigError(f"{flag}: must be true or false, not {values[flag]!r}")
        flags = {name: values.pop(flag) for flag, name in _OLD_FLAGS.items() if flag in values}
        frames |= {key: values.pop(key) for key in _OWNERS.keys() & values.keys()}
        if flags.get(frames["name"]) is False:
            frames["name"] = "stream"
        for name in (name for name, is_chosen in flags.items() if is_chosen):
            if frames["name"] not in ("stream", name):
                raise ConfigError("preload and cache_features exclude each other; set frames to one of them")
            frames["name"] = name
        return {**values, "frames": _without_defaults_of_others(frames)}


_OLD_FLAGS = {"preload": "preload", "cache_features": "cached"}
"""What chose a way once, and the way it chose; both false was to stream."""
_OWNERS: Mapping[str, tuple[Any, tuple[str, ...], str]] = {
    "augmentation": ("off", ("stream", "preload", "cached"), ""),
    "draw_frames": (False, ("stream", "preload"), "features computed once cannot vary"),
    "views": (1, ("cached",), "without it every draw is a new view"),
    "mixed_share": (0.0, ("preload",), "pictures are blended on the device"),
}
"""Keys that stood beside `frames`: their default, the ways they belong to, and why no other has them."""


def _without_defaults_of_others(frames: dict[str, Any]) -> dict[str, Any]:
    """Drop keys that the chosen way does not have, if they ask for nothing: old files name them all."""
    for key in _OWNERS.keys() & frames.keys():
        default, owners, reason = _OWNERS[key]
        if frames["name"] in owners or frames["name"] not in FRAMES_CONFIGS:
            continue
        if frames.pop(key) != default:
            raise ConfigError(f"{key} needs frames = {' or '.join(map(repr, owners))}: {reason}")
    return frames


@dataclass(frozen=True)
class OptimizerConfig(Settings):
    """How weights move."""

    kind: Literal["adamw", "bert_adam"] = "adamw"
    """bert_adam: the released code's Adam, without bias correction and clipping each gradient too."""
    learning_rate: PositiveFloat = 1e-4
    """The rate of everything that is not a tower."""
    image_learning_rate: NonNegativeFloat = 1e-7
    text_learning_rate: NonNegativeFloat = 1e-7
    weight_decay: NonNegativeFloat = 0.2
    """Biases, LayerNorms, position embeddings and the temperature have none, except with bert_adam."""
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
    start_from: str | None = None
    """A model to go on from: gare-mini, or whatever `--model` takes. A model with increments comes with its
    settings, and `model` is not read; increments are put on top of any other, as `model` says. Parts that
    `model.encoder` freezes stay frozen."""
    teachers: tuple[str, ...] = ()
    """Saved models to distil from: their mean scores are a second target (objective.terms.teacher.weight)."""
    seed: NonNegativeInt = 0
    epochs: PositiveInt = 5
    batch_size: PositiveInt = 128
    """Pairs in a step, over all processes."""
    chunk_size: PositiveInt | None = None
    """Encode this many pairs at a time (GradCache): the same gradients in less memory."""
    numerics: Literal["clean", "released"] = "clean"
    """released: towers and their Adam state in float16 on a GPU, their gradients averaged over processes.
    With bert_adam, the learning rate is planned for five epochs whatever `epochs` says."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: towers under autocast, weights and everything after the towers in float32; there a GPU
    multiplies by tf32."""
    compile: bool = False
    cuda_graph: bool = True
    """On one GPU, record forward, loss and backward once for each shape of a batch, and replay them: the CPU
    then asks for all kernels of a step at once. Off with chunk_size, teachers or dropout in the towers."""
    gradient_checkpointing: bool = False
    ema_decay: Annotated[float, Range(least=0, below=1)] = 0.0
    """Evaluate and save an average of the weights; 0 is off."""
    evaluate_every: PositiveInt = 1
    """Epochs between evaluations on the selection split."""
    checkpoint_every: PositiveInt = 200
    """Steps between points a killed run resumes from; the end of an epoch is one too."""
    log_every: PositiveInt = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start_from and self.init_from:
            raise ConfigError(
                "start_from takes a model with its settings, init_from weights for the settings of the "
                "recipe; choose one of them"
            )
        if self.teachers and isinstance(self.data.frames, CachedConfig):
            raise ConfigError(
                "teachers need data.frames = 'stream' or 'preload': they see frames with towers of their own"
            )
