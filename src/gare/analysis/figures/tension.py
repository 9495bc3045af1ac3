"""Pictures of the pulls on a text."""

from __future__ import annotations

from functools import partial
from typing import Any

from gare.analysis.figures.histogram import legend_above
from gare.analysis.figures.text import number, spread
from gare.analysis.store import Numbers
from gare.analysis.style import BASELINE, BLACK, BLUE, COLUMN, NEGATIVE, POSITIVE, Picture

TEXT = {"positive": "positive pair", "negative": "negative pairs", "sum": "sum"}
DELTA = {"delta_positive": "on Δ of matching pairs", "delta_negative": "on Δ of other pairs"}


def draw_tension(numbers: Numbers) -> list[Picture]:
    pictures = []
    for role, found in numbers.values.items():
        table = numbers.tables[role]
        draw = partial(_dimensions, table=table, labels=TEXT, by="positive")
        pictures.append(Picture(f"tension-text-{role}", _text_caption(found), draw, (COLUMN, 2.9)))
        if found["label"] == "GARE":
            draw = partial(_dimensions, table=table, labels=DELTA, by="delta_positive")
            pictures.append(Picture("tension-delta", _delta_caption(found), draw, (COLUMN, 2.9)))
    ratios = " ".join(
        f"{found['label']}: {number(found['cancellation']['median'])} (text→video half of the loss alone: "
        f"{number(found['cancellation_one_way']['median'])})."
        for found in numbers.values.values()
    )
    pictures.append(
        Picture(
            "tension-ratio",
            "How much of the pull on a text survives: |sum| / (|positive| + |negative|), median and the "
            f"middle 90 % of texts. 0 means the pulls cancel, 1 that they agree. {ratios}",
            partial(_ratios, values=numbers.values),
            (COLUMN, 0.55 + 0.42 * len(numbers.values)),
        )
    )
    return pictures


def _text_caption(found: dict[str, Any]) -> str:
    return (
        f"Gradient of InfoNCE on t_i, dimension by dimension ({found['label']}): mean and variance over "
        f"{found['batch_size'] * found['num_batches']} texts in batches of {found['batch_size']}, "
        "dimensions sorted by the pull of the positive pair. The pull of the positive pair (mean length "
        f"{number(found['positive_norm'], 4)}) and that of the negatives "
        f"({number(found['negative_norm'], 4)}) have a cosine of {spread(found['opposition'])}. What is "
        f"left has length {number(found['sum_norm'], 4)}; |sum| / (|positive| + |negative|) is "
        f"{spread(found['cancellation'])} for single texts, and {number(found['common_cancellation'])} for "
        "the mean pulls that are drawn."
    )


def _delta_caption(found: dict[str, Any]) -> str:
    return (
        "Gradient of InfoNCE on the increments themselves, mean and variance over pairs. A matching pair "
        f"receives a gradient of mean length {number(found['delta_norm_positive'], 5)}, another pair "
        f"{number(found['delta_norm_negative'], 5)}: the two no longer share one vector, so they need not "
        f"cancel. Closed form and autograd differ by at most {_power(found['autograd_difference'])} of "
        "the largest gradient."
    )


def _power(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.0e}".replace("-", "−")


def _dimensions(figure: Any, table: dict[str, list[Any]], labels: dict[str, str], by: str) -> None:
    colours = dict(zip(labels, (POSITIVE, NEGATIVE, BLACK), strict=False))
    order = sorted(range(len(table["dimension"])), key=lambda d: table[f"{by}_mean"][d])
    mean, variance = figure.subplots(2, 1, sharex=True)
    for name, label in labels.items():
        mean.plot([table[f"{name}_mean"][d] for d in order], color=colours[name], linewidth=0.8, label=label)
        variance.plot([table[f"{name}_variance"][d] for d in order], color=colours[name], linewidth=0.8)
    mean.set_ylabel("mean")
    variance.set_ylabel("variance")
    variance.set_yscale("log")
    variance.yaxis.set_minor_formatter("")
    variance.set_xlabel("dimension (sorted)")
    legend_above(mean, columns=len(labels))


def _ratios(figure: Any, values: dict[str, Any]) -> None:
    axes = figure.subplots()
    rows = list(reversed(values.items()))
    for place, (role, found) in enumerate(rows):
        ratio = found["cancellation"]
        colour = BASELINE if role == "baseline" else BLUE
        axes.plot([ratio["low"], ratio["high"]], [place, place], color=colour, linewidth=2)
        axes.plot(ratio["median"], place, "o", color=colour, markersize=5)
        axes.annotate(
            number(ratio["median"]),
            (ratio["median"], place),
            xytext=(0, 5),
            textcoords="offset points",
            ha="center",
            fontsize=7,
        )
    axes.set_yticks(range(len(rows)), [found["label"].replace(" without", "\nwithout") for _, found in rows])
    axes.set_ylim(-0.5, len(rows) - 0.4)
    axes.set_xlim(0, 1)
    axes.set_xlabel("|sum| / (|positive| + |negative|)")
