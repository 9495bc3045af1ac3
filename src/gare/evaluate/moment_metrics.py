"""Moments and highlights as QVHighlights measures them: R1 and mAP over IoU, highlight mAP and Hit@1.

The numbers are those of the benchmark's own evaluator, to the digits it prints (`tests/golden`). Its rules:

- R1: the first window against the true one it overlaps most; a hit if their IoU reaches the threshold.
- mAP: at most ten windows by score; each takes the true window it overlaps most among those not taken yet.
  Precision is interpolated, averaged over queries, then over IoU thresholds 0.5, 0.55, …, 0.95.
- short, middle, long: only true windows of that length count, over the queries that have one.
- Highlights: clips of two seconds; a clip is true for an annotator who gave it at least 2, 3 or 4.

Shapes: P predicted windows, G true windows, C clips, A annotators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gare.data.moment_annotations import MomentQuery, read_json_lines
from gare.errors import EvaluationError

IOU_THRESHOLDS: tuple[float, ...] = tuple(round(0.5 + 0.05 * step, 2) for step in range(10))
MOST_WINDOWS = 10
LENGTHS: dict[str, tuple[float, float]] = {"short": (0, 10), "middle": (10, 30), "long": (30, 150)}
"""Seconds: longer than the first, at most the second."""
LEAST_SALIENCY: dict[str, int] = {"Fair": 2, "Good": 3, "VeryGood": 4}


@dataclass(frozen=True)
class MomentPrediction:
    """What a system says of one query."""

    windows: tuple[tuple[float, float, float], ...]
    """From, to and score; the first is the answer, mAP orders the others by their scores."""
    saliency: tuple[float, ...] = ()
    """How well each clip of two seconds fits the query."""


@dataclass(frozen=True)
class MomentMetrics:
    """Percentages, unrounded."""

    num_queries: int
    recall: dict[float, float]
    """R1 by IoU threshold."""
    mean_average_precision: dict[str, dict[float, float]]
    """By length (full, short, middle, long) and IoU threshold; a length without queries is left out."""
    highlight_map: dict[str, float]
    highlight_hit: dict[str, float]
    """By least saliency (Fair, Good, VeryGood); empty without saliency."""

    def summary(self) -> dict[str, float]:
        """The numbers that papers print, under the names of the benchmark."""
        found = {f"MR-full-R1@{iou}": self.recall[iou] for iou in (0.5, 0.7)}
        full = self.mean_average_precision["full"]
        found |= {"MR-full-mAP": _mean(full), "MR-full-mAP@0.5": full[0.5], "MR-full-mAP@0.75": full[0.75]}
        for length in ("long", "middle", "short"):
            if length in self.mean_average_precision:
                found[f"MR-{length}-mAP"] = _mean(self.mean_average_precision[length])
        for name in self.highlight_map:
            found[f"HL-min-{name}-mAP"] = self.highlight_map[name]
            found[f"HL-min-{name}-Hit1"] = self.highlight_hit[name]
        return found


def moment_metrics(
    queries: Sequence[MomentQuery], predictions: Mapping[str, MomentPrediction]
) -> MomentMetrics:
    """Compare predictions, by the id of their query, with the annotations.

    Raises:
        EvaluationError: a query has no prediction, or a prediction no query.
    """
    _check(queries, predictions)
    by_length = {"full": list(queries)}
    for name, (shortest, longest) in LENGTHS.items():
        if kept := [part for query in queries if (part := _within(query, shortest, longest)) is not None]:
            by_length[name] = kept
    has_saliency = all(query.saliency and predictions[query.id].saliency for query in queries)
    return MomentMetrics(
        num_queries=len(queries),
        recall=_recall(queries, predictions),
        mean_average_precision={name: _map(part, predictions) for name, part in by_length.items()},
        highlight_map={
            name: _highlight_map(queries, predictions, least) for name, least in LEAST_SALIENCY.items()
        }
        if has_saliency
        else {},
        highlight_hit={
            name: _highlight_hit(queries, predictions, least) for name, least in LEAST_SALIENCY.items()
        }
        if has_saliency
        else {},
    )


def overlaps(windows_P2: np.ndarray, others_G2: np.ndarray) -> np.ndarray:
    """Intersection over union of every pair of windows, [P, G].

    >>> overlaps(np.array([[0.0, 10.0]]), np.array([[5.0, 15.0], [20.0, 30.0]])).round(3).tolist()
    [[0.333, 0.0]]
    """
    start_PG = np.maximum(windows_P2[:, None, 0], others_G2[None, :, 0])
    end_PG = np.minimum(windows_P2[:, None, 1], others_G2[None, :, 1])
    shared_PG = np.clip(end_PG - start_PG, 0, None)
    length_P, length_G = windows_P2[:, 1] - windows_P2[:, 0], others_G2[:, 1] - others_G2[:, 0]
    union_PG = length_P[:, None] + length_G[None] - shared_PG
    iou_PG: np.ndarray = np.divide(shared_PG, union_PG, out=np.zeros_like(shared_PG), where=union_PG > 0)
    return iou_PG


def read_predictions(path: Path) -> dict[str, MomentPrediction]:
    """Predictions in the format of QVHighlights, one JSON object a line, by the id of their query."""
    found: dict[str, MomentPrediction] = {}
    for number, row in read_json_lines(path):
        try:
            windows = tuple(
                (float(start), float(end), float(score)) for start, end, score in row["pred_relevant_windows"]
            )
            name, saliency = str(row["qid"]), tuple(map(float, row.get("pred_saliency_scores", ())))
        except (KeyError, TypeError, ValueError):
            raise EvaluationError(
                f"{path}, line {number}: expected qid and pred_relevant_windows [[start, end, score], …]"
            ) from None
        if name in found:
            raise EvaluationError(f"{path}, line {number}: query {name} is there twice")
        found[name] = MomentPrediction(windows, saliency)
    return found


# --- windows ------------------------------------------------------------------------------------------------


def _recall(
    queries: Sequence[MomentQuery], predictions: Mapping[str, MomentPrediction]
) -> dict[float, float]:
    best = []
    for query in queries:
        first = predictions[query.id].windows[:1]
        best.append(overlaps(np.array(first)[:, :2], np.array(query.windows)).max() if first else 0.0)
    return {iou: 100 * float(np.mean(np.array(best) >= iou)) for iou in IOU_THRESHOLDS}


def _map(queries: Sequence[MomentQuery], predictions: Mapping[str, MomentPrediction]) -> dict[float, float]:
    per_query = np.array([_average_precisions(query, predictions[query.id]) for query in queries])
    means = 100 * per_query.mean(axis=0)
    return dict(zip(IOU_THRESHOLDS, means.tolist(), strict=True))


def _average_precisions(query: MomentQuery, prediction: MomentPrediction) -> list[float]:
    """The average precision of one query at each IoU threshold."""
    windows = sorted(prediction.windows[:MOST_WINDOWS], key=lambda window: -window[2])
    if not windows:
        return [0.0] * len(IOU_THRESHOLDS)
    overlap_PG = overlaps(np.array(windows)[:, :2], np.array(query.windows))
    return [_average_precision(_hits(overlap_PG, iou), len(query.windows)) for iou in IOU_THRESHOLDS]


def _hits(overlap_PG: np.ndarray, iou: float) -> np.ndarray:
    """Which predictions, best first, take a true window that no better one has taken, [P]."""
    taken: set[int] = set()
    hits = np.zeros(len(overlap_PG))
    for place, overlap_G in enumerate(overlap_PG):
        for window in overlap_G.argsort()[::-1].tolist():
            if overlap_G[window] < iou:
                break
            if window not in taken:
                taken.add(window)
                hits[place] = 1
                break
    return hits


def _average_precision(hits_P: np.ndarray, num_true: int) -> float:
    """Area under precision over recall, where the precision at a recall is the best from there on."""
    found_P = hits_P.cumsum()
    recall = np.concatenate([[0.0], found_P / num_true, [1.0]])
    precision = np.concatenate([[0.0], found_P / np.arange(1, len(hits_P) + 1), [0.0]])
    precision = np.maximum.accumulate(precision[::-1])[::-1]
    steps = np.flatnonzero(np.diff(recall)) + 1
    return float(((recall[steps] - recall[steps - 1]) * precision[steps]).sum())


def _within(query: MomentQuery, shortest: float, longest: float) -> MomentQuery | None:
    """The query with its windows of these lengths alone; None if it has none."""
    windows = tuple((start, end) for start, end in query.windows if shortest < end - start <= longest)
    return replace(query, windows=windows) if windows else None


# --- highlights ---------------------------------------------------------------------------------------------


def _highlight_hit(
    queries: Sequence[MomentQuery], predictions: Mapping[str, MomentPrediction], least: int
) -> float:
    """Whether the best clip is true for at least one annotator."""
    hits = []
    for query in queries:
        true_CA = _true_clips(query, least)
        best = int(np.argmax(predictions[query.id].saliency))
        hits.append(bool(best < len(true_CA) and true_CA[best].any()))
    return 100 * float(np.mean(hits))


def _highlight_map(
    queries: Sequence[MomentQuery], predictions: Mapping[str, MomentPrediction], least: int
) -> float:
    """The average precision of the clips, averaged over annotators and queries."""
    values = []
    for query in queries:
        true_CA = _true_clips(query, least)
        scores = np.zeros(len(true_CA))
        given = np.array(predictions[query.id].saliency)[: len(scores)]
        scores[: len(given)] = given
        values.append(
            np.mean([_clip_precision(true_CA[:, column], scores) for column in range(true_CA.shape[1])])
        )
    return 100 * float(np.mean(values))


def _clip_precision(true_C: np.ndarray, scores_C: np.ndarray) -> float:
    """The mean of the interpolated precision over the steps of recall.

    A step of several true clips with equal scores counts once, as in the benchmark's evaluator: this is not
    quite the area under the curve.
    """
    if true_C.all() or not true_C.any():
        return float(true_C[0])
    order = np.argsort(scores_C, kind="mergesort")[::-1]
    scores, true = scores_C[order], true_C[order]
    steps = np.append(np.flatnonzero(np.diff(scores)), len(true) - 1)
    found = true.cumsum()[steps]
    best = np.maximum.accumulate((found / (steps + 1))[::-1])[::-1]
    return float(best[np.flatnonzero(np.diff(found, prepend=0))].mean())


def _true_clips(query: MomentQuery, least: int) -> np.ndarray:
    """Which clip is true for which annotator, [C, A]."""
    true_CA = np.zeros((query.num_clips, len(query.saliency[0][1])))
    for clip, scores in query.saliency:
        true_CA[clip] = [score >= least for score in scores]
    return true_CA


def _check(queries: Sequence[MomentQuery], predictions: Mapping[str, MomentPrediction]) -> None:
    ids = [query.id for query in queries]
    if not ids:
        raise EvaluationError("no queries to evaluate")
    if len(set(ids)) != len(ids):
        raise EvaluationError("two queries have the same id")
    missing, unknown = set(ids) - predictions.keys(), predictions.keys() - set(ids)
    if missing or unknown:
        raise EvaluationError(
            f"predictions and annotations differ: {len(missing)} queries have no prediction and "
            f"{len(unknown)} predictions no query (for example {min(missing or unknown)}); is it the "
            "same split?"
        )


def _mean(values: Mapping[float, float]) -> float:
    return float(np.mean(list(values.values())))
