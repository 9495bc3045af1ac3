"""Where a moment begins and ends: from its best frame as far as the dense frames around it still match.

A frame still matches if its cosine with the query is at least 0.4 of the way from the usual level up to that
of the best frame. The usual level is the median of the frames around it, or of all frames that the search
scored, whichever is lower: a block that matches as a whole stays whole. Chosen on scenes planted in films
(docs/library.md). A moment ends with its block of frames at the latest.

Shapes: F frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_SHARE = 0.4


@dataclass(frozen=True)
class FrameLine:
    """The frames of a block in the order of time: their times, the end, how each matches."""

    times: Sequence[float]
    end: float
    cosines: Sequence[float]


@dataclass(frozen=True)
class RefinedMoment:
    """A part of a file, and the second of it that matches best."""

    start: float
    end: float
    best: float


def still_matches(cosine: float, best: float, usual: float) -> bool:
    """Whether a frame belongs to a moment, or a moment beside the best one of its file.

    >>> still_matches(0.3, best=0.5, usual=0.1), still_matches(0.2, best=0.5, usual=0.1)
    (True, False)
    """
    return cosine >= _level(best, usual)


def _level(best: float, usual: float) -> float:
    """What still matches; a best frame that is worse than usual is a moment too."""
    return min(best, usual + _SHARE * (best - usual))


def refine(line: FrameLine, start: float, end: float, usual: float) -> RefinedMoment:
    """The moment around the best frame of a range.

    >>> line = FrameLine([0.0, 1.0, 2.0, 3.0, 4.0], 5.0, [0.1, 0.4, 0.5, 0.1, 0.1])
    >>> refine(line, start=2.0, end=4.0, usual=0.1)
    RefinedMoment(start=1.0, end=3.0, best=2.0)
    """
    times, cosines = np.asarray(line.times), np.asarray(line.cosines)
    inside = np.flatnonzero((times >= start) & (times < end))
    best = int(inside[cosines[inside].argmax()]) if len(inside) else int(cosines.argmax())
    usual = min(usual, float(np.median(cosines)))
    still = cosines >= _level(float(cosines[best]), usual)
    first = best - int(np.argmin(np.append(still[best::-1], False))) + 1
    last = best + int(np.argmin(np.append(still[best:], False)))  # the first frame after it
    until = line.end if last == len(times) else float(times[last])
    return RefinedMoment(float(times[first]), until, float(times[best]))
