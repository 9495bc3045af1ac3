"""Vectors out of a library, and into it: for other programs, and for those who encode elsewhere.

The file is Parquet, a row an item, written batch by batch and complete or not at all. Its metadata names the
model, so that vectors of another model are refused when they come back.

Items that were added by their vectors are no files: the ledger does not know them, so no run of `gare index`
removes them. A run that finds a file under the path of such an item encodes the file and takes its place.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gare.atomic import replacing
from gare.errors import LibraryError
from gare.library.filters import Filter
from gare.library.search.item_frames import SCORE_COLUMNS
from gare.library.search.stage1 import stage1_vectors
from gare.library.store import ModelStamp, Store
from gare.library.store.row_checksums import frames_checksum
from gare.library.store.store_protocol import damaged_library
from gare.library.store.store_schema import frame_schema, item_id, item_schema
from gare.library.store.stored_frames import intact_rows, own_frames, pack_frames, unpack_frames
from gare.model import GARE
from gare.types import TextFeatures, VideoFeatures

if TYPE_CHECKING:
    import pyarrow as pa

METADATA_KEY = b"gare"
_FACTS = ("id", "path", "start", "end", "file_duration", "width", "height", "tags")
_ROWS_AT_ONCE = 512
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MOST_FLOAT16 = 65504.0


# --- out ----------------------------------------------------------------------------------------------------


def fetch_vectors(store: Store, ids: Sequence[str]) -> np.ndarray:
    """The stage-1 vectors of these items, in this order: float32 [items, stage1_dim]."""
    table = _fetch(store, ids, ["id", "vector"])
    return _matrix(table["vector"], store.stamp.stage1_dim)


def fetch_features(store: Store, ids: Sequence[str], device: torch.device) -> VideoFeatures:
    """The frame vectors of these items, as a model scores them."""
    table = _fetch(store, ids, SCORE_COLUMNS)
    _check_intact(store, table)
    table = own_frames(table, store.stamp.num_frames)
    return unpack_frames(table["vectors"], store.stamp.dim, device)


def _check_intact(store: Store, rows: pa.Table) -> None:
    """Refuse vectors that are not as they were written."""
    good = intact_rows(rows)
    if not all(good):
        item = rows["id"][good.index(False)].as_py()
        raise damaged_library(store.uri, f"the vectors of item {item} are not those that were written")


def export_vectors(
    store: Store, path: str | os.PathLike[str], *, where: Filter | None = None, overwrite: bool = False
) -> int:
    """Write `path`; how many items it has. Memory does not grow with the library."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    target = Path(path).expanduser()
    if target.suffix not in ("", ".parquet", ".pq"):
        raise LibraryError(f"vectors are written as Parquet; name the file {target.stem}.parquet")
    _check_free(target, overwrite)
    schema = _export_schema(store.stamp)
    columns = [*_FACTS, "vector", "frames_key", "vectors", "times"]
    num_items = 0
    try:
        with replacing(target) as part:
            with pq.ParquetWriter(part, schema, compression="zstd") as writer:
                for batch in store.scan(where=where, columns=columns):
                    for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                        rows = pa.Table.from_batches([batch.slice(start, _ROWS_AT_ONCE)])
                        _check_intact(store, rows)
                        rows = own_frames(rows, store.stamp.num_frames)
                        writer.write_table(_exported(rows, store.stamp, schema))
                        num_items += rows.num_rows
            _check_free(target, overwrite)  # another one may have written it meanwhile
    except OSError as error:
        raise LibraryError(f"{target} cannot be written: {error.strerror or error}") from None
    return num_items


def _check_free(target: Path, overwrite: bool) -> None:
    if target.is_dir():
        raise LibraryError(f"{target} is a folder; name a file, such as {target / 'vectors.parquet'}")
    if target.exists() and not overwrite:
        raise LibraryError(
            f"{target} exists already; choose another name, or replace it with --overwrite "
            "(in Python, overwrite=True)"
        )


def _export_schema(stamp: ModelStamp) -> pa.Schema:
    import pyarrow as pa

    facts = [item_schema(stamp.stage1_dim).field(name) for name in _FACTS]
    return pa.schema(
        [
            *facts,
            pa.field("vector", pa.list_(pa.float32(), stamp.stage1_dim), nullable=False),
            # float32, which every reader knows; the numbers are those of the library's float16.
            pa.field("frames", pa.list_(pa.list_(pa.float32())), nullable=False),
            pa.field("times", pa.list_(pa.float32()), nullable=False),
        ],
        metadata={METADATA_KEY: json.dumps({"format": 1, "model": asdict(stamp)}).encode()},
    )


