"""From encoded segments to committed rows: frames and items first, then the ledger.

A file with content that the library has already takes over the rows of that content: nothing is decoded,
nothing encoded. The catalogue knows where they are.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from gare.data.decoder_messages import Facts
from gare.library.index.encode_segments import Encoded, EncodedItem
from gare.library.index.scan import FoundFile
from gare.library.store import Store, fetch_readable
from gare.library.store.row_checksums import (
    CHECKSUM_COLUMN,
    damaged_frame_columns,
    damaged_item_columns,
    frames_checksum,
    vector_bytes,
)
from gare.library.store.store_schema import (
    file_schema,
    frame_schema,
    is_dense,
    item_id,
    item_schema,
    unfinished_files,
)

_MAX_ITEMS = 256
_MAX_BYTES = 32 * 2**20
_MAX_DELETED = 1000
_LEAST_ITEM_S = 0.01  # items follow each other without a gap; less is rounding
_UNIQUE_PARTS = 4  # of a frames key: content, segmentation, start, a random part
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Row = dict[str, Any]


def make_items(
    file: FoundFile,
    content: str,
    facts: Facts,
    encoded: Sequence[tuple[str, EncodedItem]],
    tags: Sequence[str],
) -> list[Row]:
    """The items of a file that was encoded, each with the key of its frames."""
    return [
        {
            "id": _item_id(file.path, item.start, item.end, key),
            "path": file.path,
            "content": content,
            "start": item.start,
            "end": item.end,
            "file_duration": facts.duration,
            "width": facts.width,
            "height": facts.height,
            "modified": _modified_at(file),
            "added": datetime.now(UTC),
            "tags": tags,
            "frames_key": key,
            "vector": item.vector,
        }
        for key, item in encoded
    ]


def _item_id(path: str, start: float, end: float, frames_key: str) -> str:
    return item_id(path, start, end if is_dense(frames_key) else None)


def make_frames(content: str, segmentation: str, segment: Encoded) -> Row:
    """The row of frames of a segment, under a key of its own."""
    row = {
        "vectors": segment.frames,
        "times": segment.times,
        "thumbnail": segment.thumbnail,
        "strip": segment.strip,
    }
    return {"frames_key": _make_frames_key(content, segmentation, segment.start, row), **row}


def _make_frames_key(content: str, segmentation: str, start: float, frames: Row) -> str:
    """A name for one encoding of one segment. It begins with what the vectors depend on, so that they can be
    found again for the same content; then it is made unique; it ends in the checksums of its row."""
    checksum = frames_checksum(frames["vectors"], frames["times"], frames["thumbnail"], frames["strip"])
    return f"{content}/{segmentation}/{start:.3f}/{secrets.token_hex(6)}/{checksum}"


def recipe_of(frames_key: str) -> str:
    """The beginning of the key: what the vectors depend on, content and segmentation."""
    return "/".join(frames_key.split("/")[:2])


def add_frame_checksums(rows: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Items and frames under keys that end in checksums, from rows of items with their frames.

    For libraries that were made before; keys that indexing did not make stay as they are.
    """
    items, frames = [], {}
    for row in rows.to_pylist():
        parts = row["frames_key"].split("/")
        if len(parts) >= _UNIQUE_PARTS:
            end = frames_checksum(row["vectors"], row["times"], row["thumbnail"], row["strip"])
            row["frames_key"] = "/".join([*parts[:_UNIQUE_PARTS], end])
            frames[row["frames_key"]] = {name: row[name] for name in frame_schema().names}
        items.append(row)
    names = [name for name in rows.column_names if name not in frame_schema().names or name == "frames_key"]
    schema = pa.schema([rows.schema.field(name) for name in names])
    return (
        pa.Table.from_pylist([{name: row[name] for name in names} for row in items], schema=schema),
        pa.Table.from_pylist(list(frames.values()), schema=frame_schema()),
    )


