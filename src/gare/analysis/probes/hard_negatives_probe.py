"""Videos that are close to a text without belonging to it.

What the increment does to them, and which of them look like matches that nobody annotated.
Shapes: T texts, V videos, K neighbours; text i belongs to video i.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor

from gare.analysis.distributions import Paired, Spread
from gare.analysis.numbers import Numbers, fingerprint
from gare.analysis.pairs import unit
from gare.analysis.presentation import (
    BLUE,
    GREY,
    VERMILION,
    Columns,
    Picture,
    Table,
    clip,
    number,
    one_line,
    percent,
)
from gare.analysis.probe import Probe, videos
from gare.analysis.study import Study
from gare.data.manifest import Row

NEIGHBOURS = 5
THUMBNAIL = 192
"""Pixels of the longer side of a frame that is kept for a picture."""
WIDTH = 6.9
"""Inches: both columns of a paper."""


class HardNegativesProbe(Probe):
    """What the increment does to close videos, and which of them may be unannotated matches."""

    title = "Hard and false negatives"
    intro = (
        "Videos that are close to a text without belonging to it: what the increment does to them, and "
        "which of them probably do belong."
    )
    needs = (videos(3),)

    def measure(self, study: Study) -> Numbers:
        """Close videos before and after the increment, and pairs that may match without being annotated."""
        subject, gallery = study.subject, study.gallery
        before, after = subject.geometry.plain_cosine, subject.geometry.cosine
        found = hard_negatives(before, after, subject.text.text_TD)
        chosen = examples(found) if study.has_increments else {"first": 0}
        suspects = false_negatives(after, subject.text.text_TD, subject.video_mean_VD)
        recall, forgiven = forgiven_recall(after, suspects)
        values = {
            "num_neighbours": found.neighbour_TK.shape[1],
            "margin": Paired.of(found.margin_after_T, found.margin_before_T),
            "margin_before": Spread.of(found.margin_before_T),
            "margin_after": Spread.of(found.margin_after_T),
            "ahead_before": float((found.margin_before_T > 0).double().mean()),
            "ahead_after": float((found.margin_after_T > 0).double().mean()),
            "examples": {name: _example(study, found, text) for name, text in chosen.items()},
            "recall_at_1": recall,
            "recall_at_1_forgiven": forgiven,
            "num_suspects": len(suspects),
            "num_confused": sum(suspects.confused),
        }
        shown = {video for text in chosen.values() for video in (text, *found.neighbour_TK[text].tolist())}
        for video in shown | {*suspects.first[:3], *suspects.second[:3]}:
            save_thumbnail(study, gallery.videos[video])
        margins: dict[str, Any] = {
            "video_id": [video.video_id for video in gallery.videos],
            "caption": gallery.captions,
            "margin_before": found.margin_before_T,
            "margin_after": found.margin_after_T,
        }
        return Numbers.of(values, {"margins": margins, "false_negatives": _suspect_columns(study, suspects)})

    def figures(self, numbers: Numbers, study: Study) -> Sequence[Picture]:
        values, margin = numbers.values, numbers.values["margin"]
        pictures = [
            Picture(
                "hard-negatives-margins",
                f"Margin of the own video over the best of the {values['num_neighbours']} videos with the "
                f"closest captions, one point a text: {number(margin['second'])} without and "
                f"{number(margin['first'])} with the increment on average. The own video is ahead for "
                f"{percent(values['ahead_before'])} of the texts without and "
                f"{percent(values['ahead_after'])} with it.",
                partial(_margins, margins=numbers.tables["margins"]),
            )
        ]
        if len(values["examples"]) > 1:
            pictures.append(example_picture(values["examples"], study.thumbnails))
        if values["num_suspects"]:
            pictures.append(suspect_picture(numbers, study.thumbnails))
        return pictures

    def tables(self, numbers: Numbers) -> Sequence[Table]:
        found = numbers.tables["false_negatives"]
        if not found["video_a"]:
            return ()
        rows = [
            [
                f"{found['video_a'][n]}: {found['caption_a'][n]}",
                f"{found['video_b'][n]}: {found['caption_b'][n]}",
                number(found["evidence"][n], 1),
                number(found["score"][n], 2),
                number(found["caption_likeness"][n], 2),
                number(found["video_likeness"][n], 2),
                "yes" if found["confused"][n] else "no",
            ]
            for n in range(min(15, len(found["video_a"])))
        ]
        header = ["video and caption"] * 2 + ["evidence (sd)", "score", "captions", "frames", "confused"]
        return (Table("Likely false negatives, the first 15", header, rows, text_columns=2),)


# Numbers


@dataclass(frozen=True)
class HardNegatives:
    """Scores of each text with its own video and the closest others, before and after the increment."""

    neighbour_TK: Tensor
    """Videos whose captions are closest to the text's, closest first."""
    own_before_T: Tensor
    own_after_T: Tensor
    near_before_TK: Tensor
    near_after_TK: Tensor

    @property
    def margin_before_T(self) -> Tensor:
        """The score of the own video less the best of the close ones, without the increment."""
        return self.own_before_T - self.near_before_TK.max(dim=1).values

    @property
    def margin_after_T(self) -> Tensor:
        """The same margin with the increment."""
        return self.own_after_T - self.near_after_TK.max(dim=1).values


