"""What a library keeps, as Arrow schemas: every store holds the same three tables.

- **items**, one row per searchable segment of video: a whole file, or a range of one. The truth.
- **frames**, the wide part: frame vectors, thumbnail, strip. Append-only, written before its items. A row
  belongs to one item; a row of dense frames (`DENSE`) to all items that are ranges of it.
- **files**, the ledger: what became of every file that was found. Written last.

A file's items, then its ledger row: after a crash in between, the file is read again, its content is
recognised and nothing is encoded twice.

The checks of what goes in and out are here too, so that all stores refuse alike, and so are the steps from an
older format to today's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from gare.errors import LibraryError
from gare.extras import upgrade_advice
from gare.library.store.row_checksums import CHECKSUM_COLUMN, add_checksums

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_VERSION = 3
READABLE_VERSION = 1
"""The oldest format that can be read as it is; what is older is brought up to date first."""


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


def parse_stamp(text: str | None) -> ModelStamp | None:
    """A stamp from its JSON; None where that cannot be read."""
    try:
        return ModelStamp(**json.loads(text or ""))
    except (ValueError, TypeError):
        return None


DENSE = "moments"
"""How the segmentation of dense frames begins. Their rows are blocks of a file at a steady rate."""
MOST_DENSE_FRAMES = 64
"""The most frames of a row of dense frames."""


def is_dense(frames_key: str) -> bool:
    """Whether the row of this key holds dense frames, of which an item has those within its range.

    >>> is_dense("ab12/moments:1/0.000/f00/12"), is_dense("ab12/whole/0.000/f00/12")
    (True, False)
    """
    return f"/{DENSE}:" in frames_key


def is_part(frames_key: str) -> bool:
    """Whether the item of this key is a part of its file, which has been cut into windows, shots or moments.

    >>> is_part("ab12/windows:10/0.000/f00/12"), is_part("ab12/whole/0.000/f00/12")
    (True, False)
    """
    return "/" in frames_key and frames_key.split("/")[1] not in ("whole", "added")


def item_id(path: str, start: float, end: float | None = None) -> str:
    """The name of the segment of `path` that starts at `start` seconds; the same on every run.

    Args:
        end: of a range of dense frames, of which several may start together.

    >>> item_id("/videos/dog.mp4", 0.0)
    'b2dfb3a0f077c5f81304'
    """
    place = f"{path}\n{start:.3f}" if end is None else f"{path}\n{start:.3f}-{end:.3f}"
    return hashlib.blake2b(place.encode("utf-8", "surrogateescape"), digest_size=10).hexdigest()


@lru_cache
def item_schema(stage1_dim: int) -> Any:
    """The columns of items."""
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
    """The columns of frames."""
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("frames_key", pa.string(), nullable=False),  # unique: one per time an item was encoded
            pa.field("vectors", pa.large_binary(), nullable=False),  # float16, frames × dim, little-endian
            pa.field("times", pa.list_(pa.float32()), nullable=False),  # seconds into the file, one per frame
            pa.field("thumbnail", pa.large_binary(), nullable=False),  # JPEGs: `stored_pictures`
            pa.field("strip", pa.large_binary(), nullable=False),  # JPEG: the frames side by side, small
        ]
    )


@lru_cache
def file_schema() -> Any:
    """The columns of the ledger."""
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
            pa.field("split", pa.string(), nullable=False),  # its segmentation: "whole", "window:30", "shots"
            pa.field("checked", pa.timestamp("us", tz="UTC"), nullable=False),
        ]
    )


# --- checks -------------------------------------------------------------------------------------------------


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
    if differences and found.name == expected.name:
        raise LibraryError(
            f"library {uri} was made by model '{found.name}' as it was before it changed: it has "
            f"{'; '.join(differences)}. Encode the library again with 'gare index --model {expected.name}' "
            "(Library.change_model in Python), or choose another --library for it."
        )
    if differences:
        raise LibraryError(
            f"library {uri} was made by model '{found.name}', not by '{expected.name}': it has "
            f"{'; '.join(differences)}. Pass --model {found.name}, or encode the library again with "
            f"'gare index --model {expected.name}', or choose another --library for it."
        )


def checked_items(items: pa.Table, stamp: ModelStamp) -> pa.Table:
    """Items in the columns of the schema, with their checksums; refuses repeated ids and vectors that are not
    finite."""
    items = _conform(items, item_schema(stamp.stage1_dim), "items")
    _check_unique(items["id"].to_pylist(), "items have the same id twice")
    vectors = items["vector"].combine_chunks().flatten().to_numpy()
    if not np.isfinite(vectors).all():
        raise ValueError("item vectors contain NaN or inf")
    return add_checksums(items)


def checked_frames(frames: pa.Table, stamp: ModelStamp) -> pa.Table:
    """Frames in the columns of the schema; refuses repeated keys and vectors of a wrong size."""
    import pyarrow.compute as pc

    frames = _conform(frames, frame_schema(), "frames")
    _check_unique(frames["frames_key"].to_pylist(), "frames have the same frames_key twice")
    sizes = pc.binary_length(frames["vectors"]).to_numpy()
    one = 2 * stamp.dim
    dense = np.array([is_dense(key) for key in frames["frames_key"].to_pylist()], dtype=bool)
    most = np.where(dense, MOST_DENSE_FRAMES, stamp.num_frames)
    if (sizes % one != 0).any() or (sizes == 0).any() or (sizes > one * most).any():
        raise ValueError(
            f"frame vectors must be 1 to {stamp.num_frames} float16 vectors of {stamp.dim} dimensions "
            f"({MOST_DENSE_FRAMES} where they are dense)"
        )
    return frames


def checked_files(files: pa.Table) -> pa.Table:
    """Ledger rows in the columns of the schema; refuses repeated paths."""
    files = _conform(files, file_schema(), "files")
    _check_unique(files["path"].to_pylist(), "files have the same path twice")
    return files


def unfinished_files(files: pa.Table) -> pa.Table:
    """Ledger rows of files whose items may not be the ones that the row speaks of: no file has their size, so
    that the next run looks at them again."""
    import pyarrow as pa

    number = files.schema.get_field_index("size")
    return files.set_column(number, files.schema.field(number), pa.array([-1] * len(files), pa.int64()))


def check_query(vectors: np.ndarray, k: int, stamp: ModelStamp) -> np.ndarray:
    """Query vectors as float32; refuses a wrong shape, NaN, infinity and k below one."""
    queries = np.ascontiguousarray(vectors, dtype=np.float32)
    if queries.ndim != 2 or queries.shape[1] != stamp.stage1_dim:
        raise ValueError(f"queries must be [queries, {stamp.stage1_dim}], not {list(queries.shape)}")
    if not np.isfinite(queries).all():
        raise ValueError("queries contain NaN or inf")
    if k < 1:
        raise ValueError(f"k must be 1 or more, not {k}")
    return queries


def sort_columns(columns: Sequence[str], stamp: ModelStamp) -> tuple[list[str], list[str]]:
    """Columns of items and columns of frames; the key that both have is an item's."""
    item_names, frame_names = [*item_schema(stamp.stage1_dim).names, CHECKSUM_COLUMN], frame_schema().names
    unknown = [name for name in columns if name not in item_names and name not in frame_names]
    if unknown or not columns:
        known = ", ".join(dict.fromkeys([*item_names, *frame_names]))
        raise ValueError(f"no column {', '.join(unknown) or 'was asked for'}; there are {known}")
    items = [name for name in columns if name in item_names]
    return items, [name for name in columns if name not in item_names]


