"""What `gare train --probe` records: geometry and steps of increments every few steps, in probe.jsonl.

The recorder observes a run: it measures a batch before and after an update, without dropout and without
gradients, and leaves model, optimiser and random numbers as they were. A run with a probe ends with the same
weights as one without. Shapes: T texts, V videos, D embedding.
"""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gare.analysis.pair_gradients import cancellation, compare_step, text_pulls
from gare.analysis.pairs import PairVectors, negatives, pair_geometry, positives, products_of
from gare.atomic import whole_lines, write_text
from gare.errors import EvaluationError

if TYPE_CHECKING:  # training calls the recorder; the recorder needs nothing of training
    from gare.objective import Loss
    from gare.train.gradient_step import PairBatch
    from gare.train.training_run import TrainingRun

PROBE_FILE = "probe.jsonl"
MAX_PAIRS = 64
"""Pairs of a batch that are measured, so that T × V × D float64 numbers stay at 17 MB for D = 512."""
NUM_RECORDS = 100
"""Records of a whole run, when no distance between them is asked for."""


class TrainingProbe:
    """An observer for `gare.train.train`: writes a record of every n-th step to probe.jsonl of the run.

    Args:
        every: steps between records; 0 chooses a distance that gives about a hundred in all.
    """

    def __init__(self, every: int = 0) -> None:
        self._every = every
        self._run: TrainingRun | None = None
        self._seen: tuple[PairBatch, PairVectors, float] | None = None

    def start(self, run: TrainingRun) -> None:
        """Keep the records before the step a run goes on from; those after it will come again."""
        self._run = run
        self._every = self._every or max(1, math.ceil(run.num_steps / NUM_RECORDS))
        path = run.folder / PROBE_FILE
        kept = [line for line in whole_lines(path) if json.loads(line)["step"] < run.state.progress.step]
        write_text(path, "".join(f"{line}\n" for line in kept))

    def before_step(self, step: int, batch: PairBatch) -> None:
        """Called when the gradients are there and the weights still old."""
        assert self._run is not None
        if step % self._every == 0:
            part = batch[: 2 * MAX_PAIRS]
            temperature = 1 / float(
                self._run.state.model.logit_scale.detach()
            )  # now: the update may change it
            self._seen = (part, _vectors(self._run, part), temperature)

    def after_step(self, step: int, loss: Loss) -> None:
        """Called after the update; writes the record if `before_step` measured this batch."""
        if self._seen is None or self._run is None:
            return
        part, vectors, temperature = self._seen
        self._seen = None
        record: dict[str, float] = {"step": step}
        record |= {f"term/{name}": float(term) for name, term in loss.terms.items()}
        record |= describe_step(vectors, _vectors(self._run, part), temperature=temperature)
        with (self._run.folder / PROBE_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps({name: x for name, x in record.items() if math.isfinite(x)}) + "\n")


@torch.no_grad()
def _vectors(run: TrainingRun, batch: PairBatch) -> PairVectors:
    """The vectors of some pairs of a batch, as the model sees them at inference."""
    model = run.state.model
    model.eval()
    text, video = run.encode(batch)
    model.train()
    rows = _one_of_each(batch.video_index)
    return model.interaction.pair_vectors(text[rows], video[rows])


def _one_of_each(video_index: torch.Tensor) -> torch.Tensor:
    """The first pair of each video: a second caption of it would be a negative that is none."""
    first: dict[int, int] = {}
    for row, video in enumerate(video_index.tolist()):
        first.setdefault(video, row)
    return torch.tensor(sorted(first.values())[:MAX_PAIRS], device=video_index.device)


def describe_step(before: PairVectors, after: PairVectors, *, temperature: float) -> dict[str, float]:
    """The state of a batch before an update, and what the update did, as one flat record.

    A quantity of pairs has two entries, `name/positive` and `name/negative`: means over such pairs.
    """
    before, after = _double(before), _double(after)
    geometry = pair_geometry(products_of(before))
    record: dict[str, float] = {}
    has_increments = bool(before.increment_TVD.any() or after.increment_TVD.any())
    for field in fields(geometry):
        values_TV = getattr(geometry, field.name)
        if has_increments or field.name in ("plain_cosine", "own_norm", "distance"):
            record |= by_kind(field.name, values_TV)
    record["cancellation"] = float(cancellation(text_pulls(before, temperature=temperature)).mean())
    if not has_increments:
        return record
    record["radius_std"] = float(geometry.radius.std(dim=1).mean())
    step = compare_step(before, after.increment_TVD, temperature=temperature)
    for name in ("analytic", "learned", "error"):
        record |= by_kind(f"step_{name}", getattr(step, f"{name}_TV").where(step.feasible_TV, torch.nan))
    record |= by_kind("step_feasible", step.feasible_TV.double())
    descends_TV = (step.analytic_TV > 0).double().where(step.feasible_TV, torch.nan)
    record |= by_kind("step_descends", descends_TV)
    record |= {"loss_before": step.loss_before, "loss_analytic": step.loss_analytic}
    return record


def by_kind(name: str, values_TV: Tensor) -> dict[str, float]:
    """Means over positive and over negative pairs, pairs without a value left out."""
    return {
        f"{name}/{kind}": float(part.nanmean())
        for kind, part in (("positive", positives(values_TV)), ("negative", negatives(values_TV)))
    }


def _double(vectors: PairVectors) -> PairVectors:
    return PairVectors(
        vectors.own_TVD.double(),
        vectors.other_TVD.double(),
        vectors.increment_TVD.double(),
        vectors.corrected_side,
    )


def read_records(folder: Path) -> dict[str, list[float]]:
    """The records of a run as columns; a value that a record lacks is not a number."""
    path = folder / PROBE_FILE if folder.is_dir() else folder
    if not path.is_file():
        raise EvaluationError(
            f"{folder} has no {PROBE_FILE}; train with 'gare train … --probe', or leave --run out"
        )
    records: list[dict[str, Any]] = []
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            records.append({key: float(value) for key, value in json.loads(line).items()})
        except (ValueError, AttributeError, TypeError):
            raise EvaluationError(f"line {number} of {path} is not a record of --probe; delete it") from None
    if not records:
        raise EvaluationError(f"{path} is empty: the run was stopped before its first record")
    names = sorted({name for record in records for name in record})
    return {name: [record.get(name, float("nan")) for record in records] for name in names}
