"""Agreement with teachers about the pairs of a batch. Shapes: T texts, V videos."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from gare.objective.loss_term import LossTerm, ScoredBatch
from gare.settings import NonNegativeFloat


@dataclass(frozen=True)
class Distillation(LossTerm):
    """Agreement with the teachers of a recipe that names some."""

    weight: NonNegativeFloat = 1.0

    def __call__(self, batch: ScoredBatch) -> Tensor | None:
        if batch.teacher_logits_TV is None:
            return None
        return distillation(batch.pairs.scores_TV, batch.logit_scale, batch.teacher_logits_TV)


def distillation(scores_TV: Tensor, logit_scale: Tensor | float, teacher_logits_TV: Tensor) -> Tensor:
    """Mean over both directions of the KL divergence from the teachers' softmax to the model's.

    InfoNCE calls every other video of a batch equally wrong. A teacher says which of them would do as well.

    Args:
        scores_TV: cosine scores.
        logit_scale: one over the temperature of the model.
        teacher_logits_TV: the teachers' scores over their own temperature.

    >>> import torch
    >>> distillation(torch.eye(2), 3.0, 3 * torch.eye(2) + 5)
    tensor(0.)
    """
    if scores_TV.shape != teacher_logits_TV.shape:
        raise ValueError(
            f"scores {list(scores_TV.shape)} and teachers {list(teacher_logits_TV.shape)} differ in shape"
        )
    logits_TV = scores_TV * logit_scale
    text_to_video = _divergence(logits_TV, teacher_logits_TV)
    video_to_text = _divergence(logits_TV.mT, teacher_logits_TV.mT)
    return (text_to_video + video_to_text) / 2


def _divergence(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    return F.kl_div(
        logits.log_softmax(dim=1), teacher_logits.log_softmax(dim=1), reduction="batchmean", log_target=True
    )
