"""Rows of a file from those of another with the same content: nothing is decoded, nothing encoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from gare.library.catalogue import Source, make_frames_key
from gare.library.schema import frame_schema, item_id, item_schema
from gare.library.store.base import Store
from gare.library.walk import FoundFile
from gare.library.writer import Row

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Copy:
    """A file, and the one whose rows it takes over; both may be the same, when only its date changed."""

    file: FoundFile
    content: str
    source: Source
    is_move: bool
    """The source is gone: it is the same file under a new name, and keeps its tags and date of adding."""


def modified_at(file: FoundFile) -> datetime:
    return _EPOCH + timedelta(microseconds=file.mtime_ns // 1000)


def copy_rows(
    store: Store, copies: Sequence[Copy], split: str, tags: Sequence[str]
) -> Iterator[tuple[Copy, list[Row], list[Row]]]:
    """Items and frames of each file; no items where the source's are not in the store any more."""
    if not copies:
        return
    columns = list(dict.fromkeys([*item_schema(store.stamp.stage1_dim).names, *frame_schema().names]))
    ids = list(dict.fromkeys(item for copy in copies for item in copy.source.item_ids))
    rows = {row["id"]: row for row in store.fetch(ids, columns).to_pylist()}
    for copy in copies:
        sources = [rows[item] for item in copy.source.item_ids if item in rows]
        if len(sources) != len(copy.source.item_ids):
            yield copy, [], []
            continue
        pairs = [_copy_row(copy, row, split, tags) for row in sources]
        is_itself = copy.source.path == copy.file.path
        yield copy, [item for item, _ in pairs], [] if is_itself else [frames for _, frames in pairs]


def _copy_row(copy: Copy, row: Row, split: str, tags: Sequence[str]) -> tuple[Row, Row]:
    is_itself = copy.source.path == copy.file.path
    key = row["frames_key"] if is_itself else make_frames_key(copy.content, split, row["start"])
    frames = {**{name: row[name] for name in frame_schema().names}, "frames_key": key}
    is_same_file = is_itself or copy.is_move
    item = {
        **{name: value for name, value in row.items() if name not in frames},
        "id": item_id(copy.file.path, row["start"]),
        "path": copy.file.path,
        "content": copy.content,
        "modified": modified_at(copy.file),
        "added": row["added"] if is_same_file else datetime.now(UTC),
        "tags": sorted({*(row["tags"] if is_same_file else ()), *tags}),
        "frames_key": key,
    }
    return item, frames
