"""The table of the decisive experiment, from saved ranks alone: means, paired differences, their intervals.

What is compared is fixed in `decisive.md`; this file only carries it out. An interval resamples videos, with
all their queries, and seeds, both at once; two rows of one seed saw the same batches and are resampled as a
pair. Shapes: S seeds, Q queries, V videos, R resamples.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gare.atomic import replacing
from gare.errors import DataError

Floats = npt.NDArray[np.float64]
Ranks = npt.NDArray[np.uint16]
RESAMPLES = 4_000
METRICS: dict[str, Callable[[Ranks], Floats]] = {
    "R@1": lambda ranks: 100.0 * (ranks <= 1),
    "R@5": lambda ranks: 100.0 * (ranks <= 5),
    "R@10": lambda ranks: 100.0 * (ranks <= 10),
    "mean rank": lambda ranks: ranks.astype(np.float64),
}
TASKS = ("A1", "A2", "A4", "B")
TEMPERATURES = (0.05, 0.01)
PRIMARY_TASKS = ("A2", "A4", "B")
NUM_PRIMARY = len(PRIMARY_TASKS) * len(TEMPERATURES)
FREE = ("baseline", "text-conditioned")
"""Rows without parameters: the same at every temperature, number of steps and seed."""
FROZEN, TRAINED = "frozen", "trained"
"""Whether the projections move."""


@dataclass(frozen=True)
class Cell:
    """One row on one task, in one setting, after so many steps."""

    task: str
    row: str
    temperature: float
    projections: str
    steps: int

    @property
    def is_free(self) -> bool:
        return self.row in FREE and self.projections == FROZEN

    @property
    def key(self) -> str:
        """Its name among the ranks."""
        if self.is_free:
            return f"{self.task}/{self.row}"
        return f"{self.task}/{self.row}/{self.temperature}/{self.projections}/{self.steps}"


@dataclass(frozen=True)
class Comparison:
    """Row − other in one metric, with its intervals."""

    question: str
    task: str
    row: str
    other: str
    temperature: float
    projections: str
    steps: int
    direction: str
    metric: str
    difference: float
    low: float
    high: float
    """The 95 % interval."""
    low_family: float
    high_family: float
    """The interval of 1 − 0.05 / 6: all six primary comparisons together are wrong in at most 5 %."""
    seeds: int
    queries: int


QUESTIONS: tuple[tuple[str, str, str, str, str], ...] = (
    ("primary", "psi zero", "offset", FROZEN, "text_to_video"),
    ("what an offset gives", "offset", "baseline", FROZEN, "text_to_video"),
    ("video→text", "offset", "baseline", FROZEN, "video_to_text"),
    ("video→text", "psi zero", "baseline", FROZEN, "video_to_text"),
    ("video→text", "psi + losses", "baseline", FROZEN, "video_to_text"),
    ("the start N(0, 0.02)", "psi normal", "psi zero", FROZEN, "text_to_video"),
    ("the start N(0, 0.02)", "psi normal", "offset", FROZEN, "text_to_video"),
    ("the losses", "psi + losses", "psi normal", FROZEN, "text_to_video"),
    ("full GARE", "psi + losses", "baseline", FROZEN, "text_to_video"),
    ("dropout", "psi + losses, dropout 0", "psi + losses", FROZEN, "text_to_video"),
    ("pooling", "text-conditioned", "baseline", FROZEN, "text_to_video"),
    ("pooling", "psi zero", "text-conditioned", FROZEN, "text_to_video"),
    ("pooling", "text-conditioned + psi", "text-conditioned", FROZEN, "text_to_video"),
    ("projections", "baseline", "baseline", TRAINED, "text_to_video"),
    ("projections", "offset", "baseline", TRAINED, "text_to_video"),
    ("projections", "psi zero", "offset", TRAINED, "text_to_video"),
    ("projections", "psi + losses", "baseline", TRAINED, "text_to_video"),
    ("projections, video→text", "offset", "baseline", TRAINED, "video_to_text"),
    ("projections, video→text", "psi zero", "baseline", TRAINED, "video_to_text"),
    ("projections, video→text", "psi + losses", "baseline", TRAINED, "video_to_text"),
    ("hubness: QB-Norm", "baseline", "baseline", FROZEN, "qb_norm"),
    ("hubness: offset after QB-Norm", "offset", "baseline", FROZEN, "qb_norm"),
    ("hubness: psi after QB-Norm", "psi zero", "offset", FROZEN, "qb_norm"),
)
"""(question, row, other, projections, direction). Both rows are rescored in "qb_norm", and both have trained
projections; where row and other are the same, the other is the one without."""


class Results:
    """Ranks by key and direction, and the videos that texts belong to."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise DataError(f"{path} does not exist; run 'decisive.py psi' first")
        with np.load(path) as file:
            self.arrays = {name: file[name] for name in file.files}

    def ranks(self, cell: Cell, direction: str) -> Ranks | None:
        """[S, Q], or None where the cell was not run."""
        return self.arrays.get(f"{cell.key}/{direction}")

    def groups(self, task: str, direction: str) -> npt.NDArray[np.int64]:
        """The video of each query."""
        video_of_text = self.arrays[f"{task}/video_of_text"].astype(np.int64)
        return np.arange(video_of_text.max() + 1) if direction == "video_to_text" else video_of_text


