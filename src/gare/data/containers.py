"""Whether a video file is all there, judged by its container's own bookkeeping and without decoding.

Decoders play a file that was cut off as far as it goes and say nothing. Containers state how long they are.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

_ISO_FIRST_BOXES = {b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot"}
_ISO_MEDIA_BOXES = {b"moov", b"mdat", b"moof"}
_EBML_HEADER, _MATROSKA_SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"


def find_truncation(path: Path) -> str | None:
    """Why the file is incomplete, or None if nothing says so (mp4 and mov, webm and mkv, avi)."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(12)
        file.seek(0)
        if start[4:8] in _ISO_FIRST_BOXES:
            return _iso_media(file, size)
        if start[:4] == b"RIFF" and start[8:12] == b"AVI ":
            return _compare(8 + int.from_bytes(start[4:8], "little"), size)
        if start[:4] == _EBML_HEADER:
            return _matroska(file, size)
    return None


def _compare(expected: int, size: int) -> str | None:
    return f"it has {size:,} of {expected:,} bytes" if expected > size else None


def _iso_media(file: BinaryIO, size: int) -> str | None:
    """Walk the top-level boxes of an mp4 or mov; one that ends past the file was cut off."""
    position, has_index = 0, False
    while position + 8 <= size:
        file.seek(position)
        header = file.read(16)
        length, kind = int.from_bytes(header[:4], "big"), header[4:8]
        if length == 1:
            length = int.from_bytes(header[8:16], "big")
        elif length == 0:
            length = size - position
        if length < 8:
            break
        if kind in _ISO_MEDIA_BOXES and position + length > size:
            return _compare(position + length, size)
        has_index = has_index or kind in (b"moov", b"meta")  # meta: still pictures in the same container
        position += length
    return None if has_index else "its index (the moov box, written last) is not there"


def _matroska(file: BinaryIO, size: int) -> str | None:
    file.seek(4)
    header_length = _read_ebml_size(file)
    if header_length is None:
        return None
    file.seek(header_length, os.SEEK_CUR)
    if file.read(4) != _MATROSKA_SEGMENT:
        return None
    length = _read_ebml_size(file)
    return None if length is None else _compare(file.tell() + length, size)


def _read_ebml_size(file: BinaryIO) -> int | None:
    """A variable-length integer: the leading zero bits count the bytes that follow. None: unknown."""
    first = file.read(1)
    if not first or not first[0]:
        return None
    num_more = 8 - first[0].bit_length()
    value = int.from_bytes(bytes([first[0] & (0x7F >> num_more)]) + file.read(num_more), "big")
    return None if value == (1 << 7 * (num_more + 1)) - 1 else value
