"""Pictures of all pairs of a split: scores, lengths, distances, angles."""

from __future__ import annotations

from functools import partial
from typing import Any

from gare.analysis.figures.histogram import Series, draw_histogram
from gare.analysis.figures.text import number, percent
from gare.analysis.store import Numbers
from gare.analysis.style import GREY, NEGATIVE, POSITIVE, Picture


def draw_geometry(numbers: Numbers) -> list[Picture]:
    values = numbers.values
    label = values.get("baseline_label")
    series: Series = {
        "cosine": ("matching, this model", POSITIVE, "-"),
        "negative cosine": ("others, this model", NEGATIVE, "-"),
        "baseline cosine": ("matching, compared", POSITIVE, ":"),
        "baseline negative cosine": ("others, compared", NEGATIVE, ":"),
    }
    draw = partial(draw_histogram, table=numbers.tables["cosine"], series=series, axis="score")
    pictures = [Picture("geometry-cosine", _cosine_caption(values, label), draw)]
    if "norm" in values:
        own = "t" if values["side"] == "text" else "v"
        after = "|t + Δ − v|" if own == "t" else "|t − v − Δ|"
        pictures += [
            _before_and_after(numbers, "norm", f"|{own}|", f"|{own} + Δ|", ("own_norm", "shifted_norm")),
            _before_and_after(numbers, "distance", "|t − v|", after, ("distance", "shifted_distance")),
            _angles(numbers, own),
        ]
    return pictures


def _cosine_caption(values: dict[str, Any], label: str | None) -> str:
    pairs = values["pairs"]["cosine"]
    if "cosine" not in values:
        return (
            f"Cosine of matching pairs {number(pairs['positive']['mean'])} on average, of other pairs "
            f"{number(pairs['negative']['mean'])}."
        )
    positive, negative = values["cosine"]["positive"], values["cosine"]["negative"]
    return (
        f"Cosine of matching pairs: {number(positive['first'])} here, {number(positive['second'])} for the "
        f"{label} (dotted); higher here for {percent(positive['first_is_larger'], 0)} of the pairs. Other "
        f"pairs: {number(negative['first'])} and {number(negative['second'])}."
    )


def _before_and_after(
    numbers: Numbers, name: str, before: str, after: str, fields: tuple[str, str]
) -> Picture:
    positive, negative = numbers.values[name]["positive"], numbers.values[name]["negative"]
    series: Series = {
        f"{fields[0]}/positive": (f"{before}, matching", POSITIVE, ":"),
        f"{fields[0]}/negative": (f"{before}, others", NEGATIVE, ":"),
        f"{fields[1]}/positive": (f"{after}, matching", POSITIVE, "-"),
        f"{fields[1]}/negative": (f"{after}, others", NEGATIVE, "-"),
    }
    axis = "length" if name == "norm" else "distance"
    return Picture(
        f"geometry-{name}",
        f"{before} and {after}: matching pairs {number(positive['second'], 2)} and "
        f"{number(positive['first'], 2)} on average (larger with Δ for "
        f"{percent(positive['first_is_larger'], 0)}), other pairs {number(negative['second'], 2)} and "
        f"{number(negative['first'], 2)} ({percent(negative['first_is_larger'], 0)}).",
        partial(draw_histogram, table=numbers.tables[name], series=series, axis=axis),
    )


def _angles(numbers: Numbers, own: str) -> Picture:
    gap, to_own = numbers.values["pairs"]["angle_to_gap"], numbers.values["pairs"]["angle_to_own"]
    series: Series = {
        "angle_to_gap/positive": ("to the gap, matching", POSITIVE, "-"),
        "angle_to_gap/negative": ("to the gap, others", NEGATIVE, "-"),
        "angle_to_own/positive": (f"to {own}, matching", POSITIVE, ":"),
        "angle_to_own/negative": (f"to {own}, others", NEGATIVE, ":"),
    }

    def draw(figure: Any) -> None:
        draw_histogram(figure, numbers.tables["angle"], series, "angle of Δ (degrees)")
        figure.axes[0].axvline(90, color=GREY, linewidth=0.8)

    return Picture(
        "geometry-angle",
        f"Angle between Δ and the gap: {number(gap['positive']['mean'], 1)}° for matching pairs, "
        f"{number(gap['negative']['mean'], 1)}° for others; above 90° (line) the increment leads away from "
        f"the {'video' if own == 't' else 'text'}. Angle between Δ and {own}: "
        f"{number(to_own['positive']['mean'], 1)}° and {number(to_own['negative']['mean'], 1)}°.",
        draw,
    )