def compare(results: Results, row: Cell, other: Cell, direction: str, other_direction: str) -> list[Any]:
    """(metric, difference, 95 % interval, family interval, seeds, queries) of every metric."""
    ours, theirs = results.ranks(row, direction), results.ranks(other, other_direction)
    if ours is None or theirs is None:
        return []
    group_Q = results.groups(row.task, direction)
    seeds = max(len(ours), len(theirs))
    found = []
    for name, metric in METRICS.items():
        change_SQ = np.broadcast_to(metric(ours) - metric(theirs), (seeds, ours.shape[1]))
        drawn_R = paired_resamples(change_SQ, group_Q)
        ends = [end for tail in (0.05, 0.05 / NUM_PRIMARY) for end in (tail / 2, 1 - tail / 2)]
        low, high, low_family, high_family = np.quantile(drawn_R, ends)
        near, far = (low, high), (low_family, high_family)
        found.append((name, float(change_SQ.mean()), near, far, seeds, ours.shape[1]))
    return found


def paired_resamples(change_SQ: Floats, group_Q: npt.NDArray[np.int64], *, draw: int = 0) -> Floats:
    """Means of the change over queries when videos and seeds are drawn with replacement, [R].

    Another `draw` of videos is for another set of them; the seeds are drawn as before.

    >>> float(paired_resamples(np.ones((2, 4)), np.array([0, 0, 1, 1])).std())
    0.0
    """
    num_groups = int(group_Q.max()) + 1
    sum_SV = np.stack(
        [np.bincount(group_Q, weights=change_Q, minlength=num_groups) for change_Q in change_SQ]
    )
    count_V = np.bincount(group_Q, minlength=num_groups)
    video_RV, seed_RS = _draw(num_groups, 2 * draw), _draw(len(sum_SV), 1) / len(sum_SV)
    means: Floats = ((video_RV @ sum_SV.T) * seed_RS).sum(axis=1) / (video_RV @ count_V)
    return means


