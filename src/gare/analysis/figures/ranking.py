"""Pictures of rankings and of cost."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from gare.analysis.figures.histogram import Columns, legend_above
from gare.analysis.figures.text import number, percent
from gare.analysis.figures.thumbnails import example_picture, suspect_picture
from gare.analysis.store import Numbers
from gare.analysis.style import BLUE, COLUMN, GREEN, GREY, ORANGE, PURPLE, SKY, Picture


def draw_coverage(numbers: Numbers) -> list[Picture]:
    curves = numbers.values["curves"]
    found = "; ".join(
        f"{curve['gallery']} videos: {_deepest(curve)}, 99 % needs k = {curve['needed_for_99'] or 'all'}"
        for curve in curves
    )
    caption = (
        "How much of GARE's top 10 lies within the first k by the plain cosine of text and mean frame "
        f"vector, over random galleries of the split. {found}. (`gare audit` measures the first stage a "
        "library really uses.)"
    )
    return [Picture("coverage", caption, partial(_coverage, numbers=numbers))]


def _deepest(curve: dict[str, Any]) -> str:
    """At the usual k, or a smaller one for a gallery that has not so many."""
    k = 50 if curve["at_50"] is not None else 10
    return f"{percent(curve[f'at_{k}'])} at k = {k}"


def _coverage(figure: Any, numbers: Numbers) -> None:
    axes = figure.subplots()
    table = numbers.tables["curves"]
    for curve, colour in zip(reversed(numbers.values["curves"]), (BLUE, ORANGE, GREEN, PURPLE), strict=False):
        points = [
            (k, share)
            for size, k, share in zip(table["gallery"], table["k"], table["coverage"], strict=True)
            if size == curve["gallery"]
        ]
        axes.plot(*zip(*points, strict=True), color=colour, label=f"{curve['gallery']} videos")
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("candidates k of the plain cosine")
    axes.set_ylabel("share of the top 10 found")
    axes.legend(loc="lower right")


def draw_hard_negatives(numbers: Numbers, thumbnails: Path) -> list[Picture]:
    values, margin = numbers.values, numbers.values["margin"]
    pictures = [
        Picture(
            "hard-negatives-margins",
            f"Margin of the own video over the best of the {values['num_neighbours']} videos with the "
            f"closest captions, one point a text: {number(margin['second'])} without and "
            f"{number(margin['first'])} with the increment on average. The own video is ahead for "
            f"{percent(values['ahead_before'])} of the texts without and {percent(values['ahead_after'])} "
            "with it.",
            partial(_margins, margins=numbers.tables["margins"]),
        )
    ]
    if len(values["examples"]) > 1:
        pictures.append(example_picture(values["examples"], thumbnails))
    if values["num_suspects"]:
        pictures.append(suspect_picture(numbers, thumbnails))
    return pictures


def _margins(figure: Any, margins: Columns) -> None:
    axes = figure.subplots()
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.axvline(0, color=GREY, linewidth=0.8)
    axes.scatter(margins["margin_before"], margins["margin_after"], s=6, color=BLUE, alpha=0.5, linewidths=0)
    axes.set_xlabel("margin without Δ")
    axes.set_ylabel("margin with Δ")


def draw_efficiency(numbers: Numbers) -> list[Picture]:
    rows = numbers.values["paper"]
    parts = "; ".join(
        f"{row['module']} {number(row['gmac'], 2)} GMAC = {number(row['gflop'], 2)} GFLOP, paper "
        f"{number(row['paper'], 2)}"
        for row in rows
    )
    caption = (
        "Operations of the paper's model (CLIP ViT-B/32) for a batch of 128 texts and 128 videos of 12 "
        f"frames: {parts}. The paper's temporal and psi numbers are FLOPs, its text number is MACs, and its "
        "visual number is neither: it is exactly 7.60 for each of the 1,536 frames."
    )
    return [Picture("efficiency-flops", caption, partial(_flops, values=numbers.values), (COLUMN, 2.3))]


def _flops(figure: Any, values: dict[str, Any]) -> None:
    axes = figure.subplots()
    rows = values["paper"]
    for shift, name, label, colour in (
        (-0.27, "gmac", "MACs", SKY),
        (0.0, "gflop", "FLOPs", BLUE),
        (0.27, "paper", "the paper's number", ORANGE),
    ):
        places = [place + shift for place in range(len(rows))]
        axes.barh(places, [row[name] for row in rows], 0.25, color=colour, label=label)
    axes.set_yticks(range(len(rows)), [row["module"] for row in rows])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel(f"10⁹ operations, batch {values['batch']} × {values['frames']}")
    legend_above(axes, columns=3)
    axes.grid(axis="y", visible=False)
