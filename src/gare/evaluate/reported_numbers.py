"""Numbers that someone reported, without the scores behind them: typed, of a results.json, of an MTEB result.

A printed number stands for every value that rounds to it, so a number reproduces it if it is within half a
unit of the last decimal.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gare.errors import EvaluationError
from gare.evaluate.evaluation_results import DIRECTIONS, Direction, EvaluationResult
from gare.evaluate.named_measures import Measure
from gare.evaluate.protocol_grid import Protocol, ProtocolGrid
from gare.evaluate.rank_metrics import METRIC_NAMES

EXACT = 1e-9
MTEB_ROUNDING = 0.5e-5
"""MTEB rounds to five decimals."""


@dataclass(frozen=True)
class Reported:
    """One reported number; shares are fractions."""

    measure: Measure
    value: float
    tolerance: float

    def is_met_by(self, value: float | None) -> bool:
        """Whether a value rounds to the reported one."""
        return value is not None and abs(value - self.value) <= self.tolerance + EXACT

    def shown(self) -> str:
        """The number as it was printed, so far as its rounding tells."""
        scale = 100 if self.measure.is_share else 1
        decimals = 0
        while 0.5 * 10**-decimals > scale * self.tolerance * 1.01 + EXACT and decimals < 6:
            decimals += 1
        return f"{self.measure}={scale * self.value:.{decimals}f}"


@dataclass(frozen=True)
class ReportedSet:
    """What was reported of one system, by direction."""

    source: str
    numbers: dict[Direction, tuple[Reported, ...]]
    ranks: dict[Direction, tuple[int, ...]]
    """The ranks behind them, where the file has them."""


def parse_reported(text: str, direction: Direction = "text_to_video") -> ReportedSet:
    """Numbers as people type them, in percent: `R@1=53.8,R@5=80.1`, or `53.8` for R@1.

    >>> parse_reported("53.8, MnR=12").numbers["text_to_video"][0].shown()
    'R@1=53.8'
    """
    numbers = []
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, _, number = part.rpartition("=")
        try:
            numbers.append(_typed(Measure.named(name or "R@1"), number.strip().rstrip("% ")))
        except ValueError as error:
            why = f" ({error})" if str(error) else ""
            raise EvaluationError(
                f"'{part}' is neither a file nor a number{why}; write R@1=53.8,R@5=80.1, in percent"
            ) from None
    if not numbers:
        raise EvaluationError("no number was given; write R@1=53.8,R@5=80.1, in percent")
    measures = [number.measure for number in numbers]
    if len(set(measures)) < len(measures):
        raise EvaluationError(
            f"'{text}' names a measure twice; write R@1=53.8,R@5=80.1, with a point in a number"
        )
    return ReportedSet(text, {direction: tuple(numbers)}, {})


def reported_by_result(result: EvaluationResult, source: str) -> ReportedSet:
    """The numbers to quote of a results.json, both directions."""
    numbers: dict[Direction, tuple[Reported, ...]] = {}
    for direction in DIRECTIONS:
        main = getattr(result, direction).main
        numbers[direction] = tuple(
            Reported(Measure.named(name), getattr(main, name), EXACT) for name in METRIC_NAMES
        )
    return ReportedSet(source, numbers, {d: getattr(result, d).ranks for d in DIRECTIONS})


def reported_by_grid(grid: ProtocolGrid, source: str) -> ReportedSet:
    """The numbers of another table of scores under the base protocol, in the directions it tells."""
    numbers: dict[Direction, tuple[Reported, ...]] = {}
    ranks: dict[Direction, tuple[int, ...]] = {}
    for direction in DIRECTIONS:
        if direction in grid.choices("direction"):
            found = grid.measure(Protocol(direction)).ranks
            measures = map(Measure.named, METRIC_NAMES)
            numbers[direction] = tuple(Reported(each, each.of_ranks(found), EXACT) for each in measures)
            ranks[direction] = tuple(found.tolist())
    return ReportedSet(source, numbers, ranks)


def read_mteb_result(path: Path, direction: Direction = "text_to_video") -> ReportedSet:
    """The numbers of a result file of MTEB: of its only split and subset."""
    entries = _mteb_entries(read_json(path))
    if len(entries) != 1:
        raise EvaluationError(
            f"{path} has {len(entries)} splits and subsets; keep the one that is to be explained"
        )
    wanted = ("ndcg_at_10", "hit_rate_at_1", "recall_at_1", "recall_at_5", "recall_at_10", "mrr_at_10")
    found = {name: entries[0][name] for name in wanted if entries[0].get(name) is not None}
    if not found:
        raise EvaluationError(f"{path} has none of {', '.join(wanted)}; is it a retrieval task?")
    for name, value in found.items():
        if not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise EvaluationError(f"{path}: {name} is {value!r}; MTEB writes a share between 0 and 1")
    by_measure = {Measure.named(name): float(value) for name, value in found.items()}
    numbers = tuple(Reported(measure, value, MTEB_ROUNDING) for measure, value in by_measure.items())
    return ReportedSet(str(path), {direction: numbers}, {})


def is_mteb_result(values: object) -> bool:
    """Whether JSON is a result file of MTEB, of a version before 1.11 too (without "scores")."""
    if not isinstance(values, dict):
        return False
    return {"scores", "task_name"} <= set(values) or bool(_OLD_MTEB & set(values))


_OLD_MTEB = {"mteb_version", "mteb_dataset_name"}


def _mteb_entries(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The numbers of every split and subset. Old files have a split, or its subsets, beside the facts."""
    if "scores" in values:
        splits = values["scores"].values() if isinstance(values["scores"], dict) else [values["scores"]]
        parts = [part for split in splits for part in (split if isinstance(split, list) else [split])]
    else:
        splits = [part for part in values.values() if isinstance(part, dict)]
        parts = [
            part
            for split in splits
            for part in ([each for each in split.values() if isinstance(each, dict)] or [split])
        ]
    return [part for part in parts if isinstance(part, dict)]


def is_own_result(values: object) -> bool:
    """Whether JSON is a results.json."""
    return isinstance(values, dict) and {"schema_version", *DIRECTIONS} <= set(values)


def read_json(path: Path) -> Any:
    """The content of a JSON file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EvaluationError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise EvaluationError(f"{path} is not JSON ({error})") from None


def _typed(measure: Measure, number: str) -> Reported:
    try:
        value, scale = float(number), 100 if measure.is_share else 1
    except ValueError:
        raise ValueError from None  # nothing to add: it is no number
    if not 0 <= value < float("inf") or (measure.is_share and value > 100):
        raise ValueError(f"{measure} cannot be {number}")
    decimals = len(number.partition(".")[2])
    return Reported(measure, value / scale, 0.5 * 10**-decimals / scale)
