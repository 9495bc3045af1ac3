"""The protocol of decoders, read from any bytes: a message or a clean refusal, in bounded memory."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gare.data.decoder_messages import (
    FAILURES,
    HEADER,
    Alive,
    Bounds,
    Cut,
    Damage,
    Done,
    Error,
    Facts,
    Failure,
    Frame,
    Kind,
    Media,
    OutOfMemory,
    Picture,
    ProtocolError,
    Ready,
    Record,
    SegmentEnd,
    read_body,
    read_header,
    write_record,
)

BOUNDS = Bounds(frame_bytes=3 * 16 * 16, picture_bytes=200)
MOST = 3000
times = st.floats(allow_nan=False, allow_infinity=False)
jpegs = st.binary(max_size=100).map(lambda middle: b"\xff\xd8\xff" + middle + b"\xff\xd9")
texts = st.text(st.characters(exclude_categories=["Cc", "Cs", "Cf", "Zl", "Zp"]), max_size=300)
kinds = st.sampled_from(FAILURES)
sides = st.integers(1, 16)
frames = st.tuples(sides, sides).flatmap(lambda size: arrays(np.uint8, (*size, 3)))
records = st.one_of(
    st.just(Alive()),
    st.just(Done()),
    st.just(OutOfMemory()),
    st.builds(Ready, st.integers(0, 255)),
    st.builds(Frame, times, frames),
    st.builds(SegmentEnd, times, times, st.integers(0, 2**32 - 1), jpegs, jpegs),
    st.builds(Picture, times, jpegs),
    st.builds(Facts, st.floats(0, 1e12), st.integers(0, 2**20), st.integers(0, 2**20)),
    st.builds(Failure, kinds, texts),
    st.builds(Damage, kinds, texts),
    st.builds(Error, texts),
    st.builds(Cut, times, times, st.integers(0, 2**32 - 1), st.booleans()),
    st.builds(
        Media,
        st.floats(0, 1e12),
        st.tuples(st.integers(1, 2**32 - 1), st.integers(1, 2**32 - 1)),
        st.integers(0, 2**20),
        st.integers(0, 2**20),
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**16 - 1),
        st.integers(0, 2**16 - 1),
        st.booleans(),
        st.booleans(),
        st.integers(0, 2**64 - 1),
    ),
)


def read_all(data: bytes) -> list[Record]:
    """Every message of some bytes, as the pool reads them from a socket, up to what is cut off or refused."""
    found: list[Record] = []
    while len(data) >= HEADER.size:
        kind, length = read_header(data[: HEADER.size], BOUNDS)
        assert length <= MOST
        body, data = data[HEADER.size : HEADER.size + length], data[HEADER.size + length :]
        if len(body) < length:
            break
        found.append(read_body(kind, bytearray(body)))
    return found


def read_or_refuse(data: bytes) -> list[Record] | None:
    """None where it is refused. An error of any other type is the failure that these tests look for."""
    try:
        return read_all(data)
    except ProtocolError:
        return None


def same(a: Record, b: Record) -> bool:
    if isinstance(a, Frame) and isinstance(b, Frame):
        return a.time == b.time and np.array_equal(a.pixels, b.pixels)
    return a == b


@given(st.lists(records, max_size=6))
def test_what_is_written_is_read(written: list[Record]) -> None:
    found = read_all(b"".join(bytes(part) for record in written for part in write_record(record)))
    assert len(found) == len(written)
    assert all(map(same, found, written))


@settings(max_examples=400)
@given(st.binary(max_size=400))
def test_any_bytes_are_messages_or_are_refused(data: bytes) -> None:
    read_or_refuse(data)


@settings(max_examples=400)
@given(st.sampled_from(Kind), st.binary(max_size=400))
def test_any_body_is_a_message_or_is_refused(kind: Kind, body: bytes) -> None:
    """Headers that are right, so that the bodies are reached."""
    found = read_or_refuse(HEADER.pack(kind, len(body)) + body)
    if found is None:
        return
    (record,) = found
    for name in ("time", "start", "end", "duration"):
        assert math.isfinite(getattr(record, name, 0.0))
    if isinstance(record, Frame):
        assert record.pixels.nbytes <= BOUNDS.frame_bytes
        assert record.pixels.shape[2] == 3


@settings(max_examples=300)
@given(st.lists(records, min_size=1, max_size=3), st.integers(0), st.integers(0, 255), st.data())
def test_messages_with_one_byte_changed_are_messages_or_refused(
    written: list[Record], place: int, value: int, data: st.DataObject
) -> None:
    raw = bytearray(b"".join(bytes(part) for record in written for part in write_record(record)))
    raw[place % len(raw)] = value
    read_or_refuse(bytes(raw[: data.draw(st.integers(0, len(raw)))]))


@given(st.integers(0, 255), st.integers(0, 2**32 - 1))
def test_no_header_makes_a_reader_allocate_more_than_it_asked_for(kind: int, length: int) -> None:
    tracemalloc.start()
    try:
        assert read_header(HEADER.pack(kind, length), BOUNDS)[1] <= MOST
    except ProtocolError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 100_000


def test_what_was_not_asked_for_has_no_room() -> None:
    for kind in (Kind.FRAME, Kind.SEGMENT, Kind.PICTURE):
        assert Bounds().most(kind) == 0
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not a time"):
            list(write_record(Facts(bad, 0, 0)))
