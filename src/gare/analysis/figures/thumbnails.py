"""Pictures with frames of videos: close ones of a text, and pairs that may match without being annotated."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from gare.analysis.figures.text import clip, percent
from gare.analysis.measure_rest import thumbnail_name
from gare.analysis.store import Numbers
from gare.analysis.style import BLUE, GREY, VERMILION, Picture

WIDTH = 6.9
"""Inches: both columns of a paper."""


def example_picture(examples: dict[str, Any], thumbnails: Path) -> Picture:
    """One row a text: its own video, then the closest others, with the score before and after."""
    rows = list(examples.items())

    def draw(figure: Any) -> None:
        for part, (kind, example) in zip(
            figure.subfigures(len(rows), 1, squeeze=False).flat, rows, strict=True
        ):
            part.suptitle(clip(f"{kind}: “{example['caption']}”", 105), x=0.012, ha="left", fontsize=8)
            for place, axes in enumerate(part.subplots(1, len(example["videos"]), squeeze=False).flat):
                _blank(axes)
                _cell(axes, example, place, thumbnails)

    return Picture(
        "hard-negatives",
        "Three texts with their own video (first, blue frame) and the videos with the closest captions: "
        "where the increment helped the own video most against them, the median text, and where it hurt "
        "most. Below each frame: score without → with the increment; orange where the video scores above "
        "the own one.",
        draw,
        (WIDTH, 1.25 * len(rows)),
        wide=True,
    )


def _cell(axes: Any, example: dict[str, Any], place: int, thumbnails: Path) -> None:
    _show(axes, thumbnails, example["videos"][place], BLUE if place == 0 else None)
    before, after = example["before"], example["after"]
    wrong = place > 0 and after[place] >= after[0]
    axes.set_xlabel(
        f"{before[place]:.2f} → {after[place]:.2f}".replace("-", "−"),
        fontsize=7,
        color=VERMILION if wrong else "black",
        labelpad=2,
    )


def suspect_picture(numbers: Numbers, thumbnails: Path) -> Picture:
    """The pairs at the top of the list of likely false negatives."""
    table, values = numbers.tables["false_negatives"], numbers.values
    shown = range(min(3, len(table["video_a"])))

    def draw(figure: Any) -> None:
        grid = figure.subplots(1, 2 * len(shown), squeeze=False)[0]
        for place in shown:
            for side, axes in (("a", grid[2 * place]), ("b", grid[2 * place + 1])):
                _blank(axes)
                _show(axes, thumbnails, table[f"video_{side}"][place], None)
                axes.set_xlabel(
                    textwrap.fill(clip(table[f"caption_{side}"][place], 60), 22), fontsize=6.5, labelpad=3
                )
            grid[2 * place].set_title(
                f"{place + 1}: evidence {table['evidence'][place]:.1f} sd", fontsize=7.5
            )

    return Picture(
        "false-negatives",
        "The most likely false negatives of the split: pairs of videos whose captions, frames and scores "
        f"all say that each text describes both. {values['num_suspects']} pairs are listed, the model "
        f"confuses {values['num_confused']} of them; were all of them matches, R@1 would be "
        f"{percent(values['recall_at_1_forgiven'])} instead of {percent(values['recall_at_1'])}.",
        draw,
        (WIDTH, 1.6),
        wide=True,
    )


def _show(axes: Any, thumbnails: Path, video_id: str, frame: str | None) -> None:
    from PIL import Image

    path = thumbnails / thumbnail_name(video_id)
    if path.exists():
        with Image.open(path) as image:
            axes.imshow(image.convert("RGB"))
    else:
        axes.text(0.5, 0.5, video_id, ha="center", va="center", fontsize=6, transform=axes.transAxes)
    for spine in axes.spines.values():
        spine.set(visible=True, color=frame or GREY, linewidth=1.8 if frame else 0.4)


def _blank(axes: Any) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
