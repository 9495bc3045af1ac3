"""How much of a full ranking a cheap first stage keeps. Shapes: T texts, V videos, K best videos."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gare.analysis.numbers import Numbers
from gare.analysis.pairs import unit
from gare.analysis.presentation import BLUE, GREEN, ORANGE, PURPLE, Picture, Table, percent
from gare.analysis.probe import Probe, with_increments
from gare.analysis.study import Study
from gare.evaluate.rank_metrics import ranks_of_targets

TOP = 10


class CoverageProbe(Probe):
    """How much of the full ranking a first stage without increments keeps."""

    title = "Coverage of a first stage"
    intro = (
        "Large galleries are searched in two stages. This is what a first stage that knows nothing of "
        "increments would lose."
    )
    needs = (with_increments,)

    def measure(self, study: Study) -> Numbers:
        """GARE's top 10 within the first k by the cosine of text and mean frame, for several galleries."""
        subject, size = study.subject, len(study.subject.video)
        plain_TV = unit(subject.text.text_TD) @ unit(subject.video_mean_VD).mT
        sizes = sorted({max(min(size, 20), size // part) for part in (1, 2, 4, 8)})
        curves = gallery_coverage(
            plain_TV, subject.geometry.cosine, sizes, draws=5, generator=torch.Generator().manual_seed(0)
        )
        table: dict[str, Any] = {
            "gallery": [curve.gallery for curve in curves for _ in curve.k],
            "k": [k for curve in curves for k in curve.k],
            "coverage": [share for curve in curves for share in curve.coverage],
        }
        summary = [
            {
                "gallery": curve.gallery,
                "needed_for_99": curve.needed_for_99,
                **{f"at_{k}": curve.coverage[k - 1] if k <= curve.gallery else None for k in (10, 50, 100)},
            }
            for curve in curves
        ]
        return Numbers.of({"curves": summary}, {"curves": table})

    def figures(self, numbers: Numbers, study: Study) -> Sequence[Picture]:
        found = "; ".join(
            f"{curve['gallery']} videos: {_deepest(curve)}, 99 % needs k = {curve['needed_for_99'] or 'all'}"
            for curve in numbers.values["curves"]
        )
        caption = (
            "How much of GARE's top 10 lies within the first k by the plain cosine of text and mean frame "
            f"vector, over random galleries of the split. {found}. (`gare audit` measures the first stage a "
            "library really uses.)"
        )
        return (Picture("coverage", caption, partial(_coverage, numbers=numbers)),)

    def tables(self, numbers: Numbers) -> Sequence[Table]:
        rows = [
            [
                f"{curve['gallery']} videos",
                *("–" if curve[f"at_{k}"] is None else percent(curve[f"at_{k}"]) for k in (10, 50, 100)),
                str(curve["needed_for_99"] or "all"),
            ]
            for curve in numbers.values["curves"]
        ]
        header = ["gallery", "k = 10", "k = 50", "k = 100", "k for 99 %"]
        return (Table("Share of GARE's top 10 among k candidates", header, rows),)


# Numbers


@dataclass(frozen=True)
class CoverageCurve:
    """For one gallery size: the share of the full top 10 among the first k of the first stage."""

    gallery: int
    k: list[int]
    coverage: list[float]
    needed_for_99: int | None
    """Smallest k that keeps 99 % of the full top 10."""


def depths_of_top(plain_TV: Tensor, full_TV: Tensor, top: int = TOP) -> Tensor:
    """The first-stage rank (from 1) of each of the `top` best videos of the full ranking, [T, top].

    >>> plain, full = torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[1.0, 2.0, 3.0]])
    >>> depths_of_top(plain, full, top=2)
    tensor([[3, 2]])
    """
    best_TK = full_TV.topk(min(top, full_TV.shape[1]), dim=1).indices
    return torch.stack([ranks_of_targets(plain_TV, best_T) for best_T in best_TK.T.contiguous()], dim=1)


def coverage_curve(depth_TK: Tensor, gallery: int) -> CoverageCurve:
    """The share of depths within k, for every k."""
    ks = torch.arange(1, gallery + 1)
    within = torch.bincount(depth_TK.flatten(), minlength=gallery + 1)[1 : gallery + 1].cumsum(0)
    coverage = within.double() / depth_TK.numel()
    enough = (coverage >= 0.99).nonzero()
    return CoverageCurve(
        gallery, ks.tolist(), coverage.tolist(), int(ks[enough[0, 0]]) if len(enough) else None
    )


def gallery_coverage(
    plain_TV: Tensor, full_TV: Tensor, sizes: Sequence[int], *, draws: int, generator: torch.Generator
) -> list[CoverageCurve]:
    """Curves over random galleries of each size; every text is asked, whether its own video is in or not."""
    curves = []
    for size in sizes:
        depths = []
        for _ in range(1 if size == plain_TV.shape[1] else draws):
            chosen = torch.randperm(plain_TV.shape[1], generator=generator)[:size]
            depths.append(depths_of_top(plain_TV[:, chosen], full_TV[:, chosen]))
        curves.append(coverage_curve(torch.cat(depths), size))
    return curves


# Figures


def _deepest(curve: dict[str, Any]) -> str:
    """The coverage at the usual k, or at a smaller one for a small gallery."""
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
