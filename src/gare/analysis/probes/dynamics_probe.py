"""Curves of a training run that was recorded with `gare train --probe`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from gare.analysis.distributions import smooth
from gare.analysis.numbers import Numbers, file_fingerprint
from gare.analysis.presentation import (
    BLACK,
    BLUE,
    COLUMN,
    GREEN,
    GREY,
    NEGATIVE,
    ORANGE,
    POSITIVE,
    PURPLE,
    SKY,
    VERMILION,
    Columns,
    Picture,
    Series,
    draw_curves,
    legend_above,
    number,
    percent,
    side_note,
)
from gare.analysis.probe import Claim, Probe, with_run
from gare.analysis.study import Study
from gare.analysis.training_probe import PROBE_FILE, read_records

TERMS = {"contrastive": BLACK, "kl": BLUE, "radius": ORANGE, "direction": GREEN, "teacher": SKY}
"""Colours of the package's own terms of the loss; others take turns."""
TURN = 1.0
"""Degrees by which an angle must fall and rise to count as falling and rising."""


class DynamicsProbe(Probe):
    """Curves of a recorded training run."""

    title = "Dynamics during training"
    intro = (
        "What `gare train --probe` wrote down: batches seen without dropout, before each recorded update. "
        "Faint lines are single batches, strong ones their running mean."
    )
    needs = (with_run,)

    def depends_on(self, study: Study) -> Sequence[object]:
        return () if study.run is None else (file_fingerprint(study.run, PROBE_FILE),)

    def measure(self, study: Study) -> Numbers:
        """The records, and where their curves start, turn and end."""
        assert study.run is not None
        records = {name: torch.tensor(column) for name, column in read_records(study.run).items()}
        values: dict[str, Any] = {
            "side": study.subject.model.interaction.corrected_side,
            "num_records": len(records["step"]),
            "last_step": int(records["step"][-1]),
        }
        for name, column in records.items():
            if name != "step":
                values[name] = curve_summary(column)
        return Numbers.of(values, {"records": records})

    def figures(self, numbers: Numbers, study: Study) -> Sequence[Picture]:
        values, records = numbers.values, numbers.tables["records"]
        pictures = _increment_pictures(values, records) if "radius/positive" in records else []
        terms = _term_colours(records)
        shown = ", ".join(f"{name} {_path(values, f'term/{name}', 3)}" for name in terms)
        pictures.append(
            Picture(
                "dynamics-terms",
                f"Terms of the loss before their weights, start → end: {shown}.",
                partial(_terms, records=records, terms=terms),
                (COLUMN, 2.6 if len(terms) > 2 else 1.5),
            )
        )
        pictures.append(
            Picture(
                "dynamics-tension",
                "How much of the pull of InfoNCE on a text survives cancellation, |sum| / (|positive| + "
                f"|negative|), mean over the batch: {_path(values, 'cancellation', 3)}.",
                partial(_curves, records=records, series={"cancellation": ("", BLACK, "-")}, label="ratio"),
                (COLUMN, 1.7),
            )
        )
        return pictures

    def claims(self) -> Sequence[Claim]:
        run = "needs --run FOLDER of a 'gare train … --probe'"
        return (
            Claim(
                "The angle between Δ and the gap becomes obtuse",
                "above 90° at the end, matching pairs",
                _obtuse,
                run,
            ),
            Claim(
                "The angle between Δ and t falls, then rises",
                f"by more than {TURN:g}° each, matching pairs",
                _falls_then_rises,
                run,
            ),
        )


# Numbers