def columns_schema(columns: Sequence[str], stamp: ModelStamp) -> pa.Schema:
    """The schema of a table with these columns of items and frames, or of files."""
    import pyarrow as pa

    # A store of somebody else may keep no checksums: then they are null.
    checksums = pa.schema([pa.field(CHECKSUM_COLUMN, pa.string())])
    schemas = (file_schema(), frame_schema(), item_schema(stamp.stage1_dim), checksums)
    fields = {field.name: field for schema in schemas for field in schema}
    return pa.schema([fields[name] for name in columns])


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


# --- older formats ------------------------------------------------------------------------------------------


class Migratable(Protocol):
    """What a step may do to a store."""

    uri: str

    def add_column(self, table: str, name: str, value: str | bytes) -> None:
        """Add a column with one value in every row, unless it is there already."""
        ...

    def set_schema_version(self, version: int) -> None:
        """Note the version of the format."""


def _add_split_and_strip(store: Migratable) -> None:
    """Version 0 knew whole files only and kept no strip of frames."""
    store.add_column("files", "split", "whole")
    store.add_column("frames", "strip", b"")


def _add_checksums(store: Migratable) -> None:
    """Version 1 kept no checksums of items; empty ones say so."""
    store.add_column("items", CHECKSUM_COLUMN, "")


def _share_frames(store: Migratable) -> None:
    """Version 2 had a row of frames for each item, and so have its items now. The next `gare index` makes
    dense ones, which several items share: an older gare would take all of them for each."""


MIGRATIONS: list[Callable[[Migratable], None]] = [_add_split_and_strip, _add_checksums, _share_frames]
"""Step n turns version n into n + 1. It may be repeated: the version is written after it, so that a kill in
between runs it again."""


def migrate(store: Migratable, found: int, *, read_only: bool) -> tuple[str, ...]:
    """Bring a store to today's version; what was done, in words.

    Raises:
        LibraryError: it is newer than this gare, or too old to be read and open for reading only.
    """
    if found > SCHEMA_VERSION:
        raise LibraryError(
            f"library {store.uri} has format {found}, this gare knows up to {SCHEMA_VERSION}: "
            f"{upgrade_advice()}"
        )
    if read_only and found >= READABLE_VERSION:
        return ()
    if found < SCHEMA_VERSION and read_only:
        raise LibraryError(
            f"library {store.uri} has format {found}, older than {READABLE_VERSION}. Open it once for "
            "writing, with 'gare index': that brings it up to date."
        )
    done = []
    for version in range(found, SCHEMA_VERSION):
        MIGRATIONS[version](store)
        store.set_schema_version(version + 1)
        done.append(f"the library was brought from format {version} to {version + 1}")
    return tuple(done)
