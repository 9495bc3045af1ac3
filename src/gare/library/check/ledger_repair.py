"""Writes the ledger anew from the items, so that the next `gare index` encodes nothing a second time."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

from gare.library.check.library_rows import ItemKey, LedgerRow, LibraryRows, read_rows, split_of
from gare.library.store import Store, fetch_readable
from gare.library.store.store_schema import file_schema

_ROWS_AT_ONCE = 256
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def mend_ledger(store: Store, on_progress: Any) -> int:
    """Write lines for files that have items and no line, or one that disagrees with them; how many.

    A line that asks for another look stays: the next `gare index` follows it.
    """
    on_progress("comparing rows", 0, 1)
    rows = read_rows(store)
    wrong = [
        path
        for path, ids in rows.by_path.items()
        if all(rows.items[item].is_of_a_file for item in ids)
        if (known := rows.ledger.get(path)) is None
        or (not known.is_unfinished and not _agrees(known, [rows.items[item] for item in ids]))
    ]
    lines = []
    for first in range(0, len(wrong), _ROWS_AT_ONCE):
        some = {rows.by_path[path][0]: path for path in wrong[first : first + _ROWS_AT_ONCE]}
        table, _ = fetch_readable(store, list(some), ["id", "modified"])
        dates = dict(zip(table["id"].to_pylist(), table["modified"].to_pylist(), strict=True))
        lines += [_line(rows, path, dates.get(item)) for item, path in some.items()]
    if lines:
        store.record_files(pa.Table.from_pylist(lines, schema=file_schema()))
    return len(lines)


def ask_for_another_look(store: Store, path: str, known: LedgerRow) -> None:
    """Have the next `gare index` look at a file, whatever its size and date."""
    row = _to_row(path, known._replace(size=-1))
    store.record_files(pa.Table.from_pylist([row], schema=file_schema()))


def _line(rows: LibraryRows, path: str, modified: datetime | None) -> dict[str, Any]:
    """The size is that of the file if its date is still the item's; else the next run looks again."""
    keys = [rows.items[item] for item in rows.by_path[path]]
    size, mtime_ns = -1, 0
    is_one = len({(key.content, key.recipe) for key in keys}) == 1
    if modified is not None and is_one and os.path.exists(path):
        status = os.stat(path)
        if (modified - _EPOCH) // timedelta(microseconds=1) == status.st_mtime_ns // 1000:
            size, mtime_ns = status.st_size, status.st_mtime_ns
    known = LedgerRow(size, mtime_ns, keys[0].content, "indexed", len(keys), split_of(rows, path))
    return _to_row(path, known)


def _agrees(known: LedgerRow, keys: list[ItemKey]) -> bool:
    """Whether a line of the ledger speaks of these items."""
    recipes = {key.recipe for key in keys} - {None}
    return (
        known.state == "indexed"
        and known.num_items >= len(keys)
        and all(key.content == known.content for key in keys)
        and (not recipes or recipes == {f"{known.content}/{known.split}"})
    )


def _to_row(path: str, known: LedgerRow) -> dict[str, Any]:
    return {
        "path": path,
        "size": known.size,
        "mtime_ns": known.mtime_ns,
        "content": known.content,
        "state": known.state,
        "error_kind": "",
        "error": "",
        "num_items": known.num_items,
        "split": known.split,
        "checked": datetime.now(UTC),
    }
