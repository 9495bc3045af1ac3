"""Tables of `gare ablate`, read back and drawn."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gare.analysis.numbers import Numbers, file_fingerprint
from gare.analysis.presentation import BLUE, COLUMN, ORANGE, Picture, number
from gare.analysis.probe import Probe, with_ablations
from gare.analysis.study import Study
from gare.errors import EvaluationError

TABLE_FILE = "table.json"


class AblationsProbe(Probe):
    """R@1 of every row of an ablation table."""

    title = "Ablations"
    intro = "Tables of `gare ablate`."
    needs = (with_ablations,)

    def depends_on(self, study: Study) -> Sequence[object]:
        return [file_fingerprint(folder, TABLE_FILE) for folder in study.ablations]

    def measure(self, study: Study) -> Numbers:
        """The rows of each table, in the order to be drawn."""
        return Numbers.of({"figures": [read_ablation(folder) for folder in study.ablations]})

    def figures(self, numbers: Numbers, study: Study) -> Sequence[Picture]:
        return [
            ablation_picture(table, place) for place, table in enumerate(numbers.values["figures"], start=1)
        ]


# Numbers


@dataclass(frozen=True)
class AblationPoint:
    """One row of a table: R@1 text→video as fractions."""

    name: str
    value: float | None
    """The number in the row's name (alpha 0.5 → 0.5), if it is named like the first row."""
    mean: float
    std: float | None
    low: float
    high: float
    p_value: float | None
    """Against the first row."""
    seeds: int


@dataclass(frozen=True)
class AblationFigure:
    """A table in the order to be drawn: by value, then rows without one. `reference` is its first row."""

    title: str
    provenance: str
    reference: str
    points: list[AblationPoint]


def read_ablation(folder: Path) -> AblationFigure:
    """The numbers `gare ablate --out FOLDER` left in table.json."""
    path = folder / TABLE_FILE if folder.is_dir() else folder
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        rows: list[dict[str, Any]] = table["rows"]
        names = [row["name"] for row in rows]
        values = row_values(names)
        points = [
            AblationPoint(
                row["name"],
                value,
                row["text_to_video"]["recall_at_1"]["mean"],
                row["text_to_video"]["recall_at_1"]["sd"],
                row["text_to_video"]["recall_at_1"]["low"],
                row["text_to_video"]["recall_at_1"]["high"],
                row["text_to_video"]["recall_at_1"]["p_value"],
                len(row["seeds"]),
            )
            for row, value in zip(rows, values, strict=True)
        ]
        figure = AblationFigure(table["title"], table["provenance"], names[0], points)
    except FileNotFoundError:
        raise EvaluationError(
            f"{folder} has no {TABLE_FILE}; --ablation takes the --out folder of 'gare ablate'"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise EvaluationError(f"{path} is not a table of 'gare ablate' ({error}); run it again") from None
    ordered = sorted(figure.points, key=lambda point: math.inf if point.value is None else point.value)
    return AblationFigure(figure.title, figure.provenance, figure.reference, ordered)


def row_values(names: list[str]) -> list[float | None]:
    """The number each name ends with, for those that are the same as the first but for it.

    >>> row_values(["sigma 2", "sigma 0.5", "unit, sigma 1"]), row_values(["full", "no KL"])
    ([2.0, 0.5, None], [None, None])
    """
    found = [re.fullmatch(r"(.*?)\s*(-?\d+(?:\.\d+)?)", name) for name in names]
    stem = found[0][1] if found and found[0] else None
    return [float(match[2]) if match and match[1] == stem else None for match in found]


# Figures


def ablation_picture(table: dict[str, Any], place: int = 1) -> Picture:
    """R@1 of each row with its interval; the reference row is a dashed line."""
    return Picture(
        f"ablation-{place}",
        f"{table['title']}: R@1 text→video, percent: {_rows(table)}. {table['provenance']} Bars are the "
        f"95 % interval; the dashed line is “{table['reference']}”, and p is against it.",
        partial(_ablation, table=table),
        (COLUMN, 0.8 + 0.24 * len(table["points"])),
    )


def _rows(table: dict[str, Any]) -> str:
    def row(point: dict[str, Any]) -> str:
        sure = "" if point["p_value"] is None else f" (p = {number(point['p_value'])})"
        return f"{point['name']} {number(100 * point['mean'], 1)}{sure}"

    return "; ".join(map(row, table["points"]))


def _ablation(figure: Any, table: dict[str, Any]) -> None:
    axes = figure.subplots()
    points = table["points"]
    for place, point in enumerate(points):
        is_reference = point["name"] == table["reference"]
        colour = ORANGE if is_reference else BLUE
        axes.plot([100 * point["low"], 100 * point["high"]], [place, place], color=colour, linewidth=1.5)
        axes.plot(100 * point["mean"], place, "o", color=colour, markersize=4.5)
        axes.annotate(
            f"{100 * point['mean']:.1f}",
            (100 * point["mean"], place),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            fontsize=7,
        )
        if is_reference:
            axes.axvline(100 * point["mean"], color=ORANGE, linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(points)), [point["name"] for point in points], parse_math=False)
    axes.set_ylim(len(points) - 0.5, -0.9)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("R@1 (%)")
