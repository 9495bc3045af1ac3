"""Evaluations as a model's card shows them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gare.errors import EvaluationError
from gare.evaluate.caption_protocols import TwoWayMetrics
from gare.evaluate.evaluation_results import DIRECTIONS, EvaluationResult
from gare.evaluate.model_evaluation import weights_hash
from gare.evaluate.rank_metrics import METRIC_NAMES
from gare.model import GARE
from gare.model.model_card import CardResult, update_card


def results_of_training(
    metrics: TwoWayMetrics, model: GARE, *, dataset: str, split: str, seed: int
) -> list[CardResult]:
    """What a model scored on the split that selects it, in both directions."""
    facts = {"ties": "pessimistic", "protocol": metrics.protocol, "selected_on": split, "seed": seed}
    facts["fingerprint"] = model.fingerprint()
    found = []
    for direction in DIRECTIONS:
        measured = getattr(metrics, direction)["pessimistic"]
        noted = {**facts, "num_queries": measured.num_queries}
        found.append(CardResult(dataset, split, direction, measured.numbers, noted))
    return found


def results_for_card(result: EvaluationResult, model: GARE) -> list[CardResult]:
    """An evaluation of this model, what was rescored included."""
    found = []
    for each in (result, *result.rescored):
        for direction in DIRECTIONS:
            measured = getattr(each, direction)
            facts: dict[str, Any] = {
                "ties": "pessimistic",
                "protocol": each.protocol,
                "selected_on": each.selected_on,
                "num_queries": measured.num_queries,
                "num_missing_videos": each.num_missing_videos,
                "gare_version": each.gare_version,
                "fingerprint": model.fingerprint(),
            }
            if each.rescoring != "none":
                facts["rescoring"] = each.rescoring
            numbers: dict[str, float] = {name: getattr(measured.main, name) for name in METRIC_NAMES}
            found.append(CardResult(each.dataset, each.split, direction, numbers, facts))
    return found


def write_results_to_card(folder: Path, paths: Sequence[Path]) -> Path:
    """Write what results.json files say of a saved model into its card.

    Raises:
        EvaluationError: a file is of other weights, or cannot be read.
    """
    model = GARE.from_pretrained(folder)
    weights = weights_hash(model)
    found: list[CardResult] = []
    for path in paths:
        result = EvaluationResult.read(path)
        if result.weights_hash != weights:
            raise EvaluationError(
                f"{path} was measured with other weights ({result.weights_hash}) than {folder} has "
                f"({weights}); evaluate this model: gare evaluate {folder} --data DATA --out {path}"
            )
        found += results_for_card(result, model)
    return update_card(folder, model, found)
