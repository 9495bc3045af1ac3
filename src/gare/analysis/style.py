"""One look for every picture: colours that colour-blind readers can tell apart, letters for one column."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class Picture:
    """A figure that is drawn when it is saved: `draw` gets an empty figure of `size` inches."""

    name: str
    caption: str
    draw: Callable[[Any], None]
    size: tuple[float, float] = (COLUMN, 2.2)
    wide: bool = False
    """Over both columns of the report."""
    alt: str = ""


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
