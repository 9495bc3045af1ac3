"""Trained models that a new one learns from. Shapes: T texts, V videos."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gare.errors import CheckpointError, ConfigError
from gare.model import GARE
from gare.train.distributed import Processes, gather_text, gather_video
from gare.train.step import Encode, PairBatch, make_encode
from gare.types import TextFeatures, VideoFeatures, block_slices

Teachers = Callable[[PairBatch], Tensor]
"""Logits [T, V] of the whole batch, from this process's share of it."""


def load_teachers(names: Sequence[str], student: GARE) -> list[GARE]:
    """Saved models that read the student's pixels and tokens as it does."""
    return [_load(name, student) for name in names]


def _load(name: str, student: GARE) -> GARE:
    try:
        teacher = GARE.from_pretrained(name)
    except CheckpointError as error:
        raise ConfigError(f"teachers: {error}") from None
    own, others = student.backbone.image_format, teacher.backbone.image_format
    if own != others:
        raise ConfigError(
            f"the teacher {name} looks at pictures of {others.size} pixels and the model at {own.size}, or "
            "their colours are scaled differently; both see the same pixels. Towers that take any size, as "
            "the mini backbone's do, can be saved with another: experiments/average.py, one model and --set"
        )
    probe = ["two words " * 100]  # longer than any model reads, so that limits are compared as well
    own_ids, ids = (model.backbone.tokenize(probe)[0] for model in (student, teacher))
    shared = own_ids.shape[1] - 1  # a last token may end the sentence early
    if ids.shape[1] < own_ids.shape[1] or not torch.equal(ids[:, :shared], own_ids[:, :shared]):
        raise ConfigError(
            f"the teacher {name} has another tokenizer than the model, or reads fewer words; choose one of "
            "its kind, or lower the model's backbone.max_words"
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
    text = TextFeatures(
        torch.cat([t.text_TD for t, _ in parts]),
        torch.cat([t.words_TWD for t, _ in parts]),
        torch.cat([t.mask_TW for t, _ in parts]),
    )
    return text, VideoFeatures(torch.cat([v.frames_VFD for _, v in parts]), batch.mask_VF.bool())
