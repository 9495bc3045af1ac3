"""What was found out about files goes into the store in batches: frames and items, then the ledger."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from gare.library.catalogue import Catalogue
from gare.library.schema import file_schema, frame_schema, item_schema
from gare.library.store.base import Store
from gare.library.walk import FoundFile

_MAX_ITEMS = 256
_MAX_BYTES = 32 * 2**20
_MAX_DELETED = 1000

Row = dict[str, Any]


class Writer:
    """Collects whole files and commits them together; after a commit nothing of them can be lost."""

    def __init__(self, store: Store, catalogue: Catalogue, max_seconds: float) -> None:
        self._store = store
        self._catalogue = catalogue
        self._max_seconds = max_seconds
        self._items: list[Row] = []
        self._frames: list[Row] = []
        self._files: list[Row] = []
        self._stale_ids: list[str] = []
        self._num_bytes = 0
        self._oldest = time.monotonic()

    def add_indexed(
        self, file: FoundFile, content: str, split: str, items: Sequence[Row], frames: Sequence[Row]
    ) -> None:
        """All items of a file. What the store has of it besides goes."""
        self._replace(file.path, items)
        self._items += items
        self._frames += frames
        self._num_bytes += sum(
            len(row["vectors"]) + len(row["thumbnail"]) + len(row["strip"]) for row in frames
        )
        self._add_file(file, content, split, num_items=len(items))

    def add_failed(self, file: FoundFile, content: str, split: str, kind: str, message: str) -> None:
        self._replace(file.path, ())
        self._add_file(file, content, split, state="failed", error_kind=kind, error=message)

    def commit_if_due(self) -> None:
        if self._files and (
            len(self._items) >= _MAX_ITEMS
            or self._num_bytes >= _MAX_BYTES
            or time.monotonic() - self._oldest >= self._max_seconds
        ):
            self.commit()

    def commit(self) -> None:
        if not self._files:
            return
        if self._items:
            width = self._store.stamp.stage1_dim
            self._store.upsert(
                pa.Table.from_pylist(self._items, schema=item_schema(width)),
                pa.Table.from_pylist(self._frames, schema=frame_schema()),
            )
        if self._stale_ids:
            self._store.delete(self._stale_ids)
        self._store.record_files(pa.Table.from_pylist(self._files, schema=file_schema()))
        self._items, self._frames, self._files, self._stale_ids = [], [], [], []
        self._num_bytes = 0

    def forget(self, paths: Sequence[str]) -> None:
        """Files that are gone: first their items, then their lines in the ledger."""
        self.commit()
        for start in range(0, len(paths), _MAX_DELETED):
            some = paths[start : start + _MAX_DELETED]
            ids = sorted({item_id for path in some for item_id in self._catalogue.item_ids(path)})
            if ids:
                self._store.delete(ids)
            self._store.forget_files(some)
            for path in some:
                self._catalogue.forget(path)

    def _replace(self, path: str, items: Sequence[Row]) -> None:
        self._stale_ids += sorted(self._catalogue.item_ids(path) - {row["id"] for row in items})
        self._catalogue.replace(path, {row["id"]: row["frames_key"] for row in items})

    def _add_file(
        self,
        file: FoundFile,
        content: str,
        split: str,
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
                "split": split,
                "checked": datetime.now(UTC),
            }
        )