def curve_summary(column: Tensor) -> dict[str, float]:
    """Start, end and extremes of a curve, after a running mean over a tenth of it."""
    known = column[column.isfinite()]
    if not len(known):
        return {}
    curve = smooth(known, max(1, len(known) // 10))
    lowest = int(curve.argmin())
    return {
        "start": float(curve[0]),
        "end": float(curve[-1]),
        "lowest": float(curve[lowest]),
        "lowest_at": lowest / max(1, len(curve) - 1),
        "highest": float(curve.max()),
    }


# Figures


def _path(values: dict[str, Any], name: str, digits: int = 2) -> str:
    curve = values.get(name) or {}
    return f"{number(curve.get('start'), digits)} → {number(curve.get('end'), digits)}"


def _increment_pictures(values: dict[str, Any], records: Columns) -> list[Picture]:
    path = partial(_path, values)
    own, gap, after = ("t", "v − t", "|t + Δ − v|")
    if values["side"] == "video":
        own, gap, after = ("v", "t − v", "|t − v − Δ|")
    lengths: Series = {
        "radius/positive": ("|Δ|, matching", POSITIVE, "-"),
        "radius/negative": ("|Δ|, others", NEGATIVE, "-"),
        "own_norm/positive": (f"|{own}|", GREY, "-"),
        "shifted_norm/positive": (f"|{own} + Δ|, matching", SKY, "--"),
        "shifted_norm/negative": (f"|{own} + Δ|, others", ORANGE, ":"),
    }
    distances: Series = {
        "distance/positive": ("|t − v|, matching", POSITIVE, ":"),
        "distance/negative": ("|t − v|, others", NEGATIVE, ":"),
        "shifted_distance/positive": (f"{after}, matching", POSITIVE, "-"),
        "shifted_distance/negative": (f"{after}, others", NEGATIVE, "-"),
    }
    return [
        Picture(
            "dynamics-angles",
            f"Angle between Δ and the gap {gap}: {path('angle_to_gap/positive', 1)} degrees for matching "
            f"pairs, {path('angle_to_gap/negative', 1)} for others. Angle between Δ and {own} (dashed): "
            f"{path('angle_to_own/positive', 1)} and {path('angle_to_own/negative', 1)}.",
            partial(_angles, records=records, own=own),
            (COLUMN, 2.4),
        ),
        Picture(
            "dynamics-norms",
            f"Lengths during training. |Δ|: {path('radius/positive')} for matching pairs, "
            f"{path('radius/negative')} for others; |{own}|: {path('own_norm/positive')}; |{own} + Δ|: "
            f"{path('shifted_norm/positive')} and {path('shifted_norm/negative')}.",
            partial(_curves, records=records, series=lengths, label="length"),
            (COLUMN, 2.4),
        ),
        Picture(
            "dynamics-radii",
            "Spread of the radii: standard deviation of |Δ| over the videos of a text, mean over the texts "
            f"of a batch: {path('radius_std', 4)}. The radius term of the loss rewards a wide one.",
            partial(_curves, records=records, series={"radius_std": ("", BLACK, "-")}, label="spread of |Δ|"),
            (COLUMN, 1.7),
        ),
        Picture(
            "dynamics-distances",
            f"Distance of a pair before and after the increment: |t − v| {path('distance/positive')}, "
            f"{after} {path('shifted_distance/positive')} for matching pairs; {path('distance/negative')} "
            f"and {path('shifted_distance/negative')} for others.",
            partial(_curves, records=records, series=distances, label="distance"),
        ),
    ]


def _curves(figure: Any, records: Columns, series: Series, label: str) -> None:
    axes = figure.subplots()
    draw_curves(axes, records, series)
    axes.set_ylabel(label)
    if len(series) > 1:
        legend_above(axes)


def _angles(figure: Any, records: Columns, own: str) -> None:
    series: Series = {
        "angle_to_gap/positive": ("to the gap, matching", POSITIVE, "-"),
        "angle_to_gap/negative": ("to the gap, others", NEGATIVE, "-"),
        "angle_to_own/positive": (f"to {own}, matching", POSITIVE, "--"),
        "angle_to_own/negative": (f"to {own}, others", NEGATIVE, "--"),
    }
    _curves(figure, records, series, "angle of Δ (degrees)")
    figure.axes[0].axhline(90, color=GREY, linewidth=0.8)


def _term_colours(records: Columns) -> dict[str, str]:
    """The recorded terms of the loss, our own first, with a colour each."""
    found = [name.removeprefix("term/") for name in records if name.startswith("term/")]
    own = {name: colour for name, colour in TERMS.items() if name in found}
    others = [name for name in found if name not in TERMS]
    return own | dict(zip(others, cycle((PURPLE, VERMILION, GREY)), strict=False))


def _terms(figure: Any, records: Columns, terms: dict[str, str]) -> None:
    rows = 2 if len(terms) > 2 else 1
    grid = figure.subplots(rows, (len(terms) + rows - 1) // rows, squeeze=False).flatten()
    for axes, (name, colour) in zip(grid, terms.items(), strict=False):
        draw_curves(axes, records, {f"term/{name}": (name, colour, "-")})
        axes.set_title(name)
        axes.set_xlabel("step" if axes in grid[-2:] else "")


# Claims


def _obtuse(values: dict[str, Any]) -> tuple[bool, str] | None:
    curve = values.get("angle_to_gap/positive")
    if not curve:
        return None
    others = values["angle_to_gap/negative"]
    always = " (obtuse from the first records on)" if min(curve["start"], curve["end"]) > 90 else ""
    return curve["end"] > 90, (
        f"matching pairs {number(curve['start'], 1)}° → {number(curve['end'], 1)}°{always}, others "
        f"{number(others['start'], 1)}° → {number(others['end'], 1)}°{side_note(values)}"
    )


def _falls_then_rises(values: dict[str, Any]) -> tuple[bool, str] | None:
    curve = values.get("angle_to_own/positive")
    if not curve:
        return None
    falls, rises = curve["start"] - curve["lowest"], curve["end"] - curve["lowest"]
    return falls > TURN and rises > TURN, (
        f"{number(curve['start'], 1)}° → {number(curve['lowest'], 1)}° (after "
        f"{percent(curve['lowest_at'], 0)} of the run) → {number(curve['end'], 1)}°{side_note(values)}"
    )
