"""Pictures with frames of videos: close ones of a text, and pairs that may match without being annotated."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from gare.analysis.figures.text import clip, one_line, percent
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
            title = clip(f"{kind}: “{one_line(example['caption'])}”", 105)
            part.suptitle(title, x=0.012, ha="left", fontsize=8, parse_math=False)
            for place, axes in enumerate(part.subplots(1, len(example["videos"]), squeeze=False).flat):
                _blank(axes)
                _cell(axes, example, place, thumbnails)

    return Picture(
        "hard-negatives",
        "Three texts with their own video (first, blue frame) and the videos with the closest captions: "
        "where the increment helped the own video most against them, the median text, and where it hurt "
        "most. Below each frame: score without → with the increment, with ▲ in orange where the video ends "
        "above the own one; then its caption.",
        draw,
        (WIDTH, 1.5 * len(rows)),
        wide=True,
    )


def _cell(axes: Any, example: dict[str, Any], place: int, thumbnails: Path) -> None:
    _show(axes, thumbnails, example["videos"][place], BLUE if place == 0 else None)
    before, after = example["before"], example["after"]
    wrong = place > 0 and after[place] >= after[0]
    scores = f"{before[place]:.2f} → {after[place]:.2f}{' ▲' if wrong else ''}".replace("-", "−")
    if place:  # the own caption is the title
        scores += f"\n{_wrap(example['captions'][place], 36)}"
    colour = VERMILION if wrong else "black"
    axes.set_xlabel(scores, fontsize=6.5, color=colour, labelpad=2, parse_math=False)


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
                caption = _wrap(table[f"caption_{side}"][place], 60)
                axes.set_xlabel(caption, fontsize=6.5, labelpad=3, parse_math=False)
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
        place = dict(ha="center", va="center", fontsize=6, transform=axes.transAxes)
        axes.text(0.5, 0.5, _wrap(video_id, 40), parse_math=False, **place)
    for spine in axes.spines.values():
        spine.set(visible=True, color=frame or GREY, linewidth=1.8 if frame else 0.4)


def _wrap(text: str, most: int) -> str:
    return textwrap.fill(clip(one_line(text), most), 19)


def _blank(axes: Any) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
