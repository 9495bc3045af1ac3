"""Which part of its file a hit means, when it is cut out or put on a list."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from gare.errors import ClipError
from gare.library.index.scan import on_one_line
from gare.library.search.search_hit import SearchHit

LENGTH_S = 20.0
"""The longest part that is taken of a hit, unless another length is asked for."""

_NUMBER = re.compile(r"\d{1,9}(\.\d{0,9})?", re.ASCII)
_SAME_DATE_S = 1.0  # a hit has whole seconds


@dataclass(frozen=True)
class Moment:
    """A part of a video file, with where it came from."""

    path: str
    start: float
    end: float
    id: str = ""
    score: float | None = None
    best: float | None = None
    """The second that matches best."""
    modified: float | None = None
    """The date of the file, when it was indexed."""

    def check_unchanged(self) -> None:
        """Refuse a file that is gone, or changed after it was indexed: its times are those of another."""
        try:
            date = os.stat(self.path).st_mtime
        except OSError as error:
            raise ClipError(f"{self.path} cannot be read: {error.strerror or error}") from None
        if self.modified is not None and abs(date - self.modified) > _SAME_DATE_S:
            raise ClipError(f"{self.path} changed after it was indexed; index its folder again")

    @property
    def title(self) -> str:
        """The file's name and the time, on one line, for lists that people read."""
        return f"{on_one_line(os.path.basename(self.path))} {write_clock(self.start)}"


def moments_of(hits: Sequence[SearchHit], length: float = LENGTH_S) -> list[Moment]:
    """The part of each hit, in their order."""
    return [_moment(hit, length) for hit in hits]


def _moment(hit: SearchHit, length: float) -> Moment:
    start, end = part_around(hit.start, hit.end, hit.moment, length)
    modified = datetime.fromisoformat(hit.modified).timestamp()
    return Moment(hit.path, start, end, hit.id, hit.score, hit.moment, modified)


def part_around(start: float, end: float, best: float, length: float = LENGTH_S) -> tuple[float, float]:
    """The item's own range; of one that is longer than `length`, so much of it around its best second.

    >>> part_around(30, 42, 33), part_around(0, 3600, 1800.5), part_around(0, 3600, 3599)
    ((30, 42), (1790.5, 1810.5), (3580.0, 3600))
    """
    if not length > 0:
        raise ClipError(f"a part is longer than {length:g} seconds")
    if end - start <= length:
        return start, end
    first = min(max(start, best - length / 2), end - length)
    return first, min(end, first + length)


def write_clock(seconds: float) -> str:
    """A moment as players write it, to the millisecond.

    >>> write_clock(3.2), write_clock(3723.0004), write_clock(59.9996)
    ('0:00:03.200', '1:02:03.000', '0:01:00.000')
    """
    minutes, milliseconds = divmod(round(1000 * seconds), 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{milliseconds // 1000:02d}.{milliseconds % 1000:03d}"


def read_clock(text: str) -> float:
    """Seconds of `75`, `75.5`, `1:15.5` or `0:01:15.5`.

    >>> read_clock("75.5"), read_clock("1:15.5"), read_clock("0:01:15.5")
    (75.5, 75.5, 75.5)
    """
    parts = text.strip().split(":")
    numbers = [float(part) for part in parts if _NUMBER.fullmatch(part)]
    if not 0 < len(numbers) == len(parts) <= 3 or any(number >= 60 for number in numbers[1:]):
        raise ClipError(f"'{text}' is no time; write seconds (75.5) or a clock (1:15.5, 0:01:15.5)")
    seconds = 0.0
    for number in numbers:
        seconds = 60 * seconds + number
    return seconds