def _exported(rows: pa.Table, stamp: ModelStamp, schema: pa.Schema) -> pa.Table:
    """Rows of a store as rows of the file: bytes of float16 become lists of numbers."""
    import pyarrow as pa

    vectors = rows["vectors"].combine_chunks()
    counts = np.array([len(value) // (2 * stamp.dim) for value in vectors.to_pylist()], dtype=np.int32)
    numbers = np.concatenate([np.frombuffer(value, "<f2") for value in vectors.to_pylist()])
    per_frame = np.arange(0, len(numbers) + 1, stamp.dim, dtype=np.int32)
    frames = pa.ListArray.from_arrays(per_frame, pa.array(numbers.astype(np.float32)))
    per_item = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
    columns = [rows[name] for name in (*_FACTS, "vector")]
    return pa.table([*columns, pa.ListArray.from_arrays(per_item, frames), rows["times"]], schema=schema)


def _fetch(store: Store, ids: Sequence[str], columns: Sequence[str]) -> pa.Table:
    if isinstance(ids, str):
        raise LibraryError(f"give a list of ids; for a single one ['{ids}']")
    ids = list(ids)
    if not ids:
        raise LibraryError("give the id of at least one item")
    table = store.fetch(ids, columns)
    if len(table) != len(ids):
        unknown = sorted({*ids} - {*table["id"].to_pylist()})
        raise LibraryError(f"{store.uri} has no item {', '.join(unknown[:3])}; 'gare search' shows ids")
    return table


def _matrix(column: pa.ChunkedArray, width: int) -> np.ndarray:
    flat = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return np.array(flat, dtype=np.float32).reshape(-1, width)


# --- in -----------------------------------------------------------------------------------------------------


def add_vectors(store: Store, model: GARE, vectors: Any, facts: Mapping[str, Any]) -> int:
    """Add items by the vectors of their frames; how many. `Library.add` says what is taken."""
    if isinstance(vectors, str | os.PathLike):
        if given := [name for name, value in facts.items() if value is not None]:
            raise LibraryError(f"a file of vectors brings its own {', '.join(given)}; leave them out")
        batches = _read_file(Path(vectors).expanduser(), store, model)
    else:
        batches = iter([_rows_of(vectors, facts)])
    seen: set[str] = set()
    for rows in batches:
        _add(store, model, rows, seen)
    return len(seen)


def _rows_of(vectors: Any, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Arrays of frame vectors, with lists of what is known about them, as rows."""
    if isinstance(vectors, TextFeatures):
        raise LibraryError("these are the vectors of texts; an item has those of the frames of a video")
    if isinstance(vectors, VideoFeatures):
        frames_VFD, mask_VF = vectors.frames_VFD.cpu().numpy(), vectors.mask_VF.cpu().numpy()
        clips = [frames_FD[mask_F] for frames_FD, mask_F in zip(frames_VFD, mask_VF, strict=True)]
    elif getattr(vectors, "features", None) is not None:  # what GARE.encode returned
        return _rows_of(vectors.features, facts)
    else:
        clips = list(vectors)
    rows: list[dict[str, Any]] = [{"frames": clip} for clip in clips]
    for name, values in facts.items():
        if values is None:
            continue
        if isinstance(values, str) or len(values) != len(rows):
            raise LibraryError(f"{name} must be a list of {len(rows)}, one for each item")
        if name == "tags" and any(isinstance(value, str) for value in values):
            raise LibraryError("the tags of an item are a list of words: tags=[['holiday'], …]")
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    return rows


def _read_file(path: Path, store: Store, model: GARE) -> Iterator[list[dict[str, Any]]]:
    """The rows of a Parquet file, some at a time; refuses one that another model made."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise LibraryError(f"{path} is not a Parquet file that can be read: {error}") from None
    with file:
        noted = (file.schema_arrow.metadata or {}).get(METADATA_KEY)
        if noted is not None:
            made_by = json.loads(noted)["model"]
            known = made_by["fingerprint"] == store.stamp.fingerprint
            if not known and not model.is_known_as(made_by["fingerprint"]):
                raise LibraryError(
                    f"the vectors in {path} were made by model '{made_by['name']}', those of {store.uri} by "
                    f"'{store.stamp.name}': they cannot be compared. Encode the videos with the latter."
                )
        missing = {"path", "frames"} - set(file.schema_arrow.names)
        if missing:
            raise LibraryError(f"{path} lacks the columns {', '.join(sorted(missing))}")
        known_columns = [*_FACTS, "vector", "frames", "times"]
        wanted = [name for name in known_columns if name in file.schema_arrow.names]
        # The stage-1 vector of a file that does not name its model is not trusted: it is made anew.
        wanted = [name for name in wanted if name != "vector" or noted is not None]
        for batch in file.iter_batches(_ROWS_AT_ONCE, columns=wanted):
            yield batch.to_pylist()


def _add(store: Store, model: GARE, rows: Sequence[dict[str, Any]], seen: set[str]) -> None:
    import pyarrow as pa

    if not rows:
        return
    clips = [_checked_frames(row, store.stamp) for row in rows]
    video = VideoFeatures.stack([torch.from_numpy(clip) for clip in clips]).to(model.device)
    with torch.no_grad():
        own_VE = stage1_vectors(model, video).float().cpu().numpy()
    items, frames = [], []
    for row, clip, own_E, packed in zip(rows, clips, own_VE, pack_frames(video), strict=True):
        item = _item(row, clip, own_E, packed, store.stamp)
        times = item.pop("times")
        if item["id"] in seen:
            raise LibraryError(f"{row['path']} comes twice at {item['start']} s; an item needs its own start")
        seen.add(item["id"])
        items.append(item)
        frames.append(
            {
                "frames_key": item["frames_key"],
                "vectors": packed,
                "times": times,
                "thumbnail": b"",
                "strip": b"",
            }
        )
    store.upsert(
        pa.Table.from_pylist(items, schema=item_schema(store.stamp.stage1_dim)),
        pa.Table.from_pylist(frames, schema=frame_schema()),
    )


def _checked_frames(row: Mapping[str, Any], stamp: ModelStamp) -> np.ndarray:
    """The frame vectors of a row as float32 [F, D]."""
    name = row.get("path") or "an item"
    if not isinstance(row.get("path"), str) or not row["path"]:
        raise LibraryError("every item needs a path, or another name that is its own: paths=[…]")
    given = row["frames"]
    array = given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else given
    try:
        frames_FD = np.atleast_2d(np.array(array, dtype=np.float32))
    except (TypeError, ValueError):
        raise LibraryError(f"the vectors of {name} are not numbers in a table [frames, dimensions]") from None
    if frames_FD.ndim != 2 or frames_FD.shape[1] != stamp.dim:
        raise LibraryError(
            f"the vectors of {name} are {list(frames_FD.shape)}; this library has frames of {stamp.dim} "
            f"dimensions, made by '{stamp.name}'"
        )
    if not 1 <= len(frames_FD) <= stamp.num_frames:
        raise LibraryError(f"{name} has {len(frames_FD)} frames; an item has 1 to {stamp.num_frames}")
    if not np.isfinite(frames_FD).all():
        raise LibraryError(f"the vectors of {name} contain NaN or inf")
    if np.abs(frames_FD).max() > _MOST_FLOAT16 or not np.abs(frames_FD).sum(axis=1).all():
        raise LibraryError(f"the vectors of {name} are zero, or too large for half precision")
    return frames_FD


def _item(
    row: Mapping[str, Any], clip: np.ndarray, own_E: np.ndarray, packed: bytes, stamp: ModelStamp
) -> dict[str, Any]:
    path = row["path"]
    start = float(row["start"] if row.get("start") is not None else 0.0)
    end = float(row["end"] if row.get("end") is not None else start)
    if not (math.isfinite(start) and math.isfinite(end) and 0 <= start <= end):
        raise LibraryError(f"{path} goes from {start} to {end} seconds; give 0 ≤ start ≤ end")
    vector = own_E if row.get("vector") is None else np.array(row["vector"], dtype=np.float32)
    if vector.shape != (stamp.stage1_dim,) or not np.isfinite(vector).all():
        raise LibraryError(f"the stage-1 vector of {path} must be {stamp.stage1_dim} finite numbers")
    times = _times(row, clip, start, end)
    return {
        "id": _id(path, start, end, row.get("id")),
        "path": path,
        "content": "",  # its bytes were never read
        "start": start,
        "end": end,
        "file_duration": float(row.get("file_duration") or end),
        "width": int(row.get("width") or 0),
        "height": int(row.get("height") or 0),
        "modified": _modified(path),
        "added": datetime.now(UTC),
        "tags": sorted(set(row.get("tags") or [])),
        "frames_key": f"/added/{start:.3f}/{secrets.token_hex(6)}/{frames_checksum(packed, times, b'', b'')}",
        "vector": vector,
        "times": times,
    }


def _id(path: str, start: float, end: float, noted: str | None) -> str:
    """The id of an item: of several ranges of dense frames that start together, each keeps its own."""
    as_range = item_id(path, start, end)
    return as_range if noted == as_range else item_id(path, start)


def _times(row: Mapping[str, Any], clip: np.ndarray, start: float, end: float) -> list[float]:
    """The moment of each frame; evenly spaced where they are not given."""
    if row.get("times") is None:
        return [start + (end - start) * (place + 0.5) / len(clip) for place in range(len(clip))]
    times = [float(moment) for moment in row["times"]]
    if len(times) != len(clip) or not all(map(math.isfinite, times)):
        raise LibraryError(f"{row['path']} has {len(clip)} frames and {len(times)} times; one for each")
    return times


def _modified(path: str) -> datetime:
    """The date of a video file that is here: the server plays a file only if it has the date of its item.

    Any other path has no date, so that nobody is given a file because vectors came under its name.
    """
    from gare.data.containers import VIDEO_SUFFIXES

    if os.path.isabs(path) and os.path.splitext(path)[1].lower() in VIDEO_SUFFIXES and os.path.isfile(path):
        return _EPOCH + timedelta(microseconds=os.stat(path).st_mtime_ns // 1000)
    return _EPOCH
