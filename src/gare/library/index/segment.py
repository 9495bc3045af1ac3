"""How a file is segmented into items: by its moments, as a whole, in windows of equal length, shot by shot.

By its moments, a file gives frames at a steady rate, and `moment_ranges` makes items of them. Otherwise each
item has its own few frames. A shot ends where the colours of the picture change much more than they usually
do.
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
from gare.library.store.store_schema import DENSE

EVERY_S = 1.0
"""Seconds from one frame to the next, unless another rate is asked for."""
_SHORTEST_EVERY_S, _LONGEST_EVERY_S = 0.1, 60.0
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
    """`moments:SECONDS` (from frame to frame), `whole`, `window:SECONDS`, `shots`, or `auto`: windows of a
    minute in files of over five minutes."""

    kind: Literal["moments", "whole", "window", "shots", "auto"] = "whole"
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind}:{self.seconds:g}" if self.seconds else self.kind

    @property
    def is_dense(self) -> bool:
        """Whether items are ranges of frames that come at a steady rate."""
        return self.kind == DENSE


def default_segmentation(before: str | None, *, has_temporal: bool) -> Segmentation:
    """What a library is segmented by when nobody says: its moments.

    Args:
        before: the segmentation that an older gare noted. Windows and shots were asked for, and stay.
        has_temporal: the model's frame vectors depend on the frames around them, so that they cannot be
            shared by items: windows are the next best.
    """
    if before not in (None, "whole", "auto"):
        return parse_segmentation(before)
    return Segmentation("auto") if has_temporal else Segmentation("moments", EVERY_S)


def parse_segmentation(text: str) -> Segmentation:
    """Read what `--split` is given.

    >>> parse_segmentation("window:30"), str(parse_segmentation("window:30.0"))
    (Segmentation(kind='window', seconds=30.0), 'window:30')
    """
    kind, _, value = text.partition(":")
    if text == DENSE:
        return Segmentation("moments", EVERY_S)
    if kind in ("whole", "shots", "auto") and not value:
        return Segmentation(kind)  # type: ignore[arg-type]
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if kind == DENSE and _SHORTEST_EVERY_S <= seconds <= _LONGEST_EVERY_S:
        return Segmentation("moments", seconds)
    if kind != "window" or not 1 <= seconds < math.inf:
        raise ConfigError(
            f"'{text}' is not a segmentation; --split takes moments, whole, shots, auto, or window:SECONDS "
            "(1 or more); moments:SECONDS (0.1 to 60) says how often a frame is taken"
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
