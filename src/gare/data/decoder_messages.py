"""What a decoding process may say: messages of fixed layouts and bounded size, read without trust.

    header   kind (1 byte), 0 0 0, length of what follows (4 bytes)       all numbers little endian
    FRAME    time (8), height (2), width (2), bytes per pixel (1), 0 0 0, then the bytes, row by row
    SEGMENT  start (8), end (8), frames since the last (4), sizes of the two JPEGs (4, 4), then the JPEGs
    PICTURE  time (8), then a JPEG
    FACTS    duration (8), width (4), height (4)
    FAILURE  what it is, by its place in `FAILURES` (1), then UTF-8; DAMAGE is the same
    ERROR    UTF-8
    CUT      start (8), end so far (8), frames (4), whether that is all (1)
    MEDIA    duration (8), frames per second as a fraction (4, 4), width (4), height (4), samples per second
             (4), streams of sound (2), channels (2), variable (1), drop-frame (1), 0 0, first frame (8)
    READY    the layers of its box, as bits (1)
    ALIVE, DONE and MEMORY are a header alone

Frames come one by one, so neither side holds more than it wants of a long file. Nothing here can make the
reader run code, allocate more than `Bounds` or raise anything but `ProtocolError`, whatever the bytes are.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from enum import IntEnum

import numpy as np

HEADER = struct.Struct("<B3xI")
FAILURES = (
    "missing",
    "unreadable",
    "truncated",
    "corrupt",
    "no_video",
    "zero_length",
    "too_many_items",
    "too_large",
    "not_written",
)
"""Why a file cannot be used, as far as a decoder can tell."""

_FRAME, _SEGMENT, _PICTURE = struct.Struct("<dHHB3x"), struct.Struct("<ddIII"), struct.Struct("<d")
_FACTS, _BYTE = struct.Struct("<dII"), struct.Struct("<B")
_CUT, _MEDIA = struct.Struct("<ddI?"), struct.Struct("<dIIIIIHH??2xQ")
_CHANNELS = 3
_MOST_TEXT = 2000
_MOST_SIDE = 1 << 20
_UNSHOWN = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_JPEG_START, _JPEG_END = b"\xff\xd8\xff", b"\xff\xd9"


class Kind(IntEnum):
    """The first byte of a message."""

    READY = 1
    ALIVE = 2
    FRAME = 3
    SEGMENT = 4
    PICTURE = 5
    FACTS = 6
    FAILURE = 7
    DAMAGE = 8
    DONE = 9
    MEMORY = 10
    ERROR = 11
    CUT = 12
    MEDIA = 13


class ProtocolError(Exception):
    """A decoding process sent something that is no message, or not one that was asked for."""


@dataclass(frozen=True)
class Ready:
    """The process has started. `box` has a bit for each layer that holds it, in the order of their names."""

    box: int


@dataclass(frozen=True)
class Alive:
    """A sign of life of a slow decoder between results; it is not delivered. Time starts anew."""


@dataclass(frozen=True)
class Frame:
    """A frame as a model takes it: uint8, height × width × 3; `time` in seconds."""

    time: float
    pixels: np.ndarray


@dataclass(frozen=True)
class SegmentEnd:
    """The frames since the last such message are a segment; its two small pictures as JPEG."""

    start: float
    end: float
    num_frames: int
    thumbnail: bytes
    strip: bytes


@dataclass(frozen=True)
class Picture:
    """A frame as JPEG."""

    time: float
    jpeg: bytes


@dataclass(frozen=True)
class Facts:
    """What is known of the file itself. It comes last, when the file is good."""

    duration: float
    width: int
    height: int


@dataclass(frozen=True)
class Failure:
    """Why a file cannot be used. It comes last, when the file is not good."""

    kind: str
    message: str


@dataclass(frozen=True)
class Damage:
    """What is wrong with a file that could be read in part."""

    kind: str
    message: str


@dataclass(frozen=True)
class Done:
    """Nothing follows for this file."""


@dataclass(frozen=True)
class OutOfMemory:
    """The process is at its limit, and ends."""


@dataclass(frozen=True)
class Error:
    """The function that decodes raised something; the process ends."""

    message: str


@dataclass(frozen=True)
class Cut:
    """How far a part of a file is written, in seconds of the file; the last one says that it is whole."""

    start: float
    end: float
    num_frames: int
    is_whole: bool


@dataclass(frozen=True)
class Media:
    """What an editor asks of a file: its clock and its sound."""

    duration: float
    rate: tuple[int, int]
    """Frames per second, as a fraction."""
    width: int
    height: int
    sample_rate: int
    num_audio: int
    """Streams of sound; `num_channels` counts the channels of all of them."""
    num_channels: int
    is_variable: bool
    """Frames do not follow each other at a steady rate."""
    is_drop_frame: bool
    first_frame: int
    """The number of the first frame, as the file's time code counts; 0 where it has none."""


