"""HBI's game: on every level the estimated interaction of a word and a frame follows the teacher's.

A file of its own under sixty lines: one term, for one method. Shapes: B pairs, W words, F frames.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from gare.objective.levels_term import mean_divergence
from gare.objective.loss_term import LossTerm, ScoredBatch
from gare.settings import NonNegativeFloat


@dataclass(frozen=True)
class Banzhaf(LossTerm):
    """Estimators follow their frozen teacher, over the frames of a word and over the words of a frame."""

    weight: NonNegativeFloat = 1.0
    second_axis: Literal["words", "batch"] = "words"
    """The published code reverses all axes where it means the last two: its second softmax runs over the
    batch."""

    def __call__(self, batch: ScoredBatch) -> Tensor | None:
        parts = batch.pairs.parts
        levels = [name.removeprefix("banzhaf:") for name in parts if name.startswith("banzhaf:")]
        losses = []
        for level in levels:
            found_BWF, wanted_BWF = parts[f"banzhaf:{level}"], parts[f"banzhaf_teacher:{level}"]
            losses.append(mean_divergence(found_BWF, wanted_BWF))
            losses.append(mean_divergence(self._turned(found_BWF), self._turned(wanted_BWF)))
        return sum(losses[1:], start=losses[0]) if losses else None

    def _turned(self, x_BWF: Tensor) -> Tensor:
        return x_BWF.mT if self.second_axis == "words" else x_BWF.permute(2, 1, 0)
