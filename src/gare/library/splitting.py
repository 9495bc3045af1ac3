"""How a file becomes items: as a whole, in windows of equal length, or shot by shot."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gare.errors import ConfigError

_AUTO_LONGER_THAN_S = 300.0
_AUTO_WINDOW_S = 60.0
_REMAINDER = 0.25  # a last window shorter than this part of one goes with the window before


@dataclass(frozen=True)
class Split:
    """`whole`, `window:SECONDS`, `shots`, or `auto`: windows of a minute in files of over five minutes."""

    kind: Literal["whole", "window", "shots", "auto"] = "whole"
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"window:{self.seconds:g}" if self.kind == "window" else self.kind


def parse_split(text: str) -> Split:
    """
    >>> parse_split("window:30"), str(parse_split("window:30.0"))
    (Split(kind='window', seconds=30.0), 'window:30')
    """
    kind, _, value = text.partition(":")
    if kind in ("whole", "shots", "auto") and not value:
        return Split(kind)  # type: ignore[arg-type]
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if kind != "window" or not 1 <= seconds < math.inf:
        raise ConfigError(
            f"'{text}' is not a way to split; use whole, shots, auto, or window:SECONDS (1 or more)"
        )
    return Split("window", seconds)


def find_spans(split: Split, duration: float) -> Iterator[tuple[float, float]]:
    """Start and end of every item of a file, in seconds (not for shots: those take a look at the pictures).

    One by one: a damaged file may claim to last for years.

    >>> list(find_spans(Split("window", 10), 21.0))
    [(0.0, 10.0), (10.0, 21.0)]
    """
    seconds = float(split.seconds)
    if split.kind == "auto":
        seconds = _AUTO_WINDOW_S if duration > _AUTO_LONGER_THAN_S else 0.0
    if split.kind == "whole" or not seconds or duration <= seconds:
        yield 0.0, duration
        return
    num_windows = max(1, math.ceil(duration / seconds - _REMAINDER))
    for index in range(num_windows):
        yield index * seconds, duration if index == num_windows - 1 else (index + 1) * seconds
