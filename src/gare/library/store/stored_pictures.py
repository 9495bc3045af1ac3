"""The pictures of a row of frames: JPEGs back to back, first the frame that shows most, then every frame.

They are told apart without decoding them: a decoder made them, and decoders are not trusted. Inside a JPEG
the end of an image is never followed by the start of one. Whatever takes the whole for one JPEG shows the
first.
Rows of older libraries have the first alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

_START, _END = b"\xff\xd8", b"\xff\xd9"
_TOLERANCE_S = 2e-3  # a time is kept in float32, and an address has three decimals


def split_pictures(pictures: bytes) -> list[bytes]:
    """Each picture by itself.

    >>> split_pictures(b"\\xff\\xd8one\\xff\\xd9\\xff\\xd8two\\xff\\xd9")
    [b'\\xff\\xd8one\\xff\\xd9', b'\\xff\\xd8two\\xff\\xd9']
    """
    parts = pictures.split(_END + _START)
    last = len(parts) - 1
    return [
        (_START if place else b"") + part + (_END if place < last else b"")
        for place, part in enumerate(parts)
    ]


def picture_at(pictures: bytes, times: Sequence[float], time: float) -> bytes:
    """The frame that is on screen at a time; the one that shows most, where there is no other."""
    first, *frames = split_pictures(pictures)
    if len(frames) != len(times):
        return first
    return frames[max(0, bisect_right(times, time + _TOLERANCE_S) - 1)]
