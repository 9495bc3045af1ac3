"""Where a moment begins and ends: from its best frame as far as the dense frames around it still match.

A frame still matches if its cosine with the query is at least 0.4 of the way from the usual level up to that
of the best frame. The usual level is the median of the frames around it, or of all frames that the search
scored, whichever is lower: a block that matches as a whole stays whole. Chosen on scenes planted in films
(docs/library.md). A moment ends with its block of frames at the latest.

Shapes: F frames.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

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

    def beside(self, own: tuple[float, float], others: Iterable[tuple[float, float]]) -> RefinedMoment:
        """The moment up to the next of other parts of the file, none of which overlaps its own range.

        >>> RefinedMoment(1.0, 9.0, 4.0).beside((3.0, 5.0), [(7.0, 8.0), (0.0, 2.0)])
        RefinedMoment(start=2.0, end=7.0, best=4.0)
        """
        start, end = self.start, self.end
        for other_start, other_end in others:
            if other_end <= own[0]:
                start = max(start, other_end)
            else:
                end = min(end, other_start)
        return replace(self, start=start, end=end)


def refine(line: FrameLine, start: float, end: float, usual: float) -> RefinedMoment:
    """The moment around the best frame of a range.

    >>> line = FrameLine([0.0, 1.0, 2.0, 3.0, 4.0], 5.0, [0.1, 0.4, 0.5, 0.1, 0.1])
    >>> refine(line, start=2.0, end=4.0, usual=0.1)
    RefinedMoment(start=1.0, end=3.0, best=2.0)
    """
    times, cosines = np.asarray(line.times), np.asarray(line.cosines)
    inside = np.flatnonzero((times >= start) & (times < end))
    best = int(inside[cosines[inside].argmax()]) if len(inside) else int(cosines.argmax())
    usual = min(usual, float(np.median(cosines)), cosines[best])
    still = cosines >= usual + _SHARE * (cosines[best] - usual)
    first = best - int(np.argmin(np.append(still[best::-1], False))) + 1
    last = best + int(np.argmin(np.append(still[best:], False)))  # the first frame after it
    until = line.end if last == len(times) else float(times[last])
    return RefinedMoment(float(times[first]), until, float(times[best]))
