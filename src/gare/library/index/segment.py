"""How a file is segmented into items: as a whole, in windows of equal length, or shot by shot.

A shot ends where the colours of the picture change much more than they usually do.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image

from gare.errors import ConfigError

PICTURES_PER_SECOND = 4
SHORTEST_S = 2.0
LONGEST_S = 60.0
"""A longer shot is cut here: it keeps memory small and moments near."""

_AUTO_LONGER_THAN_S = 300.0
_AUTO_WINDOW_S = 60.0
_REMAINDER = 0.25  # a last window shorter than this part of one goes with the window before
_SIZE = (48, 32)
_LEAST_CHANGE = 0.35  # of the picture's colours, 0 to 1
_TIMES_USUAL = 3.0  # a shaky or busy scene changes all the time: a cut has to stand out from that
_NUM_REMEMBERED = 12


@dataclass(frozen=True)
class Segmentation:
    """`whole`, `window:SECONDS`, `shots`, or `auto`: windows of a minute in files of over five minutes."""

    kind: Literal["whole", "window", "shots", "auto"] = "whole"
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"window:{self.seconds:g}" if self.kind == "window" else self.kind


def parse_segmentation(text: str) -> Segmentation:
    """Read what `--split` is given.

    >>> parse_segmentation("window:30"), str(parse_segmentation("window:30.0"))
    (Segmentation(kind='window', seconds=30.0), 'window:30')
    """
    kind, _, value = text.partition(":")
    if kind in ("whole", "shots", "auto") and not value:
        return Segmentation(kind)  # type: ignore[arg-type]
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if kind != "window" or not 1 <= seconds < math.inf:
        raise ConfigError(
            f"'{text}' is not a segmentation; --split takes whole, shots, auto, or window:SECONDS (1 or more)"
        )
    return Segmentation("window", seconds)


def find_spans(segmentation: Segmentation, duration: float) -> Iterator[tuple[float, float]]:
    """Start and end of every item of a file, in seconds (not for shots: those depend on the pictures).

    One by one: a damaged file may claim to last for years.

    >>> list(find_spans(Segmentation("window", 10), 21.0))
    [(0.0, 10.0), (10.0, 21.0)]
    """
    seconds = _window_seconds(segmentation, duration)
    num_windows = count_spans(segmentation, duration)
    for index in range(num_windows):
        yield index * seconds, duration if index == num_windows - 1 else (index + 1) * seconds


def count_spans(segmentation: Segmentation, duration: float) -> int:
    """How many items `find_spans` gives.

    >>> count_spans(Segmentation("window", 10), 21.0)
    2
    """
    seconds = _window_seconds(segmentation, duration)
    return max(1, math.ceil(duration / seconds - _REMAINDER)) if 0 < seconds < duration else 1


def _window_seconds(segmentation: Segmentation, duration: float) -> float:
    """0 is the whole file."""
    if segmentation.kind == "auto":
        return _AUTO_WINDOW_S if duration > _AUTO_LONGER_THAN_S else 0.0
    return float(segmentation.seconds) if segmentation.kind == "window" else 0.0


class ShotDetector:
    """Finds the first picture of each shot, from the pictures of a video in their order."""

    def __init__(self) -> None:
        self._histogram: np.ndarray | None = None
        self._changes: deque[float] = deque(maxlen=_NUM_REMEMBERED)
        self._start: float | None = None

    def begins(self, time: float, image: Image.Image) -> bool:
        """Whether the picture at this moment is the first of a new shot. The very first one is."""
        histogram = _colours(image)
        before, self._histogram = self._histogram, histogram
        if before is None or self._start is None:
            self._start = time
            return True
        change = float(np.abs(histogram - before).sum()) / 2
        usual = float(np.median(self._changes)) if self._changes else 0.0
        length = time - self._start
        is_cut = change > max(_LEAST_CHANGE, _TIMES_USUAL * usual) and length >= SHORTEST_S
        if is_cut or length >= LONGEST_S:
            self._changes.clear()
            self._start = time
            return True
        self._changes.append(change)
        return False


def _colours(image: Image.Image) -> np.ndarray:
    """How the picture's colours are spread over 8 × 8 × 8 bins; sums to one."""
    pixels = np.asarray(image.resize(_SIZE, Image.Resampling.BOX).convert("RGB"), dtype=np.int64) >> 5
    bins = (pixels[..., 0] << 6) | (pixels[..., 1] << 3) | pixels[..., 2]
    return np.bincount(bins.ravel(), minlength=512) / bins.size
