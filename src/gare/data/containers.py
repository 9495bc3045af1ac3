"""Video files by their container, without decoding: which files are videos, and which are not all there.

Decoders play a file that was cut off as far as it goes and say nothing. Containers state how long they are.
"""

from __future__ import annotations

import os
from typing import BinaryIO

# fmt: off
VIDEO_SUFFIXES = frozenset({
    ".3g2", ".3gp", ".asf", ".avi", ".divx", ".dv", ".f4v", ".flv", ".h264", ".h265", ".hevc", ".ivf",
    ".m1v", ".m2ts", ".m2v", ".m4v", ".mj2", ".mjpeg", ".mkv", ".mov", ".mp4", ".mpe", ".mpeg", ".mpg",
    ".mts", ".mxf", ".nsv", ".nut", ".obu", ".ogm", ".ogv", ".qt", ".rm", ".rmvb", ".ts", ".vob", ".webm",
    ".wmv", ".wtv", ".y4m",
})
"""File names that end like this are videos, wherever a folder of them is read."""
# fmt: on
_MAGICS = (
    b"\x1a\x45\xdf\xa3",  # Matroska, WebM
    b"FLV\x01",
    b"\x00\x00\x01\xba",  # MPEG program stream
    b"\x00\x00\x01\xb3",  # MPEG video
    b"\x30\x26\xb2\x75\x8e\x66\xcf\x11",  # Windows Media
)
_ISO_FIRST_BOXES = {b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot"}
_ISO_MEDIA_BOXES = {b"moov", b"mdat", b"moof"}
_EBML_HEADER, _MATROSKA_SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"


def looks_like_video(start: bytes) -> bool:
    """Judge by the first bytes.

    >>> looks_like_video(bytes(4) + b"ftypisom"), looks_like_video(b"import os\\n")
    (True, False)
    """
    if start[4:8] in (b"ftyp", b"moov", b"mdat"):
        return True
    if start[:4] == b"RIFF":
        return start[8:12] == b"AVI "
    if start[:1] == b"\x47":  # transport streams repeat this byte every 188 (or, with a time code, 192)
        return len(start) > 188 and start[188:189] == b"\x47"
    if start[4:5] == b"\x47" and len(start) > 196:
        return start[196:197] == b"\x47"
    return start.startswith(_MAGICS)


def find_truncation(file: BinaryIO) -> str | None:
    """Why the file is incomplete, or None if nothing says so (mp4 and mov, webm and mkv, avi)."""
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
