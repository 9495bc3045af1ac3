"""Curves of stored histograms and of records over steps, drawn the same way everywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gare.analysis.dynamics import smooth

Columns = Mapping[str, list[Any]]
Series = Mapping[str, tuple[str, str, str]]
"""The column of each line: its label, colour and line style."""


def draw_histogram(figure: Any, table: Columns, series: Series, axis: str) -> None:
    """Outlines over shared bins; those with a full line are filled."""
    axes = figure.subplots()
    left, width = table["edge"], table["width"][0]
    edges = [*left, left[-1] + width]
    for column, (label, colour, line) in series.items():
        if column in table:
            axes.stairs(table[column], edges, color=colour, linestyle=line, label=label, linewidth=1.2)
            if line == "-":
                axes.stairs(table[column], edges, color=colour, fill=True, alpha=0.12)
    axes.set_ylabel("density")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(axis)
    legend_above(axes)


def draw_curves(axes: Any, records: Columns, series: Series) -> None:
    """Raw values faint, their running mean on top; values that are missing leave a gap."""
    for column, (label, colour, line) in series.items():
        points = [
            (step, value)
            for step, value in zip(records["step"], records.get(column, []), strict=False)
            if value is not None and value == value
        ]
        if not points:
            continue
        x, y = zip(*points, strict=True)
        axes.plot(x, y, color=colour, linewidth=0.6, alpha=0.25)
        axes.plot(x, running_mean(y), color=colour, linestyle=line, label=label)
    axes.set_xlabel("step")


def running_mean(values: Sequence[float]) -> list[float]:
    """Over a tenth of the curve."""
    column = torch.tensor(values, dtype=torch.float64)
    smoothed: list[float] = smooth(column, max(1, len(values) // 10)).tolist()
    return smoothed


def legend_above(axes: Any, columns: int = 2) -> None:
    """Out of the way of the data."""
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=columns, borderaxespad=0.2, columnspacing=1.0
    )