def hard_negatives(
    before_TV: Tensor, after_TV: Tensor, text_TD: Tensor, *, num_neighbours: int = NEIGHBOURS
) -> HardNegatives:
    """Close means: their captions are, so the choice depends on neither score."""
    likeness_TT = (unit(text_TD) @ unit(text_TD).mT).fill_diagonal_(-torch.inf)
    neighbour_TK = likeness_TT.topk(min(num_neighbours, len(text_TD) - 1), dim=1).indices
    return HardNegatives(
        neighbour_TK,
        before_TV.diagonal(),
        after_TV.diagonal(),
        before_TV.gather(1, neighbour_TK),
        after_TV.gather(1, neighbour_TK),
    )


def examples(found: HardNegatives) -> dict[str, int]:
    """Three texts that show the range: where the margin grew most, the median one, where it shrank most.

    Margins are compared relative to their spread, since scores before and after have different scales.
    """
    change_T = found.margin_after_T / _scale(found.margin_after_T) - found.margin_before_T / _scale(
        found.margin_before_T
    )
    order = change_T.argsort(descending=True)
    return {"most helped": int(order[0]), "median": int(order[len(order) // 2]), "most hurt": int(order[-1])}


def _example(study: Study, found: HardNegatives, text: int) -> dict[str, Any]:
    near = found.neighbour_TK[text].tolist()
    ids = [study.gallery.videos[index].video_id for index in (text, *near)]
    return {
        "caption": study.gallery.captions[text],
        "videos": ids,
        "captions": [study.gallery.captions[index] for index in (text, *near)],
        "before": [float(found.own_before_T[text]), *found.near_before_TK[text].tolist()],
        "after": [float(found.own_after_T[text]), *found.near_after_TK[text].tolist()],
    }


@dataclass(frozen=True)
class Suspects:
    """Pairs of different videos that may describe the same thing, most likely first."""

    first: list[int]
    second: list[int]
    evidence: list[float]
    """Mean of the three likenesses below, each in standard deviations from its mean over all pairs."""
    score: list[float]
    """Text of one with video of the other, mean of both ways."""
    caption_likeness: list[float]
    video_likeness: list[float]
    confused: list[bool]
    """Whether the model ranks the other video above (or level with) the own one for either text."""

    def __len__(self) -> int:
        return len(self.first)


def false_negatives(scores_TV: Tensor, text_TD: Tensor, video_VD: Tensor, *, most: int = 50) -> Suspects:
    """Rank pairs by three signs at once: text against video, caption against caption, video against video.

    No single sign is enough: captions can agree by chance ("a man is talking"), and frames can look alike
    while the captions differ. Only pairs above average in all three are listed.
    """
    caption_TT, video_VV = unit(text_TD) @ unit(text_TD).mT, unit(video_VD) @ unit(video_VD).mT
    cross_TV = (scores_TV + scores_TV.mT) / 2
    rows, columns = torch.triu_indices(len(scores_TV), len(scores_TV), offset=1)
    signs = [matrix[rows, columns].double() for matrix in (cross_TV, caption_TT, video_VV)]
    standard_3P = torch.stack([(sign - sign.mean()) / _scale(sign) for sign in signs])
    evidence_P = standard_3P.mean(dim=0).where((standard_3P > 0).all(dim=0), -torch.inf)
    order = evidence_P.argsort(descending=True)[:most]
    order = order[evidence_P[order].isfinite()]
    rows, columns = rows[order], columns[order]
    own_T = scores_TV.diagonal()
    confused = (scores_TV[rows, columns] >= own_T[rows]) | (scores_TV[columns, rows] >= own_T[columns])
    return Suspects(
        rows.tolist(),
        columns.tolist(),
        evidence_P[order].tolist(),
        signs[0][order].tolist(),
        signs[1][order].tolist(),
        signs[2][order].tolist(),
        confused.tolist(),
    )


def forgiven_recall(scores_TV: Tensor, suspects: Suspects) -> tuple[float, float]:
    """R@1 of texts, and R@1 if the listed pairs counted as matches too: how much they can matter."""
    best_T = scores_TV.argmax(dim=1)
    index_T = torch.arange(len(scores_TV))
    right_T = best_T == index_T
    allowed = set(zip(suspects.first, suspects.second, strict=True))
    allowed |= {(second, first) for first, second in allowed}
    forgiven = [(text, video) in allowed for text, video in enumerate(best_T.tolist())]
    return float(right_T.double().mean()), float((right_T | torch.tensor(forgiven)).double().mean())


def _scale(values: Tensor) -> Tensor:
    return values.std(correction=0).clamp_min(1e-12)


def _suspect_columns(study: Study, suspects: Suspects) -> dict[str, Any]:
    gallery, columns = study.gallery, asdict(suspects)
    for side, rows in (("a", columns.pop("first")), ("b", columns.pop("second"))):
        columns[f"video_{side}"] = [gallery.videos[row].video_id for row in rows]
        columns[f"caption_{side}"] = [gallery.captions[row] for row in rows]
    names = ("video_a", "caption_a", "video_b", "caption_b")
    return {name: columns[name] for name in names} | columns


def false_negative_lines(numbers: Numbers) -> list[str]:
    """The list of likely false negatives, tab-separated, with a summary as its last line."""
    table, values = numbers.tables["false_negatives"], numbers.values
    columns = ("evidence", "video_a", "video_b", "confused", "caption_a", "caption_b")
    rows = []
    for evidence, first, second, mixed, one, two in zip(*(table[name] for name in columns), strict=True):
        words = (first, second, "confused" if mixed else "-", one, two)
        rows.append("\t".join([f"{evidence:.2f}", *map(one_line, words)]))
    rows.append(
        f"# {len(rows)} pairs; R@1 {percent(values['recall_at_1'])}, "
        f"{percent(values['recall_at_1_forgiven'])} if all of them were matches"
    )
    return rows


def save_thumbnail(study: Study, row: Row) -> None:
    """Keep the middle frame of a video, small, since frames may be slow to come by."""
    path = study.thumbnails / thumbnail_name(row.video_id)
    if path.exists():
        return
    frames = study.gallery.source.read(row)
    image = frames[len(frames) // 2].convert("RGB")
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, quality=85)


def thumbnail_name(video_id: str) -> str:
    """A file name for any id; a long one (file systems stop at 255 bytes) ends in a hash.

    >>> thumbnail_name("clips/a b.mp4")
    'clips%2Fa%20b.mp4.jpg'
    """
    name = quote(video_id, safe="")
    return f"{name if len(name) <= 150 else f'{name[:120]}-{fingerprint(video_id)}'}.jpg"


# Figures


def _margins(figure: Any, margins: Columns) -> None:
    axes = figure.subplots()
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.axvline(0, color=GREY, linewidth=0.8)
    axes.scatter(margins["margin_before"], margins["margin_after"], s=6, color=BLUE, alpha=0.5, linewidths=0)
    axes.set_xlabel("margin without Δ")
    axes.set_ylabel("margin with Δ")


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
