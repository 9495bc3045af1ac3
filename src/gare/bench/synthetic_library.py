"""A large library of made-up items, for benchmarks: what it costs to search does not depend on what it shows.

Shapes: V items, F frames, D embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gare.bench.synthetic_vectors import clustered_frames
from gare.data.frame_sampling import sample_indices
from gare.library.index.moment_ranges import moment_ranges
from gare.library.library import Library
from gare.library.search.stage1 import plain_vectors
from gare.library.store.lance_store import LanceStore
from gare.library.store.row_checksums import frames_checksum
from gare.library.store.store_schema import DENSE, file_schema, frame_schema, item_id, item_schema
from gare.model import GARE
from gare.types import VideoFeatures

if TYPE_CHECKING:
    import pyarrow as pa

    from gare.library.store import Store

Say = Callable[[str], None]
_ROWS_AT_ONCE = 16_384  # as many as a fragment of frames has for good: upkeep then rewrites none of them
_ROWS_MADE = 2_048  # at a time, which bounds the memory that it takes
_FILMS = "/films/"
_FILM_S, _BLOCK, _SHOT = 3600, 32, 6  # seconds
_WHEN = datetime(2026, 1, 1, tzinfo=UTC)


def make_library(place: Path | str, model: GARE, num_items: int, say: Say, *, hours: int = 0) -> None:
    """Make the library, or add what is missing of it: short videos of one item, and films with dense frames.

    Args:
        hours: how many films of one hour.
    """
    with Library.open(place, model=model) as library:
        num_films = _count_films(library.store)
        num_short = sum(batch.num_rows for batch in library.store.scan_files(["path"])) - num_films
        if num_short < num_items:
            say(f"making {num_items:,} items in {place}")
            _fill(library.store, num_short, num_items, model.dim, model.config.num_frames, say)
        for film in range(num_films, hours):
            _add_film(library.store, film, model.dim, model.config.num_frames)
            if film % 10 == 9:
                say(f"  {film + 1} hours of film")
        if num_short < num_items or num_films < hours:
            say("building the index")
            if isinstance(library.store, LanceStore):
                library.store.version_age = timedelta(0)  # nobody reads old versions
            library.maintain()


def _count_films(store: Store) -> int:
    paths = (path for batch in store.scan_files(["path"]) for path in batch["path"].to_pylist())
    return sum(path.startswith(_FILMS) for path in paths)


def _add_film(store: Store, number: int, dim: int, num_frames: int) -> None:
    """An hour with a frame a second, in blocks of 32, and the items that indexing makes of such blocks."""
    import pyarrow as pa

    generator = np.random.default_rng([3, number])
    path, content = f"{_FILMS}{number}.mp4", f"{number:030x}ff"
    items, parts = [], []
    for first in range(0, _FILM_S, _BLOCK):
        times = [float(second) for second in range(first, min(first + _BLOCK, _FILM_S))]
        shots_VFD = clustered_frames(generator, -(-len(times) // _SHOT), _SHOT, dim)
        frames_FD = torch.from_numpy(shots_VFD.reshape(-1, dim)[: len(times)])
        vectors = frames_FD.numpy().tobytes()
        end = frames_checksum(vectors, times, b"", b"")
        key = f"{content}/{DENSE}:1/{times[0]:.3f}/{first:012x}/{end}"
        parts.append({"frames_key": key, "vectors": vectors, "times": times, "thumbnail": b"", "strip": b""})
        items += _items_of(path, content, key, times, frames_FD.float(), num_frames)
    store.upsert(
        pa.Table.from_pylist(items, schema=item_schema(dim + 1)),
        pa.Table.from_pylist(parts, schema=frame_schema()),
    )
    line = {"path": path, "size": 1, "mtime_ns": 0, "content": content, "state": "indexed", "error_kind": ""}
    line |= {"error": "", "num_items": len(items), "split": f"{DENSE}:1", "checked": _WHEN}
    store.record_files(pa.Table.from_pylist([line], schema=file_schema()))


def _items_of(
    path: str, content: str, key: str, times: list[float], frames_FD: torch.Tensor, num_frames: int
) -> list[dict[str, Any]]:
    ranges, bounds = moment_ranges(frames_FD), [*times, times[-1] + 1]
    clips = [frames_FD[first:last] for first, last in ranges]
    chosen = VideoFeatures.stack([clip[sample_indices(len(clip), num_frames)] for clip in clips])
    return [
        {
            "id": item_id(path, bounds[first], bounds[last]),
            "path": path,
            "content": content,
            "start": bounds[first],
            "end": bounds[last],
            "file_duration": float(_FILM_S),
            "width": 640,
            "height": 360,
            "modified": _WHEN,
            "added": _WHEN,
            "tags": [],
            "frames_key": key,
            "vector": vector,
        }
        for (first, last), vector in zip(ranges, plain_vectors(chosen).numpy(), strict=True)
    ]


def _fill(store: Store, first: int, num_items: int, dim: int, frames: int, say: Say) -> None:
    import pyarrow as pa

    for start in range(first, num_items, _ROWS_AT_ONCE):
        end = min(start + _ROWS_AT_ONCE, num_items)
        slices = [
            _make_rows(at, min(_ROWS_MADE, end - at), dim, frames) for at in range(start, end, _ROWS_MADE)
        ]
        items, parts, files = (pa.concat_tables(tables) for tables in zip(*slices, strict=True))
        store.upsert(items, parts)
        store.record_files(files)
        say(f"  {end:,}")


def _make_rows(start: int, count: int, dim: int, frames: int) -> tuple[pa.Table, pa.Table, pa.Table]:
    """Items, frames and ledger of so many short videos."""
    import pyarrow as pa

    generator = np.random.default_rng([2, start])  # a making that was interrupted goes on with new vectors
    frames_VFD = clustered_frames(generator, count, frames, dim)
    video = VideoFeatures(torch.from_numpy(frames_VFD).float(), torch.ones(count, frames, dtype=torch.bool))
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
    return (
        pa.table(items, schema=item_schema(dim + 1)),
        pa.table(parts, schema=frame_schema()),
        pa.table(files, schema=file_schema()),
    )