@cache
def _draw(number: int, seed: int) -> Floats:
    """How often each of a number of things is in each resample, [R, number]: the same for all comparisons."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(number, np.full(number, 1 / number), size=RESAMPLES).astype(np.float64)


def all_comparisons(results: Results, milestones: tuple[int, ...]) -> list[Comparison]:
    """Every question on every task, at both temperatures, after every number of steps."""
    found = []
    for question, row, other, projections, direction in QUESTIONS:
        is_self = row == other
        for task in TASKS:
            for temperature in TEMPERATURES if projections == FROZEN else TEMPERATURES[:1]:
                for steps in milestones:
                    ours = Cell(task, row, temperature, projections, steps)
                    theirs = Cell(task, other, temperature, FROZEN if is_self else projections, steps)
                    if ours.is_free and theirs.is_free and (steps, temperature) != (milestones[-1], 0.05):
                        continue  # nothing is trained: one comparison is all
                    against = "text_to_video" if is_self else direction
                    name = question
                    if question == "primary" and task not in PRIMARY_TASKS:
                        name = "control: must hold zero"
                    elif question == "primary" and steps != milestones[-1]:
                        name = "shorter runs"
                    for metric, change, near, far, seeds, queries in compare(
                        results, ours, theirs, direction, against
                    ):
                        found.append(
                            Comparison(
                                name,
                                task,
                                row,
                                f"{other}, plain" if is_self else other,
                                temperature,
                                projections,
                                steps,
                                direction,
                                metric,
                                round(change, 3),
                                *(round(float(end), 3) for end in (*near, *far)),
                                seeds,
                                queries,
                            )
                        )
    return found


def level_lines(results: Results, shares: dict[str, Any], cells: list[Cell]) -> list[str]:
    """The level of every cell, and what its increments depend on."""
    lines = [
        "| task | row | τ | projections | steps | R@1 | R@10 | MnR | v→t R@1 | v→t MnR | QB-Norm R@1 "
        "| of variance: text | dropout |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for cell in cells:
        forward, backward = results.ranks(cell, "text_to_video"), results.ranks(cell, "video_to_text")
        if forward is None or backward is None:
            lines.append(f"| {cell.task} | {cell.row} | {' | '.join(_setting(cell))} | not run |")
            continue
        rescored = results.ranks(cell, "qb_norm")
        numbers = [
            _mean_std(METRICS["R@1"](forward)),
            _mean_std(METRICS["R@10"](forward)),
            _mean_std(METRICS["mean rank"](forward)),
            _mean_std(METRICS["R@1"](backward)),
            _mean_std(METRICS["mean rank"](backward)),
            "" if rescored is None else _mean_std(METRICS["R@1"](rescored)),
            *(_percent(shares.get(cell.key, {}).get(name)) for name in ("text", "dropout")),
        ]
        lines.append(f"| {' | '.join([cell.task, cell.row, *_setting(cell), *numbers])} |")
    return lines


def comparison_lines(comparisons: list[Comparison], metric: str) -> list[str]:
    """One metric of every comparison."""
    lines = [
        f"| question | task | row − other | τ | projections | steps | {metric} | 95 % | family-wise |",
        "| --- | --- | --- | ---: | --- | ---: | ---: | --- | --- |",
    ]
    for one in comparisons:
        if one.metric == metric:
            is_family = one.question.startswith(("primary", "control"))
            family = f"[{one.low_family:+.2f}, {one.high_family:+.2f}]" if is_family else ""
            lines.append(
                f"| {one.question} | {one.task} | {one.row} − {one.other} | {one.temperature} "
                f"| {one.projections} | {one.steps} | {one.difference:+.2f} "
                f"| [{one.low:+.2f}, {one.high:+.2f}] | {family} |"
            )
    return lines


def verdict(comparisons: list[Comparison], last: int) -> list[str]:
    """What the primary comparisons say, by the rule written down before: the family-wise interval decides."""
    lines = []
    for one in comparisons:
        if (one.question, one.metric, one.steps) == ("primary", "R@1", last):
            is_up, is_down = one.low_family > 0, one.high_family < 0
            word = (
                "psi beats the offset"
                if is_up
                else "psi loses to it"
                if is_down
                else "no difference beyond chance"
            )
            lines.append(
                f"- {one.task}, τ {one.temperature}: {word} ({one.difference:+.2f} points of R@1, "
                f"[{one.low_family:+.2f}, {one.high_family:+.2f}])"
            )
    missing = NUM_PRIMARY - len(lines)
    return [*lines, *([f"- {missing} of {NUM_PRIMARY} primary comparisons were not run"] if missing else [])]


def write_table(folder: Path) -> str:
    """From ranks.npz and shares.json in a folder: table.json and table.md beside them."""
    results = Results(folder / "ranks.npz")
    shares = json.loads((folder / "shares.json").read_text(encoding="utf-8"))
    run = shares["run"]
    milestones = tuple(run["milestones"])
    cells = [Cell(**values) for values in run["cells"]]
    comparisons = all_comparisons(results, milestones)
    settings = {key: value for key, value in run.items() if key != "cells"}
    text = "\n".join(
        [
            "# The decisive experiment: what came out",
            "",
            "Made by `experiments/decisive.py table`; `experiments/decisive.md` is the protocol.",
            f"Run: {json.dumps(settings)}",
            "",
            f"## Primary: psi − offset after {milestones[-1]:,} steps",
            "",
            *verdict(comparisons, milestones[-1]),
            "",
            "## Differences, R@1 in points",
            "",
            *comparison_lines(comparisons, "R@1"),
            "",
            "## Differences, mean rank (lower is better)",
            "",
            *comparison_lines(comparisons, "mean rank"),
            "",
            "## Levels, mean ± sd over seeds",
            "",
            *level_lines(results, shares, cells),
            "",
        ]
    )
    with replacing(folder / "table.md") as part:
        part.write_text(text, encoding="utf-8")
    with replacing(folder / "table.json") as part:
        part.write_text(json.dumps([asdict(one) for one in comparisons], indent=0) + "\n", encoding="utf-8")
    return text


def _setting(cell: Cell) -> list[str]:
    return ["–", FROZEN, "–"] if cell.is_free else [str(cell.temperature), cell.projections, str(cell.steps)]


def _mean_std(value_SQ: Floats) -> str:
    mean_S = value_SQ.mean(axis=1)
    return f"{mean_S.mean():.1f}" + (f" ± {mean_S.std(ddof=1):.1f}" if len(mean_S) > 1 else "")


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f} %"
