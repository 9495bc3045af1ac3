"""A term of the training loss: its settings, and the call that computes it from a scored batch.

A term of your own is a class and a line. This one keeps texts and videos apart from their common mean:

    @dataclass(frozen=True)
    class Centred(LossTerm):
        weight: NonNegativeFloat = 0.1

        def __call__(self, batch: ScoredBatch) -> Tensor:
            return batch.text.text_TD.mean(dim=0).square().sum()

    TERMS.register("centred", Centred)

A recipe that names it (`[objective.terms.centred]`) trains with it; it is weighted, logged and shown like the
others. Shapes: T texts, V videos, D embedding; text i belongs to video i.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor

from gare.settings import NonNegativeFloat, Settings
from gare.types import PairScores, TextFeatures, VideoFeatures


@dataclass(frozen=True)
class ScoredBatch:
    """The whole batch, of all processes: what the towers made of it and how the model scores its pairs."""

    pairs: PairScores
    """Scores, and the increments of a model that has them."""
    logit_scale: Tensor | float
    """One over the temperature."""
    video_index: Tensor | None = None
    """Which video each pair shows: two captions of one video have the same number."""
    teacher_logits_TV: Tensor | None = None
    """The teachers' logits of the same pairs, if the recipe names teachers."""
    text: TextFeatures | None = None
    video: VideoFeatures | None = None
    """Features of both sides; `train` always gives them."""


@dataclass(frozen=True)
class LossTerm(Settings):
    """Settings of a term, its weight among them. Called with a batch, it gives the raw term.

    The weight is applied once, where the total is formed (`training_loss`), never by the term.
    """

    weight: NonNegativeFloat = 1.0

    @abstractmethod
    def __call__(self, batch: ScoredBatch) -> Tensor | None:
        """A scalar to minimise; None where the batch lacks what the term needs."""
