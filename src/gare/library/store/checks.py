"""What goes in and out of any store is checked here, so that all of them refuse alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gare.errors import LibraryError
from gare.library.schema import ModelStamp, file_schema, frame_schema, item_schema

if TYPE_CHECKING:
    import pyarrow as pa


def check_same_model(uri: str, found: ModelStamp, expected: ModelStamp | None) -> None:
    """Refuse another model's library: its vectors cannot be compared."""
    if expected is None:
        return
    differences = [
        f"{name} {theirs}, not {ours}"
        for name, theirs, ours in (
            ("fingerprint", found.fingerprint, expected.fingerprint),
            ("dimensions", found.dim, expected.dim),
            ("stage-1 dimensions", found.stage1_dim, expected.stage1_dim),
            ("frames", found.num_frames, expected.num_frames),
        )
        if theirs != ours
    ]
    if differences:
        raise LibraryError(
            f"library {uri} was made by model '{found.name}', not by '{expected.name}': it has "
            f"{'; '.join(differences)}. Pass --model {found.name}, or choose another --library for "
            f"'{expected.name}' and run 'gare index' there."
        )


def checked_items(items: pa.Table, stamp: ModelStamp) -> pa.Table:
    items = _conform(items, item_schema(stamp.stage1_dim), "items")
    _check_unique(items["id"].to_pylist(), "items have the same id twice")
    vectors = items["vector"].combine_chunks().flatten().to_numpy()
    if not np.isfinite(vectors).all():
        raise ValueError("item vectors contain NaN or inf")
    return items


def checked_frames(frames: pa.Table, stamp: ModelStamp) -> pa.Table:
    import pyarrow.compute as pc

    frames = _conform(frames, frame_schema(), "frames")
    _check_unique(frames["frames_key"].to_pylist(), "frames have the same frames_key twice")
    sizes = pc.binary_length(frames["vectors"]).to_numpy()
    one = 2 * stamp.dim
    if (sizes % one != 0).any() or (sizes == 0).any() or (sizes > one * stamp.num_frames).any():
        raise ValueError(
            f"frame vectors must be 1 to {stamp.num_frames} float16 vectors of {stamp.dim} dimensions"
        )
    return frames


def checked_files(files: pa.Table) -> pa.Table:
    files = _conform(files, file_schema(), "files")
    _check_unique(files["path"].to_pylist(), "files have the same path twice")
    return files


def check_query(vectors: np.ndarray, k: int, stamp: ModelStamp) -> np.ndarray:
    queries = np.ascontiguousarray(vectors, dtype=np.float32)
    if queries.ndim != 2 or queries.shape[1] != stamp.stage1_dim:
        raise ValueError(f"queries must be [queries, {stamp.stage1_dim}], not {list(queries.shape)}")
    if not np.isfinite(queries).all():
        raise ValueError("queries contain NaN or inf")
    if k < 1:
        raise ValueError(f"k must be 1 or more, not {k}")
    return queries


def split_columns(columns: Sequence[str], stamp: ModelStamp) -> tuple[list[str], list[str]]:
    """Columns of items and columns of frames; the key that both have is an item's."""
    item_names, frame_names = item_schema(stamp.stage1_dim).names, frame_schema().names
    unknown = [name for name in columns if name not in item_names and name not in frame_names]
    if unknown or not columns:
        known = ", ".join(dict.fromkeys([*item_names, *frame_names]))
        raise ValueError(f"no column {', '.join(unknown) or 'was asked for'}; there are {known}")
    items = [name for name in columns if name in item_names]
    return items, [name for name in columns if name not in item_names]


def _conform(table: pa.Table, schema: pa.Schema, name: str) -> pa.Table:
    import pyarrow as pa

    missing = [column for column in schema.names if column not in table.column_names]
    if missing:
        raise ValueError(f"{name} lack the columns {', '.join(missing)}")
    try:
        table = table.select(schema.names).cast(schema)
    except (pa.ArrowException, ValueError) as error:
        raise ValueError(f"{name} do not fit the schema of this library: {error}") from error
    empty = [column for column in schema.names if table[column].null_count]
    if empty:
        raise ValueError(f"{name} have empty values in {', '.join(empty)}")
    return table


def _check_unique(values: list[str], message: str) -> None:
    if len(set(values)) != len(values):
        raise ValueError(message)
