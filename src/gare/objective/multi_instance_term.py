"""UATVR's terms: samples of a text find samples of its video, and their distribution stays near a Gaussian.

Shapes: B pairs, S samples, D embedding.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gare.objective.loss_term import LossTerm, ScoredBatch
from gare.settings import NonNegativeFloat


@dataclass(frozen=True)
class MultiInstance(LossTerm):
    """InfoNCE over all samples, in which all samples of the right owner are right."""

    weight: NonNegativeFloat = 1e-2

    def __call__(self, batch: ScoredBatch) -> Tensor | None:
        parts = batch.pairs.parts
        if "text_samples" not in parts:
            return None
        text_BSD, video_BSD = parts["text_samples"], parts["video_samples"]
        return (multi_instance(video_BSD, text_BSD) + multi_instance(text_BSD, video_BSD)) / 2


@dataclass(frozen=True)
class SampleKl(LossTerm):
    """The distributions of texts and videos stay near a standard Gaussian.

    A sum over the batch, as published: its weight depends on the batch size. The spread is a log standard
    deviation where samples are drawn and a log variance here.
    """

    weight: NonNegativeFloat = 1e-4

    def __call__(self, batch: ScoredBatch) -> Tensor | None:
        parts = batch.pairs.parts
        if "text_samples" not in parts:
            return None
        losses = []
        for side in ("text", "video"):
            spread_BD, mean_BD = parts[f"{side}_spread"], parts[f"{side}_samples"].mean(dim=1)
            losses.append(-0.5 * (1 + spread_BD - mean_BD.square() - spread_BD.exp()).sum())
        return losses[0] + losses[1]


def multi_instance(query_BSD: Tensor, other_BSD: Tensor) -> Tensor:
    """The mean over samples of the mean log share of the samples of the right owner, negated."""
    logits = (query_BSD.flatten(0, 1) @ other_BSD.flatten(0, 1).mT).log_softmax(dim=-1)
    by_owner_BSBS = logits.unflatten(1, other_BSD.shape[:2]).unflatten(0, query_BSD.shape[:2])
    own_SSB: Tensor = by_owner_BSBS.diagonal(dim1=0, dim2=2)
    return -own_SSB.mean()
