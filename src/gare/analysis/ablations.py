"""Tables of `gare ablate`, read back for a picture."""

from __future__ import annotations

import json
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
    """The number in the row's name (alpha 0.5 → 0.5), if every row has one."""
    mean: float
    std: float | None
    low: float
    high: float
    p_value: float | None
    """Against the first row."""
    seeds: int


@dataclass(frozen=True)
class AblationFigure:
    """A table in the order to be drawn: by value if there is one. `reference` is its first row."""

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
    if all(point.value is not None for point in figure.points):
        ordered = sorted(figure.points, key=lambda point: point.value or 0.0)
        return AblationFigure(figure.title, figure.provenance, figure.reference, ordered)
    return figure


def row_values(names: list[str]) -> list[float | None]:
    """The number each name ends with, if all names are the same but for it.

    >>> row_values(["alpha 2", "alpha 0.5"]), row_values(["full", "no KL"])
    ([2.0, 0.5], [None, None])
    """
    found = [re.fullmatch(r"(.*?)\s*(-?\d+(?:\.\d+)?)", name) for name in names]
    if all(found) and len({match[1] for match in found if match}) == 1:
        return [float(match[2]) for match in found if match]
    return [None] * len(names)