def _modified_at(file: FoundFile) -> datetime:
    return _EPOCH + timedelta(microseconds=file.mtime_ns // 1000)


# --- content that the library has already -------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A file whose vectors can be used again."""

    path: str
    item_ids: tuple[str, ...]


class Catalogue:
    """Which items each file has: read when it is first needed, then kept up to date with our own writes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._by_path: dict[str, dict[str, str]] = {}  # path → id → recipe
        self._by_recipe: dict[str, set[str]] = {}  # recipe → paths
        self._missing: dict[tuple[str, str], float] = {}  # path, recipe → seconds that no item has
        self._is_read = False

    def item_ids(self, path: str) -> set[str]:
        """The items of a file."""
        self._read()
        return set(self._by_path.get(path, ()))

    def find(
        self, content: str, segmentation: str, path: str, preferred: Set[str] = frozenset()
    ) -> Source | None:
        """A file with this content and segmentation: that of the path itself, a preferred one, or any.

        One that has lost items, because somebody deleted them, is none: its copies would lack them too.
        """
        self._read()
        recipe = f"{content}/{segmentation}"
        paths = {one for one in self._by_recipe.get(recipe, ()) if self._is_whole(one, recipe)}
        if not paths:
            return None
        source = path if path in paths else min(paths & preferred or paths)
        ids = [id_ for id_, made_by in self._by_path[source].items() if made_by == recipe]
        return Source(source, tuple(sorted(ids)))

    def _is_whole(self, path: str, recipe: str) -> bool:
        if is_dense(f"{recipe}/"):
            return True  # its items overlap, and are deleted together
        return abs(self._missing.get((path, recipe), 0.0)) < _LEAST_ITEM_S

    def replace(self, path: str, items: dict[str, str]) -> None:
        """The file now has these items, and they are all of it: frames key by id."""
        self.forget(path)
        for id_, frames_key in items.items():
            self._add(id_, path, frames_key)

    def forget(self, path: str) -> None:
        """The file has no items any more."""
        self._read()
        for recipe in set(self._by_path.pop(path, {}).values()):
            self._by_recipe[recipe].discard(path)
            self._missing.pop((path, recipe), None)

    def _read(self) -> None:
        if self._is_read:
            return
        self._is_read = True
        columns = ["id", "path", "frames_key", "start", "end", "file_duration"]
        for batch in self._store.scan(columns=columns):
            for row in batch.to_pylist():
                self._add(row["id"], row["path"], row["frames_key"])
                place = row["path"], recipe_of(row["frames_key"])
                missing = self._missing.get(place, row["file_duration"])
                self._missing[place] = missing - (row["end"] - row["start"])

    def _add(self, id_: str, path: str, frames_key: str) -> None:
        recipe = recipe_of(frames_key)
        self._by_path.setdefault(path, {})[id_] = recipe
        self._by_recipe.setdefault(recipe, set()).add(path)


@dataclass(frozen=True)
class Copy:
    """A file, and the one whose rows it takes over; both may be the same, when only its date changed."""

    file: FoundFile
    content: str
    source: Source
    is_move: bool
    """The source is gone: it is the same file under a new name, and keeps its tags and date of adding."""


def copy_rows(
    store: Store, copies: Sequence[Copy], segmentation: str, tags: Sequence[str]
) -> Iterator[tuple[Copy, list[Row], list[Row]]]:
    """Items and frames of each file; no items where the store has those of its source no more.

    The source may have got another content since it was chosen, from another process: its items then have the
    same ids and other vectors. So the content is compared in the very rows that are copied.
    """
    if not copies:
        return
    item_names = item_schema(store.stamp.stage1_dim).names
    columns = list(dict.fromkeys([*item_names, *frame_schema().names, CHECKSUM_COLUMN]))
    ids = list(dict.fromkeys(item for copy in copies for item in copy.source.item_ids))
    rows = {row["id"]: row for row in _intact_rows(store, ids, columns)}
    for copy in copies:
        sources = [rows[item] for item in copy.source.item_ids if item in rows]
        keys = {row["frames_key"]: _copied_key(copy, row, segmentation) for row in sources}
        is_whole = len(sources) == len(copy.source.item_ids)
        if not is_whole or any(not _is_of(row, copy.content, segmentation) for row in sources):
            yield copy, [], []
            continue
        pairs = [_copy_row(copy, row, keys, tags) for row in sources]
        frames = {row["frames_key"]: row for _, row in pairs}
        is_itself = copy.source.path == copy.file.path
        yield copy, [item for item, _ in pairs], [] if is_itself else list(frames.values())


def _intact_rows(store: Store, ids: Sequence[str], columns: Sequence[str]) -> Iterator[Row]:
    """The rows of these items that are as they were written; what is damaged is made anew."""
    table, _ = fetch_readable(store, ids, columns)
    vectors = vector_bytes(table["vector"])
    for row, vector in zip(table.to_pylist(), vectors, strict=True):
        damage = damaged_item_columns(row, vector) or damaged_frame_columns(row["frames_key"], row)
        if not damage:
            del row[CHECKSUM_COLUMN]
            yield row


def _is_of(row: Row, content: str, segmentation: str) -> bool:
    return row["content"] == content and recipe_of(row["frames_key"]) == f"{content}/{segmentation}"


def _copied_key(copy: Copy, row: Row, segmentation: str) -> str:
    """The key of the frames of the copy."""
    if copy.source.path == copy.file.path:
        return str(row["frames_key"])
    return _make_frames_key(copy.content, segmentation, row["start"], row)


def _copy_row(copy: Copy, row: Row, keys: dict[str, str], tags: Sequence[str]) -> tuple[Row, Row]:
    is_itself = copy.source.path == copy.file.path
    key = keys[row["frames_key"]]
    frames = {**{name: row[name] for name in frame_schema().names}, "frames_key": key}
    is_same_file = is_itself or copy.is_move
    item = {
        **{name: value for name, value in row.items() if name not in frames},
        "id": _item_id(copy.file.path, row["start"], row["end"], key),
        "path": copy.file.path,
        "content": copy.content,
        "modified": _modified_at(copy.file),
        "added": row["added"] if is_same_file else datetime.now(UTC),
        "tags": sorted({*(row["tags"] if is_same_file else ()), *tags}),
        "frames_key": key,
    }
    return item, frames


# --- writing ------------------------------------------------------------------------------------------------


def delete_items(store: Store, items: Sequence[str]) -> int:
    """Take items out of a store; how many there were.

    First the ledger counts fewer items, so that what was deleted is not taken for a loss. After a crash in
    between there are more items than it counts, which is no loss.
    """
    items = _with_their_file(store, list(dict.fromkeys(items)))
    found = Counter(store.fetch(items, ["path"])["path"].to_pylist())
    paths = pa.array(list(found), pa.string())
    lines = [
        {**line, "num_items": max(0, line["num_items"] - found[line["path"]])}
        for batch in store.scan_files()
        for line in batch.filter(pc.is_in(batch["path"], paths)).to_pylist()
    ]
    if lines:
        store.record_files(pa.Table.from_pylist(lines, schema=file_schema()))
    return store.delete(items)


def _with_their_file(store: Store, items: Sequence[str]) -> list[str]:
    """These items, and of files with dense frames all others: their ranges overlap."""
    rows = store.fetch(items, ["path", "frames_key"]).to_pylist()
    paths = sorted({row["path"] for row in rows if is_dense(row["frames_key"])})
    return list(dict.fromkeys([*items, *(sorted(store.items_of(paths)) if paths else [])]))


class Writer:
    """Collects whole files and commits them together; after a commit nothing of them can be lost."""

    def __init__(self, store: Store, catalogue: Catalogue, max_seconds: float, known: Set[str]) -> None:
        self._store = store
        self._known = known  # files of which the ledger has a line
        self._catalogue = catalogue
        self._max_seconds = max_seconds
        self._items: list[Row] = []
        self._frames: list[Row] = []
        self._files: list[Row] = []
        self._num_bytes = 0
        self._oldest = time.monotonic()

    def add_indexed(
        self, file: FoundFile, content: str, segmentation: str, items: Sequence[Row], frames: Sequence[Row]
    ) -> None:
        """All items of a file. What the store has of it besides goes."""
        self._catalogue.replace(file.path, {row["id"]: row["frames_key"] for row in items})
        self._items += items
        self.add_frames(frames)
        self._add_file(file, content, segmentation, num_items=len(items))

    def add_frames(self, frames: Sequence[Row]) -> None:
        """Rows of frames, of files that may not be complete: a long film is not held in memory.

        Where their file fails, nobody refers to them, and `maintain` removes them.
        """
        self._frames += frames
        self._num_bytes += sum(map(_num_bytes, frames))
        if self._num_bytes >= _MAX_BYTES and not self._files:
            self._store.upsert(item_schema(self._store.stamp.stage1_dim).empty_table(), _table(self._frames))
            self._set_frames([])

    def drop_frames(self, keys: Set[str]) -> None:
        """Forget rows of frames that are written, or of a file that failed."""
        self._set_frames([row for row in self._frames if row["frames_key"] not in keys])

    def _set_frames(self, frames: list[Row]) -> None:
        self._frames = frames
        self._num_bytes = sum(map(_num_bytes, frames))

    def add_failed(self, file: FoundFile, content: str, segmentation: str, kind: str, message: str) -> None:
        """A file that could not be indexed: its items go, its ledger row says why."""
        self._catalogue.forget(file.path)
        self._add_file(file, content, segmentation, state="failed", error_kind=kind, error=message)

    def commit_if_due(self) -> None:
        """Commit when enough has been collected, or for long enough."""
        if self._files and (
            len(self._items) >= _MAX_ITEMS
            or self._num_bytes >= _MAX_BYTES
            or time.monotonic() - self._oldest >= self._max_seconds
        ):
            self.commit()

    def commit(self) -> None:
        """Write all that was collected: frames and items, then the ledger."""
        if not self._files:
            return
        files = pa.Table.from_pylist(self._files, schema=file_schema())
        known = [row for row in self._files if row["path"] in self._known]
        if (
            known
        ):  # after a crash between items and ledger, the old line must not call the new items unchanged
            self._store.record_files(unfinished_files(pa.Table.from_pylist(known, schema=file_schema())))
        keys = {row["frames_key"] for row in self._items}
        frames = [row for row in self._frames if row["frames_key"] in keys]
        self._store.replace_files(
            pa.Table.from_pylist(self._items, schema=item_schema(self._store.stamp.stage1_dim)),
            _table(frames),
            files,
        )
        self.drop_frames(keys)  # those of files that are not complete wait for their items
        self._items, self._files = [], []

    def forget(self, paths: Sequence[str]) -> None:
        """Files that are gone: first their items, then their lines in the ledger.

        The lines are marked unfinished before: after a crash in between, a file that came back must not be
        called unchanged.
        """
        self.commit()
        for start in range(0, len(paths), _MAX_DELETED):
            some = paths[start : start + _MAX_DELETED]
            if ids := sorted(self._store.items_of(some)):
                self._store.record_files(unfinished_files(_bare_lines(some)))
                self._store.delete(ids)
            self._store.forget_files(some)
            for path in some:
                self._catalogue.forget(path)

    def _add_file(
        self,
        file: FoundFile,
        content: str,
        segmentation: str,
        *,
        num_items: int = 0,
        state: str = "indexed",
        error_kind: str = "",
        error: str = "",
    ) -> None:
        if not self._files:
            self._oldest = time.monotonic()
        self._files.append(
            {
                "path": file.path,
                "size": file.size,
                "mtime_ns": file.mtime_ns,
                "content": content,
                "state": state,
                "error_kind": error_kind,
                "error": error,
                "num_items": num_items,
                "split": segmentation,
                "checked": datetime.now(UTC),
            }
        )


def _table(frames: Sequence[Row]) -> pa.Table:
    return pa.Table.from_pylist(list(frames), schema=frame_schema())


def _num_bytes(frames: Row) -> int:
    return len(frames["vectors"]) + len(frames["thumbnail"]) + len(frames["strip"])


def _bare_lines(paths: Sequence[str]) -> pa.Table:
    """Lines of the ledger that say nothing of a file but its name."""
    now = datetime.now(UTC)
    empty = {"size": 0, "mtime_ns": 0, "content": "", "state": "indexed", "error_kind": "", "error": ""}
    rows = [{"path": path, **empty, "num_items": 0, "split": "", "checked": now} for path in paths]
    return pa.Table.from_pylist(rows, schema=file_schema())
