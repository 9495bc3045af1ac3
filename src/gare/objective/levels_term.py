"""InfoNCE of further score matrices that an interaction gives while training, and agreement between them.

Shapes: T texts, V videos; text i belongs to video i.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from gare.objective.contrastive_term import symmetric_infonce
from gare.objective.loss_term import LossTerm, ScoredBatch
from gare.settings import NonNegativeFloat


@dataclass(frozen=True)
class Levels(LossTerm):
    """InfoNCE of every other level: merged tokens (HBI), objects (ProST), support texts (T-MASS)."""

    weight: NonNegativeFloat = 1.0
    same_video: Literal["exclude", "released"] = "exclude"
    """As in the contrastive term."""

    def __call__(self, batch: ScoredBatch) -> Tensor | None:
        excluded = batch.video_index if self.same_video == "exclude" else None
        losses = [
            symmetric_infonce(scores_TV, batch.logit_scale, video_index=excluded)
            for scores_TV in level_scores(batch).values()
        ]
        return sum(losses[1:], start=losses[0]) if losses else None


@dataclass(frozen=True)
class LevelAgreement(LossTerm):
    """The scores of merged tokens agree with those of single tokens (NeighborRetr's KL)."""

    weight: NonNegativeFloat = 1.0

    def __call__(self, batch: ScoredBatch) -> Tensor | None:
        merged_TV = batch.pairs.parts.get("merged_scores")
        if merged_TV is None:
            return None
        scores_TV = batch.pairs.scores_TV
        forth, back = mean_divergence(merged_TV, scores_TV), mean_divergence(merged_TV.mT, scores_TV.mT)
        return (forth + back) / 2


@dataclass(frozen=True)
class Hierarchy(LossTerm):
    """The scores of every other level agree with those of the tokens, both ways (HBI's distillation)."""

    weight: NonNegativeFloat = 2.0

    def __call__(self, batch: ScoredBatch) -> Tensor | None:
        scores_TV = batch.pairs.scores_TV
        losses = [
            mean_divergence(level_TV, scores_TV) + mean_divergence(level_TV.mT, scores_TV.mT)
            for level_TV in level_scores(batch).values()
        ]
        return sum(losses[1:], start=losses[0]) if losses else None


def level_scores(batch: ScoredBatch) -> dict[str, Tensor]:
    """The further score matrices of an interaction, by name."""
    found = batch.pairs.parts.items()
    return {name.removeprefix("scores:"): x for name, x in found if name.startswith("scores:")}


def mean_divergence(logits: Tensor, wanted: Tensor) -> Tensor:
    """KL(softmax wanted ‖ softmax logits) over the last axis, as a mean over all *elements*.

    The published codes divide by the number of elements, not of rows, and use no temperature.
    """
    share = wanted.softmax(dim=-1)
    return (share * (wanted.log_softmax(dim=-1) - logits.log_softmax(dim=-1))).mean()
