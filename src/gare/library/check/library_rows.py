"""Items, frames, ledger and notes of a library, and whether they fit together. No bulk data is read.

What a crash leaves behind is no damage: frames without item, an item whose file is not in the ledger yet, a
ledger row that asks for another look. The next `gare index` finishes it.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from gare.data.object_storage import is_remote
from gare.errors import LibraryError
from gare.library.check.check_report import Finding
from gare.library.index.commit import recipe_of
from gare.library.index.segment import parse_segmentation
from gare.library.search.stage1 import AUDIT_NOTE
from gare.library.store import Store
from gare.library.store.row_checksums import CHECKSUM_COLUMN, has_checksums
from gare.library.store.store_schema import is_dense, item_id

_KEY_PARTS = 4  # of a key that was made by indexing: content, segmentation, start, a random part


class ItemKey(NamedTuple):
    """What an item is and where its frames are."""

    path: str
    content: str
    start: float
    end: float
    frames_key: str
    has_checksum: bool

    @property
    def is_of_a_file(self) -> bool:
        """Whether it was made of a file; other items were added by their vectors (`Library.add`)."""
        return bool(self.content)

    @property
    def recipe(self) -> str | None:
        """Content and segmentation that its frames were made of; None where the key does not tell."""
        parts = self.frames_key.split("/")
        return recipe_of(self.frames_key) if len(parts) >= _KEY_PARTS else None


class LedgerRow(NamedTuple):
    """A line of the ledger."""

    size: int
    mtime_ns: int
    content: str
    state: str
    num_items: int
    split: str

    @property
    def is_unfinished(self) -> bool:
        """The next `gare index` looks at the file again, whatever it finds."""
        return self.size < 0


@dataclass
class LibraryRows:
    """The narrow columns of a whole library."""

    items: dict[str, ItemKey] = field(default_factory=dict)
    by_path: dict[str, list[str]] = field(default_factory=dict)
    ledger: dict[str, LedgerRow] = field(default_factory=dict)
    frames: set[str] | None = None
    notes: dict[str, str] = field(default_factory=dict)
    counts_deletions: bool = False


def read_rows(store: Store) -> LibraryRows:
    """Read them: items before frames, so that an item that is being written is not called incomplete."""
    rows = LibraryRows(counts_deletions=store.counts_deletions)
    columns = ["path", "size", "mtime_ns", "content", "state", "num_items", "split"]
    for batch in store.scan_files(columns):
        for path, *values in zip(*(batch[name].to_pylist() for name in columns), strict=True):
            rows.ledger[path] = LedgerRow(*values)
    names = ["id", "path", "content", "start", "end", "frames_key", CHECKSUM_COLUMN]
    for batch in store.scan(columns=names):
        for item, path, content, start, end, key, checksum in zip(
            *(batch[name].to_pylist() for name in names), strict=True
        ):
            rows.items[item] = ItemKey(path, content, start, end, key, bool(checksum))
    for item, key in rows.items.items():
        rows.by_path.setdefault(key.path, []).append(item)
    rows.frames = store.frames_keys()
    rows.notes = store.get_notes()
    return rows


def find_mismatches(rows: LibraryRows) -> Iterator[Finding]:
    """What does not fit together, and what is worth knowing."""
    yield from _check_items(rows)
    yield from _check_files(rows)
    yield from _check_notes(rows.notes)
    if rows.frames is not None:
        used = {key.frames_key for key in rows.items.values()}
        if orphans := len(rows.frames - used):
            yield Finding("orphaned_frames", f"{orphans:,} rows of frames belong to no item")
    unchecked = sum(map(lacks_checksums, rows.items.values()))
    if unchecked:
        yield Finding(
            "unchecked", f"{unchecked:,} items were written without checksums for all of their data"
        )


def lacks_checksums(key: ItemKey) -> bool:
    """Whether some data of an item has no checksum that it could have."""
    return not key.has_checksum or (key.recipe is not None and not has_checksums(key.frames_key))


def _check_items(rows: LibraryRows) -> Iterator[Finding]:
    for item, key in rows.items.items():
        if rows.frames is not None and key.frames_key not in rows.frames:
            message = f"item {item} of {key.path} has no frames"
            yield Finding("item_without_frames", message, key.path, item)
        if key.recipe is None:
            continue  # not made by indexing: its maker names items and frames
        if item != item_id(key.path, key.start, key.end if is_dense(key.frames_key) else None):
            message = f"item {item} says that it is {key.path} at {key.start:.3f} s, and has another id"
            yield Finding("wrong_id", message, key.path, item)
        if not key.frames_key.startswith(f"{key.content}/"):
            message = f"item {item} of {key.path} refers to frames of another content"
            yield Finding("wrong_key", message, key.path, item)


def _check_files(rows: LibraryRows) -> Iterator[Finding]:
    num_of_files = sum(key.is_of_a_file for key in rows.items.values())
    if num_of_files and not rows.ledger:
        yield Finding("lost_ledger", f"the ledger is empty, and there are {num_of_files:,} items of files")
    for path, ids in rows.by_path.items():
        recipes = {rows.items[item].recipe for item in ids} - {None}
        if len(recipes) > 1 or len({rows.items[item].content for item in ids}) > 1:
            yield Finding(
                "mixed_items", f"{path} has items of {max(len(recipes), 2)} encodings at once", path
            )
        known = rows.ledger.get(path)
        if known is None and rows.ledger and any(rows.items[item].is_of_a_file for item in ids):
            yield Finding("item_without_ledger", f"{path} has items and no line in the ledger", path)
    for path, known in rows.ledger.items():
        ids = rows.by_path.get(path, [])
        if known.is_unfinished:
            yield Finding("unfinished_file", f"{path} is looked at again by the next 'gare index'", path)
        else:
            yield from _compare(path, known, [rows.items[item] for item in ids], rows.counts_deletions)


def _compare(path: str, known: LedgerRow, items: list[ItemKey], counts_deletions: bool) -> Iterator[Finding]:
    if known.state != "indexed":
        if items:
            message = f"{path} has {len(items)} items, and the ledger says that it failed"
            yield Finding("ledger_mismatch", message, path)
        return
    recipes = {item.recipe for item in items} - {None}
    expected = f"{known.content}/{known.split}"
    if any(item.content != known.content for item in items) or (recipes and recipes != {expected}):
        message = f"{path}: content or segmentation of its items is not that of the ledger"
        yield Finding("ledger_mismatch", message, path)
    if len(items) > known.num_items:
        message = f"{path} has {len(items)} items, the ledger counts {known.num_items}"
        yield Finding("extra_items", message, path)
    if len(items) < known.num_items:
        message = f"{path} has {len(items)} items, the ledger counts {known.num_items}"
        is_lost = counts_deletions and os.path.exists(path)
        yield Finding("lost_items" if is_lost else "deleted_items", message, path)


def _check_notes(notes: dict[str, str]) -> Iterator[Finding]:
    for name, value in notes.items():
        if not is_good_note(name, value):
            yield Finding("bad_note", f"the note '{name}' cannot be read")


def is_good_note(name: str, value: str) -> bool:
    """Whether a note is what its reader expects."""
    try:
        if name == "folders":
            folders = json.loads(value)
            return isinstance(folders, list) and all(isinstance(folder, str) for folder in folders)
        if name == AUDIT_NOTE:
            audit = json.loads(value)
            return int(audit["candidates"]) > 0 and int(audit["num_items"]) >= 0
        if name == "split":
            parse_segmentation(value)
    except (ValueError, KeyError, TypeError, LibraryError):
        return False
    return True


def find_file_changes(rows: LibraryRows) -> Iterator[Finding]:
    """Compare the ledger with the files on the disk, by size and date; objects are left out."""
    for path, known in rows.ledger.items():
        if known.state != "indexed" or known.is_unfinished or is_remote(path):
            continue
        try:
            status = os.stat(path)
        except OSError:
            yield Finding("missing_file", f"{path} is not there, or cannot be read", path)
            continue
        if (status.st_size, status.st_mtime_ns) != (known.size, known.mtime_ns):
            yield Finding("changed_file", f"{path} has changed since it was indexed", path)


def split_of(rows: LibraryRows, path: str) -> str:
    """How a file was segmented: what its items say, else the ledger, else the library."""
    keys = [rows.items[item] for item in rows.by_path.get(path, [])]
    recipes = Counter(key.recipe.partition("/")[2] for key in keys if key.recipe)
    if recipes:
        return recipes.most_common(1)[0][0]
    known = rows.ledger.get(path)
    return known.split if known is not None else rows.notes.get("split", "whole")
