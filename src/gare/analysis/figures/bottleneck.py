"""Pictures of the information bottleneck."""

from __future__ import annotations

from functools import partial
from typing import Any

from gare.analysis.figures.histogram import Columns, legend_above
from gare.analysis.figures.text import number, percent
from gare.analysis.store import Numbers
from gare.analysis.style import BLACK, BLUE, COLUMN, GREEN, ORANGE, Picture

FLOOR = 1e-12


def draw_bottleneck(numbers: Numbers) -> list[Picture]:
    values, kl = numbers.values, numbers.values["kl"]
    return [
        Picture(
            "bottleneck-spectra",
            "Left: μ and σ of the increments of a video over the texts, dimensions sorted (root mean square "
            "over videos). Right: eigenvalues of their covariance. The increments use "
            f"{number(values['effective_dimension'], 1)} of {values['dimension']} dimensions (participation "
            f"ratio), and {number(values['effective_dimension_within'], 1)} where only the text changes; "
            f"the text accounts for {percent(values['share_within'])} of their variance. Δ tells at least "
            f"{number(values['bits']['increment'])} bits about whether a pair matches (1 bit is "
            f"everything), the part Δ − μ that the text decides {number(values['bits']['text_part'])}, the "
            f"length of Δ alone {number(values['bits']['radius'])}.",
            partial(_spectra, spectra=numbers.tables["spectra"]),
            (COLUMN, 2.0),
        ),
        Picture(
            "bottleneck-kl",
            "KL divergence of each video's increments from the prior N(0, 1), nats a dimension: mean "
            f"{number(kl['mean'])}, 90 % of the videos within {number(kl['low'])} to {number(kl['high'])}. "
            f"On average |μ| is {number(values['mean_abs'])} and σ is {number(values['std_mean'])}.",
            partial(_kl, videos=numbers.tables["videos"]),
        ),
    ]


def _spectra(figure: Any, spectra: Columns) -> None:
    left, right = figure.subplots(1, 2)
    ranks = range(1, len(spectra["mu"]) + 1)
    for name, label, colour in (("mu", "μ", BLUE), ("sigma", "σ", ORANGE)):
        left.plot(ranks, [max(x, FLOOR) for x in spectra[name]], color=colour, label=label)
    left.set_ylabel("root mean square")
    total = sum(spectra["eigenvalue"]) or 1.0
    series = (("eigenvalue", "all", BLACK, "-"), ("eigenvalue_within", "of the text", GREEN, "--"))
    for name, label, colour, line in series:
        right.plot(ranks, [max(x / total, FLOOR) for x in spectra[name]], line, color=colour, label=label)
    right.set_ylabel("share of variance")
    right.set_ylim(bottom=1e-8)
    for axes in (left, right):
        axes.set_yscale("log")
        axes.set_xscale("log")
        axes.set_xlabel("rank")
        legend_above(axes)


def _kl(figure: Any, videos: Columns) -> None:
    axes = figure.subplots()
    axes.scatter(videos["radius"], videos["kl"], s=6, color=BLUE, alpha=0.5, linewidths=0)
    axes.set_xlabel("mean length of Δ of the video")
    axes.set_ylabel("KL (nats a dimension)")
