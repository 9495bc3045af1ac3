"""Which moments of a video become frames."""

from __future__ import annotations

import math
from typing import Literal

Sampling = Literal["grid", "uniform"]
"""`grid`: one frame a second, thinned evenly to the number wanted, as in the papers; short videos give fewer.
`uniform`: the middles of equal parts of the video, whatever its length."""

_ROUNDING_S = 1e-3  # durations are rounded to milliseconds; 3.0004 s is three seconds of grid, not four


def sample_times(
    duration: float, num_frames: int, sampling: Sampling = "grid", *, offset: float = 0.5
) -> list[float]:
    """Seconds from the start, increasing, at most `num_frames` of them and at least one.

    `offset` is where in its part of the video each frame of `uniform` lies; draw it to vary the frames.

    >>> sample_times(5.0, 12)
    [0.0, 1.0, 2.0, 3.0, 4.0]
    >>> sample_times(60.0, 4)
    [0.0, 19.0, 39.0, 59.0]
    >>> sample_times(2.0, 4, "uniform")
    [0.25, 0.75, 1.25, 1.75]
    """
    check_sampling(num_frames, sampling)
    if sampling == "uniform":
        return [(part + offset) * duration / num_frames for part in range(num_frames)]
    num_seconds = max(1, math.ceil(duration - _ROUNDING_S))
    return [float(second) for second in sample_indices(num_seconds, num_frames)]


def sample_indices(
    num_available: int, num_frames: int, sampling: Sampling = "grid", *, offset: float = 0.5
) -> list[int]:
    """The same choice among frames that are already extracted: increasing positions, none twice.

    >>> sample_indices(10, 4), sample_indices(10, 4, "uniform"), sample_indices(2, 4, "uniform")
    ([0, 3, 6, 9], [1, 3, 6, 8], [0, 1])
    """
    check_sampling(num_frames, sampling)
    if num_available <= num_frames:
        return list(range(num_available))
    if sampling == "uniform":
        return [int((part + offset) * num_available / num_frames) for part in range(num_frames)]
    import numpy as np

    return [int(index) for index in np.linspace(0, num_available - 1, num_frames, dtype=int)]


def check_sampling(num_frames: int, sampling: str) -> None:
    """Refuse a number of frames below one and an unknown sampling."""
    if num_frames < 1:
        raise ValueError(f"num_frames must be at least 1, got {num_frames}")
    if sampling not in ("grid", "uniform"):
        raise ValueError(f"sampling '{sampling}' is not one of grid, uniform")
