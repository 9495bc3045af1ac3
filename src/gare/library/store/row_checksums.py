"""Checksums of stored rows: what was written is what is read, or it is known.

Everything that a search or the page reads has one:

| what | where its checksum is | checked |
| --- | --- | --- |
| frame vectors | end of `frames_key`: sum and CRC-32 | the sum by searches, both by `gare check` |
| times | end of `frames_key`: CRC-32 | when a hit is made |
| thumbnail, strip | end of `frames_key`: CRC-32 | when the page asks for them |
| what a hit shows of an item | `items.checksum`, first third | when a hit is made |
| the rest of an item | `items.checksum`, second third | by `gare check` |
| stage-1 vector | `items.checksum`, last third | by `gare check`, `gare audit` |

The sum reads the vectors as numbers of 64 bits: one flipped bit changes it, and 256 items are checked in a
fraction of a millisecond. It does not see two numbers that changed places; the CRC-32 does.

Rows of older libraries have fewer checksums or none; they pass, and `gare check` says how many they are.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

CHECKSUM_COLUMN = "checksum"
SHOWN_COLUMNS = (
    "id",
    "path",
    "content",
    "start",
    "end",
    "width",
    "height",
    "modified",
    "tags",
    "frames_key",
)
"""The columns of an item that the first third of its checksum speaks for: those of a hit."""
REST_COLUMNS = ("file_duration", "added")
"""The columns that the second third speaks for."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NUM_PARTS = 5  # of a key that ends in checksums
_SUM_DIGITS = 16
_NO_SUM = -1
_CRC_DIGITS = 8
_FRAME_COLUMNS = ("vectors", "times", "thumbnail", "strip")  # in the order of their CRCs in a key

Row = Mapping[str, Any]


# --- frames -------------------------------------------------------------------------------------------------


def frames_checksum(vectors: bytes, times: Sequence[float], thumbnail: bytes, strip: bytes) -> str:
    """The end of the key of a row of frames.

    >>> frames_checksum(b"\\1\\0\\0\\0\\0\\0\\0\\0\\2", [], b"", b"")
    '00000000000000031f7c61c1000000000000000000000000'
    """
    return f"{vectors_sum(vectors):016x}" + "".join(
        f"{zlib.crc32(part):08x}" for part in (vectors, _time_bytes(times), thumbnail, strip)
    )


def vectors_sum(vectors: bytes) -> int:
    """The sum of the bytes as numbers of 64 bits."""
    padded = vectors + bytes(-len(vectors) % 8)
    return int(np.frombuffer(padded, dtype="<u8").sum(dtype=np.uint64))


def expected_sum(frames_key: str) -> int | None:
    """What the sum of the vectors must be; None where the key has no checksum."""
    parts = frames_key.split("/")
    if len(parts) != _NUM_PARTS:
        return None
    try:
        return int(parts[-1][:_SUM_DIGITS], 16)
    except ValueError:
        return _NO_SUM  # the key itself is damaged


def has_checksums(frames_key: str) -> bool:
    """Whether the key speaks for every column of its row."""
    parts = frames_key.split("/")
    return len(parts) == _NUM_PARTS and len(parts[-1]) == _SUM_DIGITS + len(_FRAME_COLUMNS) * _CRC_DIGITS


def damaged_frame_columns(frames_key: str, row: Row) -> list[str]:
    """Which of the columns of frames in this row are not as they were written under this key."""
    damaged = []
    crcs = frames_key.rpartition("/")[2][_SUM_DIGITS:] if has_checksums(frames_key) else ""
    for number, name in enumerate(_FRAME_COLUMNS):
        if name not in row:
            continue
        value = _time_bytes(row[name]) if name == "times" else row[name]
        is_good = not crcs or crcs[8 * number : 8 * number + 8] == _hex_crc(value)
        if name == "vectors":
            is_good = is_good and expected_sum(frames_key) in (None, vectors_sum(value))
        if not is_good:
            damaged.append(name)
    return damaged


def _time_bytes(times: Sequence[float]) -> bytes:
    return np.asarray(times, dtype="<f4").tobytes()


# --- items --------------------------------------------------------------------------------------------------


def shown_checksum(row: Row) -> str:
    """The first third of an item's checksum, over `SHOWN_COLUMNS`."""
    return _crc([row[name] for name in SHOWN_COLUMNS])


def add_checksums(items: pa.Table) -> pa.Table:
    """The items with their checksums, as a store keeps them."""
    import pyarrow as pa

    names = list(dict.fromkeys([*SHOWN_COLUMNS, *REST_COLUMNS]))
    rows = items.select(names).to_pylist()
    vectors = vector_bytes(items["vector"])
    values = [
        shown_checksum(row) + _rest_checksum(row) + _hex_crc(vector)
        for row, vector in zip(rows, vectors, strict=True)
    ]
    if CHECKSUM_COLUMN in items.column_names:
        items = items.drop_columns([CHECKSUM_COLUMN])
    return items.append_column(pa.field(CHECKSUM_COLUMN, pa.string()), pa.array(values, pa.string()))


def damaged_item_columns(row: Row, vector: bytes | None = None) -> list[str]:
    """What of an item is not as it was written: "row", "vector", both or nothing.

    Args:
        row: with `checksum`, and with `SHOWN_COLUMNS`, `REST_COLUMNS` or both: what it has is compared.
        vector: the bytes of the stage-1 vector, to compare it too.
    """
    expected = row[CHECKSUM_COLUMN]
    if not expected:
        return []
    is_good = "path" not in row or expected[:_CRC_DIGITS] == shown_checksum(row)
    if "added" in row:
        is_good = is_good and expected[_CRC_DIGITS : 2 * _CRC_DIGITS] == _rest_checksum(row)
    damaged = [] if is_good else ["row"]
    if vector is not None and expected[2 * _CRC_DIGITS :] != _hex_crc(vector):
        damaged.append("vector")
    return damaged


def vector_bytes(vectors: pa.ChunkedArray | pa.Array) -> list[bytes]:
    """The stage-1 vectors of a column, each as bytes."""
    import pyarrow as pa

    array = vectors.combine_chunks() if isinstance(vectors, pa.ChunkedArray) else vectors
    if not len(array):
        return []
    numbers = array.flatten().to_numpy(zero_copy_only=False).astype("<f4", copy=False)
    return [row.tobytes() for row in numbers.reshape(len(array), -1)]


def _rest_checksum(row: Row) -> str:
    return _crc([row[name] for name in REST_COLUMNS])


def _crc(values: list[Any]) -> str:
    text = json.dumps([_plain(value) for value in values], separators=(",", ":"))
    return _hex_crc(text.replace(_NUL, _NO_NUL).encode())  # PostgreSQL has no text with a NUL in it


def _hex_crc(content: bytes) -> str:
    return f"{zlib.crc32(content):08x}"


_NUL, _NO_NUL = "\\u0000", "\\ufffd"  # as JSON spells them


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return (value - _EPOCH) // timedelta(microseconds=1)
    return list(value) if isinstance(value, tuple) else value
