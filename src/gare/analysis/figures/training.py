"""Pictures of what `gare train --probe` recorded, and of ablation tables."""

from __future__ import annotations

from functools import partial
from typing import Any

from gare.analysis.figures.histogram import Columns, Series, draw_curves, legend_above
from gare.analysis.figures.text import number
from gare.analysis.store import Numbers
from gare.analysis.style import BLACK, BLUE, COLUMN, GREEN, GREY, NEGATIVE, ORANGE, POSITIVE, SKY, Picture

TERMS = {"contrastive": BLACK, "kl": BLUE, "radius": ORANGE, "direction": GREEN, "teacher": SKY}


def draw_dynamics(numbers: Numbers) -> list[Picture]:
    values, records = numbers.values, numbers.tables["records"]
    pictures = _increment_pictures(values, records) if "radius/positive" in records else []
    terms = [name for name in TERMS if f"term/{name}" in records]
    shown = ", ".join(f"{name} {_path(values, f'term/{name}', 3)}" for name in terms)
    pictures.append(
        Picture(
            "dynamics-terms",
            f"Terms of the loss before their weights, start → end: {shown}.",
            partial(_terms, records=records, terms=terms),
            (COLUMN, 2.6 if len(terms) > 2 else 1.5),
        )
    )
    pictures.append(
        Picture(
            "dynamics-tension",
            "How much of the pull of InfoNCE on a text survives cancellation, |sum| / (|positive| + "
            f"|negative|), mean over the batch: {_path(values, 'cancellation', 3)}.",
            partial(_curves, records=records, series={"cancellation": ("", BLACK, "-")}, label="ratio"),
            (COLUMN, 1.7),
        )
    )
    return pictures


def _path(values: dict[str, Any], name: str, digits: int = 2) -> str:
    curve = values.get(name) or {}
    return f"{number(curve.get('start'), digits)} → {number(curve.get('end'), digits)}"


def _increment_pictures(values: dict[str, Any], records: Columns) -> list[Picture]:
    path = partial(_path, values)
    own, gap, after = ("t", "v − t", "|t + Δ − v|")
    if values["side"] == "video":
        own, gap, after = ("v", "t − v", "|t − v − Δ|")
    lengths: Series = {
        "radius/positive": ("|Δ|, matching", POSITIVE, "-"),
        "radius/negative": ("|Δ|, others", NEGATIVE, "-"),
        "own_norm/positive": (f"|{own}|", GREY, "-"),
        "shifted_norm/positive": (f"|{own} + Δ|, matching", SKY, "--"),
        "shifted_norm/negative": (f"|{own} + Δ|, others", ORANGE, ":"),
    }
    distances: Series = {
        "distance/positive": ("|t − v|, matching", POSITIVE, ":"),
        "distance/negative": ("|t − v|, others", NEGATIVE, ":"),
        "shifted_distance/positive": (f"{after}, matching", POSITIVE, "-"),
        "shifted_distance/negative": (f"{after}, others", NEGATIVE, "-"),
    }
    return [
        Picture(
            "dynamics-angles",
            f"Angle between Δ and the gap {gap}: {path('angle_to_gap/positive', 1)} degrees for matching "
            f"pairs, {path('angle_to_gap/negative', 1)} for others. Angle between Δ and {own} (dashed): "
            f"{path('angle_to_own/positive', 1)} and {path('angle_to_own/negative', 1)}.",
            partial(_angles, records=records, own=own),
            (COLUMN, 2.4),
        ),
        Picture(
            "dynamics-norms",
            f"Lengths during training. |Δ|: {path('radius/positive')} for matching pairs, "
            f"{path('radius/negative')} for others; |{own}|: {path('own_norm/positive')}; |{own} + Δ|: "
            f"{path('shifted_norm/positive')} and {path('shifted_norm/negative')}.",
            partial(_curves, records=records, series=lengths, label="length"),
            (COLUMN, 2.4),
        ),
        Picture(
            "dynamics-radii",
            "Spread of the radii: standard deviation of |Δ| over the videos of a text, mean over the texts "
            f"of a batch: {path('radius_std', 4)}. The radius term of the loss rewards a wide one.",
            partial(_curves, records=records, series={"radius_std": ("", BLACK, "-")}, label="spread of |Δ|"),
            (COLUMN, 1.7),
        ),
        Picture(
            "dynamics-distances",
            f"Distance of a pair before and after the increment: |t − v| {path('distance/positive')}, "
            f"{after} {path('shifted_distance/positive')} for matching pairs; {path('distance/negative')} "
            f"and {path('shifted_distance/negative')} for others.",
            partial(_curves, records=records, series=distances, label="distance"),
        ),
    ]


def _curves(figure: Any, records: Columns, series: Series, label: str) -> None:
    axes = figure.subplots()
    draw_curves(axes, records, series)
    axes.set_ylabel(label)
    if len(series) > 1:
        legend_above(axes)


def _angles(figure: Any, records: Columns, own: str) -> None:
    series: Series = {
        "angle_to_gap/positive": ("to the gap, matching", POSITIVE, "-"),
        "angle_to_gap/negative": ("to the gap, others", NEGATIVE, "-"),
        "angle_to_own/positive": (f"to {own}, matching", POSITIVE, "--"),
        "angle_to_own/negative": (f"to {own}, others", NEGATIVE, "--"),
    }
    _curves(figure, records, series, "angle of Δ (degrees)")
    figure.axes[0].axhline(90, color=GREY, linewidth=0.8)


def _terms(figure: Any, records: Columns, terms: list[str]) -> None:
    rows = 2 if len(terms) > 2 else 1
    grid = figure.subplots(rows, (len(terms) + rows - 1) // rows, squeeze=False).flatten()
    for axes, name in zip(grid, terms, strict=False):
        draw_curves(axes, records, {f"term/{name}": (name, TERMS[name], "-")})
        axes.set_title(name)
        axes.set_xlabel("step" if axes in grid[-2:] else "")


def draw_ablations(numbers: Numbers) -> list[Picture]:
    return [
        Picture(
            f"ablation-{place}",
            f"{table['title']}: R@1 text→video, percent: {_rows(table)}. {table['provenance']} Bars are the "
            f"95 % interval; the dashed line is “{table['reference']}”, and p is against it.",
            partial(_ablation, table=table),
            (COLUMN, 0.8 + 0.24 * len(table["points"])),
        )
        for place, table in enumerate(numbers.values["figures"], start=1)
    ]


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
