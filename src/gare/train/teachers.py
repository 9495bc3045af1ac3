"""Trained models that a new one learns from. Shapes: T texts, V videos."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gare.model import GARE
from gare.train.distributed import Processes, gather_text, gather_video
from gare.train.step import PairBatch, make_encode

Teachers = Callable[[PairBatch], Tensor]
"""Logits [T, V] of the whole batch, from this process's share of it."""


def make_teachers(models: Sequence[GARE], processes: Processes, *, autocast: bool) -> Teachers:
    """The mean of the models' scores, sharpened by the mean of their logit scales.

    Every teacher sees what the model sees: the same crops and the same tokens. Several of them together rank
    better than each, and that is what one model can take over without their cost.
    """
    encoders = [make_encode(model.eval().requires_grad_(False), autocast=autocast) for model in models]

    @torch.no_grad()
    def logits(batch: PairBatch) -> Tensor:
        scores = []
        for model, encode in zip(models, encoders, strict=True):
            text, video = encode(batch)
            text, video = gather_text(text, processes), gather_video(video, processes)
            scores.append(model.score_pairs(text, video).scores_TV)
        scale = torch.stack([model.logit_scale for model in models]).mean()
        return scale * torch.stack(scores).mean(dim=0)

    return logits
