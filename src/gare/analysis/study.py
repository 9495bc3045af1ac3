"""What a report is about: a model, what it is compared with, and the files of its training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from gare.analysis.pairs import PairVectors, pair_vectors
from gare.analysis.subject import Gallery, Subject

BATCH_SIZE = 128
"""Pairs a batch for probes of the loss: the paper's."""


class NotMeasured(Exception):
    """A probe has nothing to look at; the message says what would give it something."""


@dataclass(frozen=True)
class View:
    """One way to look at pairs: a model, with its increments or without."""

    label: str
    subject: Subject
    with_increments: bool

    def batches(self, *, batch_size: int = BATCH_SIZE, seed: int = 0) -> Iterator[PairVectors]:
        """Random batches of the gallery, each pair in one of them; a smaller rest is left out."""
        size = len(self.subject.text)
        batch_size = min(batch_size, size)
        order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
        for start in range(0, size - batch_size + 1, batch_size):
            vectors = pair_vectors(
                self.subject.model, *self.subject.batch(order[start : start + batch_size].sort().values)
            )
            if not self.with_increments:
                vectors = replace(vectors, increment_TVD=torch.zeros_like(vectors.increment_TVD))
            yield vectors

    @property
    def cosine_TV(self) -> Tensor:
        geometry = self.subject.geometry
        return geometry.cosine if self.with_increments else geometry.plain_cosine


@dataclass(frozen=True)
class Study:
    """Everything a probe may read."""

    gallery: Gallery
    subject: Subject
    baseline: Subject | None = None
    run: Path | None = None
    ablations: tuple[Path, ...] = ()
    thumbnails: Path = Path("thumbnails")
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def has_increments(self) -> bool:
        return self.subject.model.increment_net is not None

    @property
    def model_view(self) -> View:
        return View("GARE" if self.has_increments else "model", self.subject, self.has_increments)

    @property
    def baseline_view(self) -> View | None:
        """The baseline; without one, the model with its increments taken away."""
        if self.baseline is not None:
            return View("baseline", self.baseline, self.baseline.model.increment_net is not None)
        return View("GARE without increments", self.subject, False) if self.has_increments else None

    @property
    def views(self) -> dict[str, View]:
        """By role."""
        found = {"model": self.model_view}
        return found if self.baseline_view is None else {"baseline": self.baseline_view, **found}

    def need_videos(self, number: int) -> None:
        if len(self.gallery.videos) < number:
            raise NotMeasured(f"The split has {len(self.gallery.videos)} videos; this part needs {number}.")

    def need_increments(self) -> None:
        if not self.has_increments:
            raise NotMeasured(
                "This model has no increments: it is a baseline. Analyse a GARE model to fill this part."
            )
