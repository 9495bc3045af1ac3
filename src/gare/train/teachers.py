"""Trained models that a new one learns from. Shapes: T texts, V videos."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gare.errors import CheckpointError, ConfigError
from gare.model import GARE
from gare.train.distributed import Processes, gather_text, gather_video
from gare.train.gradient_step import Encode, PairBatch, make_encode
from gare.train.run_config import RunConfig
from gare.train.starting_model import compile_towers
from gare.types import TextFeatures, VideoFeatures, block_slices

Teachers = Callable[[PairBatch], Tensor]
"""Logits [T, V] of the whole batch, from this process's share of it."""


def open_teachers(config: RunConfig, student: GARE, processes: Processes) -> Teachers | None:
    """The teachers a recipe names, as fast as its model."""
    if not config.teachers:
        return None
    models = load_teachers(config.teachers, student)
    if config.compile:
        for model in models:
            compile_towers(model)
    autocast = config.precision == "bfloat16"
    return make_teachers(models, processes, autocast=autocast, chunk_size=config.chunk_size)


def load_teachers(names: Sequence[str], student: GARE) -> list[GARE]:
    """Saved models that read the student's pixels and tokens as it does."""
    return [_load(name, student) for name in names]


def _load(name: str, student: GARE) -> GARE:
    try:
        teacher = GARE.from_pretrained(name)
    except CheckpointError as error:
        raise ConfigError(f"teachers: {error}") from None
    own, others = student.encoder.image_format, teacher.encoder.image_format
    if own != others:
        raise ConfigError(
            f"the teacher {name} takes pictures of {others.size} pixels and the model of {own.size}, or "
            "they normalise colours differently; a teacher must take the same pixels as the model. The mini "
            "encoder takes any size: save the teacher with another one (experiments/average.py, --set)"
        )
    sample = ["two words " * 100]  # longer than any model reads, so that limits are compared as well
    own_ids, ids = (model.encoder.tokenize(sample)[0] for model in (student, teacher))
    shared = own_ids.shape[1] - 1  # a last token may end the sentence early
    if ids.shape[1] < own_ids.shape[1] or not torch.equal(ids[:, :shared], own_ids[:, :shared]):
        raise ConfigError(
            f"the teacher {name} has another tokenizer than the model, or reads fewer words; choose one of "
            "its kind, or lower the model's encoder.max_words"
        )
    return teacher.to(student.device)


def make_teachers(
    models: Sequence[GARE], processes: Processes, *, autocast: bool, chunk_size: int | None = None
) -> Teachers:
    """The mean of the models' scores, sharpened by the mean of their logit scales.

    Every teacher sees what the model sees: the same crops and the same tokens. Several of them together rank
    better than each, and that is what one model can take over without their cost.
    """
    encoders = [make_encode(model.eval().requires_grad_(False), autocast=autocast) for model in models]
    scale = torch.stack([model.logit_scale.detach() for model in models]).mean()

    @torch.no_grad()
    def logits(batch: PairBatch) -> Tensor:
        scores = []
        for model, encode in zip(models, encoders, strict=True):
            text, video = _encode(encode, batch, chunk_size or len(batch))
            scores.append(model.score(gather_text(text, processes), gather_video(video, processes)))
        return scale * torch.stack(scores).mean(dim=0)

    return logits


def _encode(encode: Encode, batch: PairBatch, size: int) -> tuple[TextFeatures, VideoFeatures]:
    parts = [encode(batch[rows]) for rows in block_slices(len(batch), size)]
    return TextFeatures.cat([text for text, _ in parts]), VideoFeatures.cat([video for _, video in parts])
