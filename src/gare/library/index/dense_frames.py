"""Which frames of a video become dense frames, and how they are put together into blocks.

A short file gives one frame per step, so that it is seen as it always was. In a longer one a frame is taken
sooner where the picture changed much, and left out for a while where nothing changes. A block holds about 32
frames and ends, if it can, where the picture changes most: a row of frames is read as a whole, and most
searches want few of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

import numpy as np
from PIL import Image

from gare.library.store.store_schema import MOST_DENSE_FRAMES

Kept = TypeVar("Kept")
_FEWEST, _MOST = 24, 40  # frames of a block of a long file
_SIDE = 16
_STILL = 0.015  # mean difference of small pictures, of 1: noise of the camera and of the codec
_CUT = 0.12
_STILL_STEPS = 4
_TOLERANCE_S = 1e-3


class DenseChooser:
    """Sees small pictures in the order of time and says which moments are worth a frame.

    Args:
        every: seconds from frame to frame.
        is_short: take every one.
    """

    def __init__(self, every: float, *, is_short: bool) -> None:
        self._every, self._is_short = every, is_short
        self.step = every if is_short else every / 2
        """Seconds from look to look."""
        self.change = 1.0
        """How much the last picture differs from the last one that was taken: 0 to 1."""
        self._last: tuple[float, np.ndarray] | None = None

    def wants(self, time: float, image: Image.Image) -> bool:
        """Whether the picture on screen since this moment is worth a frame."""
        small = image.resize((_SIDE, _SIDE), Image.Resampling.BOX).convert("RGB")
        pixels = np.asarray(small, np.float32) / 255
        if self._last is not None:
            before, seen = self._last
            self.change = float(np.abs(pixels - seen).mean())
            if not self._is_due(time - before + _TOLERANCE_S):
                return False
        self._last = time, pixels
        return True

    def _is_due(self, since: float) -> bool:
        if self._is_short:
            return True
        if since >= self._every:
            return self.change > _STILL or since >= _STILL_STEPS * self._every
        return self.change > _CUT


class DenseBlocks(Generic[Kept]):
    """Collects frames and gives them out in blocks: start, end, frames, times."""

    def __init__(self, *, is_short: bool) -> None:
        self.is_short = is_short
        self._most = MOST_DENSE_FRAMES if is_short else _MOST
        self._start = 0.0
        self._frames: list[tuple[float, Kept, float]] = []

    def add(
        self, time: float, frame: Kept, change: float
    ) -> Iterator[tuple[float, float, list[Kept], list[float]]]:
        """Take a frame, and how much it differs from the one before; a block, when one is full."""
        if len(self._frames) == self._most:
            changes = [change for _, _, change in self._frames[_FEWEST:]]
            yield self._cut(_FEWEST + int(np.argmax(changes)))
        self._frames.append((time, frame, change))

    def rest(self, end: float) -> Iterator[tuple[float, float, list[Kept], list[float]]]:
        """What is left at the end of the file."""
        if self._frames:
            times = [time for time, _, _ in self._frames]
            yield (
                self._start,
                max(end, times[-1] + _TOLERANCE_S),
                [kept for _, kept, _ in self._frames],
                times,
            )

    def _cut(self, count: int) -> tuple[float, float, list[Kept], list[float]]:
        """The first so many frames as a block; it lasts until the next frame."""
        block, self._frames = self._frames[:count], self._frames[count:]
        start, self._start = self._start, as_stored(self._frames[0][0])
        return start, self._start, [kept for _, kept, _ in block], [time for time, _, _ in block]


def as_stored(time: float) -> float:
    """A time as the store keeps it, in float32: ranges begin and end with the times of frames."""
    return float(np.float32(time))
