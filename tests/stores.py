"""Rows for stores."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa

from gare.library.store import Store
from gare.library.store.store_schema import ModelStamp, file_schema, frame_schema, item_id, item_schema

STAMP = ModelStamp("tiny", "f00d", dim=8, stage1_dim=9, num_frames=4)
MOMENT = datetime(2024, 3, 1, 12, 0, tzinfo=UTC)


def make_rows(
    paths: Sequence[str],
    *,
    seed: int = 0,
    version: str = "1",
    stamp: ModelStamp = STAMP,
    **columns: Sequence[Any],
) -> tuple[pa.Table, pa.Table]:
    """One item for each path, and its frames; `columns` replaces what is made up here."""
    rng = np.random.default_rng(seed)
    count = len(paths)
    start = columns.get("start", [0.0] * count)
    ids = [item_id(path, float(second)) for path, second in zip(paths, start, strict=True)]
    keys = [f"{name}-{version}" for name in ids]
    vectors = rng.normal(size=(count, stamp.stage1_dim)).astype(np.float32)
    values: dict[str, Any] = {
        "id": ids,
        "path": list(paths),
        "content": [f"hash of {path}" for path in paths],
        "start": start,
        "end": [float(10 + number) for number in range(count)],
        "file_duration": [60.0] * count,
        "width": [640] * count,
        "height": [360] * count,
        "modified": [MOMENT + timedelta(days=number) for number in range(count)],
        "added": [MOMENT] * count,
        "tags": [[] for _ in paths],
        "frames_key": keys,
        "vector": list(vectors),
    }
    items = pa.table({**values, **columns}, schema=item_schema(stamp.stage1_dim))
    blobs = rng.normal(size=(count, stamp.num_frames, stamp.dim)).astype(np.float16)
    frames = {
        "frames_key": values["frames_key"] if "frames_key" not in columns else columns["frames_key"],
        "vectors": [blob.tobytes() for blob in blobs],
        "times": [[float(number) for number in range(stamp.num_frames)]] * count,
        "thumbnail": [f"thumbnail {version} of {path}".encode() for path in paths],
        "strip": [b"strip"] * count,
    }
    return items, pa.table(frames, schema=frame_schema())


def make_files(paths: Sequence[str], *, state: str = "indexed", error: str = "") -> pa.Table:
    rows = [
        {
            "path": path,
            "size": 10,
            "mtime_ns": 1_700_000_000_000_000_000 + number,
            "content": f"hash of {path}",
            "state": state,
            "error_kind": "corrupt" if error else "",
            "error": error,
            "num_items": 1,
            "split": "whole",
            "checked": MOMENT,
        }
        for number, path in enumerate(paths)
    ]
    return pa.Table.from_pylist(rows, schema=file_schema())


def read_all(store: Store, columns: Sequence[str] | None = None) -> pa.Table:
    """Every item, ordered by id."""
    schema = item_schema(store.stamp.stage1_dim)
    batches = list(store.scan(columns=columns))
    if columns is None:
        batches = [batch.select(schema.names).cast(schema) for batch in batches]
        return pa.Table.from_batches(batches, schema).sort_by("id").combine_chunks()
    return pa.Table.from_batches(batches).sort_by("id")
