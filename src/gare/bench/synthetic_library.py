"""A large library of made-up items, for benchmarks: what it costs to search does not depend on what it shows.

Shapes: V items, F frames, D embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from gare.bench.synthetic_vectors import clustered_frames
from gare.library.library import Library
from gare.library.search.stage1 import plain_vectors
from gare.library.store.row_checksums import frames_checksum
from gare.library.store.store_schema import file_schema, frame_schema, item_id, item_schema
from gare.model import GARE
from gare.types import VideoFeatures

if TYPE_CHECKING:
    from gare.library.store import Store

Say = Callable[[str], None]
_ROWS_AT_ONCE = 2_000
_WHEN = datetime(2026, 1, 1, tzinfo=UTC)


def make_library(place: Path, model: GARE, num_items: int, say: Say) -> None:
    """Make the library, or add what is missing of it."""
    with Library.open(place, model=model) as library:
        if len(library) < num_items:
            say(f"making {num_items:,} items in {place}")
            _fill(library.store, num_items, model.dim, model.config.num_frames, say)
            say("building the index")
            library.maintain()


def _fill(store: Store, num_items: int, dim: int, frames: int, say: Say) -> None:
    import pyarrow as pa

    generator = np.random.default_rng(2)
    for start in range(store.count(), num_items, _ROWS_AT_ONCE):
        count = min(_ROWS_AT_ONCE, num_items - start)
        frames_VFD = clustered_frames(generator, count, frames, dim)
        video = VideoFeatures(
            torch.from_numpy(frames_VFD).float(), torch.ones(count, frames, dtype=torch.bool)
        )
        numbers = range(start, start + count)
        paths = [f"/videos/{number // 1000:04d}/{number}.mp4" for number in numbers]
        contents = [f"{number:032x}" for number in numbers]
        vectors = [row.tobytes() for row in frames_VFD]
        times = list(map(float, range(frames)))
        keys = [
            f"{content}/whole/0.000/{content[-12:]}/{frames_checksum(packed, times, b'', b'')}"
            for content, packed in zip(contents, vectors, strict=True)
        ]
        items = {
            "id": [item_id(path, 0.0) for path in paths],
            "path": paths,
            "content": contents,
            "start": [0.0] * count,
            "end": [12.0] * count,
            "file_duration": [12.0] * count,
            "width": [640] * count,
            "height": [360] * count,
            "modified": [_WHEN] * count,
            "added": [_WHEN] * count,
            "tags": [[]] * count,
            "frames_key": keys,
            "vector": list(plain_vectors(video).numpy()),
        }
        parts = {
            "frames_key": keys,
            "vectors": vectors,
            "times": [times] * count,
            "thumbnail": [b""] * count,
            "strip": [b""] * count,
        }
        files = {
            "path": paths,
            "size": [1] * count,
            "mtime_ns": [0] * count,
            "content": contents,
            "state": ["indexed"] * count,
            "error_kind": [""] * count,
            "error": [""] * count,
            "num_items": [1] * count,
            "split": ["whole"] * count,
            "checked": [_WHEN] * count,
        }
        store.upsert(pa.table(items, schema=item_schema(dim + 1)), pa.table(parts, schema=frame_schema()))
        store.record_files(pa.table(files, schema=file_schema()))
        if (start // _ROWS_AT_ONCE) % 10 == 9:
            say(f"  {start + count:,}")