Record = (
    Ready
    | Alive
    | Frame
    | SegmentEnd
    | Picture
    | Facts
    | Failure
    | Damage
    | Done
    | OutOfMemory
    | Error
    | Cut
    | Media
)


@dataclass(frozen=True)
class Bounds:
    """The largest parts of a message that a reader takes in: as large as what it asked for."""

    frame_bytes: int = 0
    picture_bytes: int = 0

    def most(self, kind: Kind) -> int:
        """The longest body of a kind."""
        texts = _BYTE.size + _MOST_TEXT
        return {
            Kind.READY: _BYTE.size,
            Kind.FRAME: _FRAME.size + self.frame_bytes if self.frame_bytes else 0,
            Kind.SEGMENT: _SEGMENT.size + 2 * self.picture_bytes if self.picture_bytes else 0,
            Kind.PICTURE: _PICTURE.size + self.picture_bytes if self.picture_bytes else 0,
            Kind.FACTS: _FACTS.size,
            Kind.FAILURE: texts,
            Kind.DAMAGE: texts,
            Kind.ERROR: _MOST_TEXT,
            Kind.CUT: _CUT.size,
            Kind.MEDIA: _MEDIA.size,
        }.get(kind, 0)


# --- writing ------------------------------------------------------------------------------------------------


def write_record(record: Record) -> Iterator[bytes | memoryview]:
    """The bytes of a message, in parts, so that a frame is not copied.

    Raises:
        ValueError: the record has no such form, as a time that is not a number.
    """
    kind, parts = _parts(record)
    yield HEADER.pack(kind, sum(len(part) for part in parts))
    yield from parts


def _parts(record: Record) -> tuple[Kind, list[bytes | memoryview]]:
    match record:
        case Frame(time, pixels):
            height, width, channels = pixels.shape
            if pixels.dtype != np.uint8:
                raise ValueError(f"frames are bytes, not {pixels.dtype}")
            raw = np.ascontiguousarray(pixels).data.cast("B")
            return Kind.FRAME, [_FRAME.pack(_finite(time), height, width, channels), raw]
        case SegmentEnd(start, end, num_frames, thumbnail, strip):
            sizes = (num_frames, len(thumbnail), len(strip))
            return Kind.SEGMENT, [_SEGMENT.pack(_finite(start), _finite(end), *sizes), thumbnail, strip]
        case Picture(time, jpeg):
            return Kind.PICTURE, [_PICTURE.pack(_finite(time)), jpeg]
        case Facts(duration, width, height):
            return Kind.FACTS, [_FACTS.pack(_finite(duration), width, height)]
        case Failure(why, message):
            return Kind.FAILURE, [_BYTE.pack(FAILURES.index(why)), _cut(message)]
        case Damage(why, message):
            return Kind.DAMAGE, [_BYTE.pack(FAILURES.index(why)), _cut(message)]
        case Error(message):
            return Kind.ERROR, [_cut(message)]
        case Cut(start, end, num_frames, is_whole):
            return Kind.CUT, [_CUT.pack(_finite(start), _finite(end), num_frames, is_whole)]
        case Media():
            duration, rate, *facts = astuple(record)
            return Kind.MEDIA, [_MEDIA.pack(_finite(duration), *rate, *facts)]
        case Ready(box):
            return Kind.READY, [_BYTE.pack(box)]
        case Alive():
            return Kind.ALIVE, []
        case Done():
            return Kind.DONE, []
        case OutOfMemory():
            return Kind.MEMORY, []
    raise ValueError(f"a {type(record).__name__} cannot be sent")


def _cut(text: str) -> bytes:
    return text.encode("utf-8", "replace")[:_MOST_TEXT].decode("utf-8", "ignore").encode()


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise ValueError(f"{number} is not a time")
    return number


# --- reading ------------------------------------------------------------------------------------------------


