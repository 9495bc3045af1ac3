"""Where one shot ends and the next begins, judged by how much the colours change from look to look."""

from __future__ import annotations

from collections import deque

import numpy as np
from PIL import Image

LOOKS_PER_SECOND = 4
SHORTEST_S = 2.0
LONGEST_S = 60.0
"""A longer take is cut here: it keeps memory small and moments near."""

_SIZE = (48, 32)
_LEAST_CHANGE = 0.35  # of the picture's colours, 0 to 1
_TIMES_USUAL = 3.0  # a shaky or busy scene changes all the time: a cut has to stand out from that
_NUM_REMEMBERED = 12


class ShotDetector:
    """Told what is seen, look by look; says where a new shot begins."""

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
