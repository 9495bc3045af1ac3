"""What a training run with `--probe` writes down every few steps, and how it is read back.

Shapes: T texts, V videos, D embedding.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gare.analysis.gradients import cancellation, text_pulls
from gare.analysis.pairs import PairVectors, negatives, pair_geometry, positives, products_of
from gare.analysis.trust import compare_step
from gare.errors import EvaluationError

PROBE_FILE = "probe.jsonl"


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


def read_probe(folder: Path) -> dict[str, list[float]]:
    """The records of a run as columns; a value that a record lacks is not a number."""
    path = folder / PROBE_FILE if folder.is_dir() else folder
    if not path.is_file():
        raise EvaluationError(
            f"{folder} has no {PROBE_FILE}; train with 'gare train … --probe', or leave --run out"
        )
    records: list[dict[str, Any]] = []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]  # a kill may have cut off the last line
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            records.append({key: float(value) for key, value in json.loads(line).items()})
        except (ValueError, AttributeError, TypeError):
            raise EvaluationError(f"line {number} of {path} is not a record of --probe; delete it") from None
    if not records:
        raise EvaluationError(f"{path} is empty: the run was stopped before its first record")
    names = sorted({name for record in records for name in record})
    return {name: [record.get(name, float("nan")) for record in records] for name in names}


def smooth(values: Tensor, width: int) -> Tensor:
    """Running mean over `width` values, shorter at the ends, so that the length stays.

    >>> smooth(torch.tensor([0.0, 3.0, 0.0, 3.0]), 3)
    tensor([1.5000, 1.0000, 2.0000, 1.5000])
    """
    half = max(0, (width - 1) // 2)
    return torch.stack([values[max(0, n - half) : n + half + 1].mean() for n in range(len(values))])


def _double(vectors: PairVectors) -> PairVectors:
    return PairVectors(
        vectors.own_TVD.double(),
        vectors.other_TVD.double(),
        vectors.increment_TVD.double(),
        vectors.corrected_side,
    )