def read_header(header: bytes | bytearray, bounds: Bounds) -> tuple[Kind, int]:
    """The kind of a message and the length of its body, which is within bounds."""
    if len(header) != HEADER.size or any(header[1:4]):
        raise ProtocolError("it sent no message")
    number, length = HEADER.unpack(header)
    try:
        kind = Kind(number)
    except ValueError:
        raise ProtocolError(f"it sent a message of unknown kind ({number})") from None
    if length > bounds.most(kind):
        raise ProtocolError(f"it sent a {kind.name} of {length:,} bytes; {bounds.most(kind):,} were allowed")
    return kind, length


def read_body(kind: Kind, body: bytearray) -> Record:
    """The message. A frame's pixels are a view of `body`, not a copy."""
    try:
        return _READERS[kind](body)
    except (struct.error, UnicodeDecodeError, IndexError):
        raise ProtocolError(f"it sent a {kind.name} that cannot be read") from None


def _read_frame(body: bytearray) -> Frame:
    time, height, width, channels = _FRAME.unpack_from(body)
    if (
        channels != _CHANNELS
        or not height
        or not width
        or len(body) - _FRAME.size != height * width * channels
    ):
        raise ProtocolError("it sent a FRAME whose size is not that of its pixels")
    pixels = np.frombuffer(body, np.uint8, offset=_FRAME.size).reshape(height, width, channels)
    return Frame(_number(time), pixels)


def _read_segment(body: bytearray) -> SegmentEnd:
    start, end, num_frames, *sizes = _SEGMENT.unpack_from(body)
    if len(body) != _SEGMENT.size + sum(sizes):
        raise ProtocolError("it sent a SEGMENT whose length is not that of its parts")
    middle = _SEGMENT.size + sizes[0]
    thumbnail, strip = _jpeg(body[_SEGMENT.size : middle]), _jpeg(body[middle:])
    return SegmentEnd(_number(start), _number(end), num_frames, thumbnail, strip)


def _read_picture(body: bytearray) -> Picture:
    return Picture(_number(_PICTURE.unpack_from(body)[0]), _jpeg(body[_PICTURE.size :]))


def _read_facts(body: bytearray) -> Facts:
    duration, width, height = _FACTS.unpack(body)
    if not _number(duration) >= 0 or max(width, height) > _MOST_SIDE:
        raise ProtocolError("it sent FACTS that cannot be")
    return Facts(duration, width, height)


def _read_cut(body: bytearray) -> Cut:
    start, end, num_frames, is_whole = _CUT.unpack(body)
    return Cut(_number(start), _number(end), num_frames, is_whole)


def _read_media(body: bytearray) -> Media:
    duration, above, below, *facts = _MEDIA.unpack(body)
    if not _number(duration) >= 0 or not above or not below or max(facts[:2]) > _MOST_SIDE:
        raise ProtocolError("it sent MEDIA that cannot be")
    return Media(duration, (above, below), *facts)


def _read_failure(body: bytearray) -> Failure:
    return Failure(FAILURES[body[0]], _text(body[1:]))


def _read_damage(body: bytearray) -> Damage:
    return Damage(FAILURES[body[0]], _text(body[1:]))


def _read_ready(body: bytearray) -> Ready:
    return Ready(*_BYTE.unpack(body))


def _read_error(body: bytearray) -> Error:
    return Error(_text(body))


def _number(value: float) -> float:
    if not math.isfinite(value):
        raise ProtocolError("it sent a time that is not a number")
    return value


def _text(body: bytearray) -> str:
    """What would break lines, move a terminal's cursor or turn text around is spelt out."""
    return _UNSHOWN.sub(lambda found: found[0].encode("unicode_escape").decode(), body.decode("utf-8"))


def _jpeg(body: bytearray) -> bytes:
    if not (body.startswith(_JPEG_START) and body.endswith(_JPEG_END)):
        raise ProtocolError("it sent a picture that is no JPEG")
    return bytes(body)


_READERS: dict[Kind, Callable[[bytearray], Record]] = {
    Kind.READY: _read_ready,
    Kind.ALIVE: lambda body: Alive(),
    Kind.FRAME: _read_frame,
    Kind.SEGMENT: _read_segment,
    Kind.PICTURE: _read_picture,
    Kind.FACTS: _read_facts,
    Kind.FAILURE: _read_failure,
    Kind.DAMAGE: _read_damage,
    Kind.DONE: lambda body: Done(),
    Kind.MEMORY: lambda body: OutOfMemory(),
    Kind.ERROR: _read_error,
    Kind.CUT: _read_cut,
    Kind.MEDIA: _read_media,
}
