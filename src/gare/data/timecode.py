"""Time codes (SMPTE 12M) and the frame rates that editors know: rates are fractions, moments are frames."""

from __future__ import annotations

import re
from fractions import Fraction

RATES = tuple(
    Fraction(frames * 1000, below)
    for frames in (24, 25, 30, 48, 50, 60, 100, 120)
    for below in (1000, 1001)
    if below == 1000 or frames % 25
)
"""Rates of video formats: 24, 25, 30, 48, 50, 60, 100, 120, and those slowed down by 1000/1001."""

_SAME_RATE = 4e-4  # 23.976 and 24 are 1e-3 apart; files state 23.98, 29.97 and averages of a few frames
_TIME_CODE = re.compile(r"(\d{1,2}):(\d\d):(\d\d)([:;.,])(\d{2,3})", re.ASCII)


def nearest_rate(found: Fraction, *, is_variable: bool = False) -> Fraction:
    """The rate of a format that a file's stated rate means; its own where it means none.

    Frames of a variable rate have no numbers. They are counted on the grid of the next rate of a format, 24
    at least, so that a moment is off by half a frame of it at most.

    >>> nearest_rate(Fraction("23.98")), nearest_rate(Fraction(25)), nearest_rate(Fraction(15))
    (Fraction(24000, 1001), Fraction(25, 1), Fraction(15, 1))
    >>> nearest_rate(Fraction(100, 7), is_variable=True), nearest_rate(Fraction(26), is_variable=True)
    (Fraction(24, 1), Fraction(30, 1))
    """
    if is_variable:
        whole = [rate for rate in RATES if rate.denominator == 1]
        return next((rate for rate in whole if rate >= found * Fraction(999, 1000)), whole[-1])
    closest = min(RATES, key=lambda rate: abs(rate - found))
    is_it = abs(closest - found) <= _SAME_RATE * closest
    return closest if is_it else found.limit_denominator(1001)


def timeline_rate(rate: Fraction) -> Fraction:
    """The rate at which an editor cuts a file of this rate: its own, if it is one of a format.

    >>> timeline_rate(Fraction(25)), timeline_rate(Fraction(15)), timeline_rate(Fraction(13))
    (Fraction(25, 1), Fraction(30, 1), Fraction(24, 1))
    """
    if rate in RATES:
        return rate
    multiples = [known for known in RATES if (known / rate).denominator == 1]
    return min(multiples, default=nearest_rate(rate, is_variable=True))


def can_drop(rate: Fraction) -> bool:
    """Whether a rate has a drop-frame time code, which follows the clock: 29.97 and 59.94 have.

    >>> can_drop(Fraction(30000, 1001)), can_drop(Fraction(24000, 1001)), can_drop(Fraction(30))
    (True, False, False)
    """
    return rate.denominator == 1001 and round(rate) % 30 == 0


def to_frame(seconds: float, rate: Fraction) -> int:
    """The frame nearest to a moment.

    >>> to_frame(1.0, Fraction(30000, 1001)), to_frame(1.02, Fraction(25))
    (30, 26)
    """
    return round(Fraction(seconds) * rate)


def write_timecode(frame: int, rate: Fraction, *, drop: bool = False) -> str:
    """A frame's time code; drop-frame leaves numbers out, never frames. A day has 24 hours.

    >>> ntsc = Fraction(30000, 1001)
    >>> write_timecode(1800, ntsc, drop=True), write_timecode(17982, ntsc, drop=True)
    ('00:01:00;02', '00:10:00;00')
    >>> write_timecode(107892, ntsc), write_timecode(26, Fraction(25))
    ('00:59:56:12', '00:00:01:01')
    """
    whole = _whole(rate)
    if drop:
        left_out = whole // 15  # numbers a minute, but for every tenth
        tens, rest = divmod(frame, 600 * whole - 9 * left_out)
        minutes = max(0, (rest - left_out) // (60 * whole - left_out))
        frame += left_out * (9 * tens + minutes)
    seconds, number = divmod(frame, whole)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    separator = ";" if drop else ":"
    return f"{hours % 24:02d}:{minutes:02d}:{seconds:02d}{separator}{number:02d}"


def read_timecode(text: str, rate: Fraction) -> tuple[int, bool] | None:
    """The frame of a time code, and whether it is drop-frame; None where the text is none.

    >>> read_timecode("00:10:00;00", Fraction(30000, 1001)), read_timecode("01:00:00:00", Fraction(25))
    ((17982, True), (90000, False))
    >>> read_timecode("nonsense", Fraction(25))
    """
    found = _TIME_CODE.fullmatch(text.strip())
    if found is None:
        return None
    hours, minutes, seconds, number = (int(found[part]) for part in (1, 2, 3, 5))
    whole, drop = _whole(rate), found[4] != ":" and can_drop(rate)
    frame = (3600 * hours + 60 * minutes + seconds) * whole + number
    if drop:
        minutes += 60 * hours
        frame -= whole // 15 * (minutes - minutes // 10)
    return max(0, frame), drop


def _whole(rate: Fraction) -> int:
    return max(1, round(rate))
