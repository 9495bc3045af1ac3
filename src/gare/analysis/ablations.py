"""Tables of `gare ablate`, read back for a picture."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gare.errors import EvaluationError

TABLE_FILE = "table.json"


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
