"""How numbers are shown: as words, as tables, as curves and histograms, in pictures of one look.

Colours can be told apart by colour-blind readers; letters fit one column of a paper.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gare.analysis.distributions import smooth

COLUMN = 3.35
"""Inches: the width of one column of a two-column paper."""
FORMATS = ("svg", "pdf", "png")

# Okabe and Ito's palette, by what it stands for in this report.
BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION, BLACK, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#222222",
    "#8A8A8A",
)
POSITIVE, NEGATIVE, BASELINE = BLUE, VERMILION, GREY

SETTINGS: dict[str, Any] = {
    "figure.dpi": 150,
    "savefig.dpi": 300,
    "font.size": 8,
    "font.family": "DejaVu Sans",
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.titlelocation": "left",
    "axes.formatter.useoffset": False,
    "axes.formatter.limits": (-6, 6),
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.3,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.5,
    "axes.grid": True,
    "axes.axisbelow": True,
    "svg.hashsalt": "gare",
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
}

Columns = Mapping[str, list[Any]]
Series = Mapping[str, tuple[str, str, str]]
"""The column of each line: its label, colour and line style."""


@dataclass(frozen=True)
class Picture:
    """A figure that is drawn when it is saved: `draw` gets an empty figure of `size` inches."""

    name: str
    caption: str
    draw: Callable[[Any], None]
    size: tuple[float, float] = (COLUMN, 2.2)
    wide: bool = False
    """Whether it spans both columns of the report."""
    alt: str = ""


@dataclass(frozen=True)
class Table:
    """A table of a section of the report, below its pictures."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: int = 1
    """The first columns hold words, all others numbers."""
    note: str = ""
    """What a reader must know to read it, printed below."""


def save_picture(picture: Picture, folder: Path) -> dict[str, Path]:
    """Vector and pixels, by format."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    with matplotlib.rc_context(SETTINGS), warnings.catch_warnings():  # type: ignore[arg-type]
        # A caption in a script the font lacks is drawn as boxes; the tables of the report have it whole.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=picture.size, layout="constrained")
        FigureCanvasAgg(figure)
        picture.draw(figure)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # laid out once, not again for every format
        for kind in FORMATS:
            paths[kind] = folder / f"{picture.name}.{kind}"
            # A date or a version in the file would make two runs differ.
            metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {"Software": None}}[kind]
            figure.savefig(paths[kind], format=kind, metadata=metadata)
    return paths


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
    """The running mean over a tenth of the curve."""
    column = torch.tensor(values, dtype=torch.float64)
    smoothed: list[float] = smooth(column, max(1, len(values) // 10)).tolist()
    return smoothed


def legend_above(axes: Any, columns: int = 2) -> None:
    """Out of the way of the data."""
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=columns, borderaxespad=0.2, columnspacing=1.0
    )


def number(value: float | None, digits: int = 3) -> str:
    """Short, with a real minus sign.

    >>> number(-0.12345), number(1234.5), number(0.00001234), number(None)
    ('−0.123', '1,234', '1.23e−05', 'n/a')
    """
    if value is None:
        return "n/a"
    if value and (abs(value) < 10**-digits):
        shown = f"{value:.2e}"
    elif abs(value) >= 1000:
        shown = f"{value:,.0f}"
    else:
        shown = f"{value:.{digits}f}"
    return shown.replace("-", "−")


def percent(share: float | None, digits: int = 1) -> str:
    """A share as a percentage.

    >>> percent(0.1234)
    '12.3 %'
    """
    return "n/a" if share is None else f"{100 * share:.{digits}f} %"


def spread(values: dict[str, Any], digits: int = 3) -> str:
    """Median with the range of nine in ten."""
    return (
        f"{number(values['median'], digits)} (90 % within {number(values['low'], digits)} to "
        f"{number(values['high'], digits)})"
    )


def side_note(values: dict[str, Any]) -> str:
    """Claims are worded for increments on texts, as in the paper; this says so where they are on videos."""
    return "; Δ is on the videos here, so read v for t and t for v" if values.get("side") == "video" else ""


def one_line(text: str) -> str:
    """Captions and ids may hold anything; tabs and line breaks would tear a table or a title apart.

    >>> one_line("a dog\\n\\tcatches")
    'a dog catches'
    """
    return " ".join(text.split())


def clip(text: str, width: int) -> str:
    """A text cut to a width.

    >>> clip("a man is cooking", 9)
    'a man is…'
    """
    return text if len(text) <= width else text[: width - 1].rstrip() + "…"
