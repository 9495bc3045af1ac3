"""What a library keeps, as Arrow schemas: every store holds the same three tables.

- **items**, one row per searchable stretch of video: a whole file, or a window or shot of one. The truth.
- **frames**, the wide part of an item: frame vectors, thumbnail, strip. Append-only, written before its item.
- **files**, the ledger: what became of every file that was looked at. Written last.

A file's items, then its ledger row: after a crash in between, the file is looked at again, its content is
recognised and nothing is encoded twice.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class ModelStamp:
    """Which model made the vectors. A store refuses vectors of another one."""

    name: str
    """What to pass to `GARE.from_pretrained`: "gare-mini", a folder, a hub id."""
    fingerprint: str
    """Hash of configuration and weights."""
    dim: int
    """Dimensions of a frame vector."""
    stage1_dim: int
    """Dimensions of the vector that finds candidates."""
    num_frames: int
    """Frames taken of each item, at most."""


def item_id(path: str, start: float) -> str:
    """The name of the stretch of `path` that starts at `start` seconds; the same on every run.

    >>> item_id("/videos/dog.mp4", 0.0)
    'b2dfb3a0f077c5f81304'
    """
    return hashlib.blake2b(
        f"{path}\n{start:.3f}".encode("utf-8", "surrogateescape"), digest_size=10
    ).hexdigest()


@lru_cache
def item_schema(stage1_dim: int) -> Any:
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("id", pa.string(), nullable=False),
            pa.field("path", pa.string(), nullable=False),  # absolute, POSIX separators
            pa.field("content", pa.string(), nullable=False),  # hash of the file's bytes
            pa.field("start", pa.float64(), nullable=False),  # seconds into the file
            pa.field("end", pa.float64(), nullable=False),
            pa.field("file_duration", pa.float64(), nullable=False),
            pa.field("width", pa.int32(), nullable=False),
            pa.field("height", pa.int32(), nullable=False),
            pa.field("modified", pa.timestamp("us", tz="UTC"), nullable=False),
            pa.field("added", pa.timestamp("us", tz="UTC"), nullable=False),
            pa.field("tags", pa.list_(pa.string()), nullable=False),
            pa.field("frames_key", pa.string(), nullable=False),  # its row in frames
            pa.field(
                "vector", pa.list_(pa.float32(), stage1_dim), nullable=False
            ),  # finds candidates by inner product
        ]
    )


@lru_cache
def frame_schema() -> Any:
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("frames_key", pa.string(), nullable=False),  # unique: one per time an item was encoded
            pa.field("vectors", pa.large_binary(), nullable=False),  # float16, frames × dim, little-endian
            pa.field("times", pa.list_(pa.float32()), nullable=False),  # seconds into the file, one per frame
            pa.field("thumbnail", pa.large_binary(), nullable=False),  # JPEG
            pa.field("strip", pa.large_binary(), nullable=False),  # JPEG: the frames side by side, small
        ]
    )


@lru_cache
def file_schema() -> Any:
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("path", pa.string(), nullable=False),
            pa.field("size", pa.int64(), nullable=False),
            pa.field("mtime_ns", pa.int64(), nullable=False),
            pa.field("content", pa.string(), nullable=False),  # "" where the bytes could not be read
            pa.field("state", pa.string(), nullable=False),  # indexed | failed
            pa.field("error_kind", pa.string(), nullable=False),  # "" when indexed
            pa.field("error", pa.string(), nullable=False),
            pa.field("num_items", pa.int32(), nullable=False),
            pa.field("split", pa.string(), nullable=False),  # how it was cut: "whole", "window:30", "shots"
            pa.field("checked", pa.timestamp("us", tz="UTC"), nullable=False),
        ]
    )
