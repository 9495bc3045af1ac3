"""What a library holds, as the page tells it: how many videos, how many hours, in which folders."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from gare.library.library import Library
from gare.library.store.read_deadline import checked

_OLD_S = 20.0
_PATIENCE = 20  # times as long as a reading takes, before a changed library is read again


@dataclass(frozen=True)
class Contents:
    """Videos are files: a film has many items, and is one video."""

    num_videos: int = 0
    seconds: float = 0.0
    folders: tuple[tuple[str, int], ...] = ()
    """Path and number of videos, by path."""


class ContentsList:
    """Reads the contents, and again when they changed or are old."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._mutex = threading.Lock()
        self._contents = Contents()
        self._num_items: int | None = None
        self._read_at = self._took = 0.0

    def get(self, num_items: int) -> Contents:
        """The contents; `num_items` is how many items there are now."""
        with self._mutex:
            age = time.monotonic() - self._read_at
            is_changed = num_items != self._num_items and age > _PATIENCE * self._took
            if self._num_items is None or is_changed or age > _OLD_S:
                started = time.monotonic()
                self._contents = self._read()
                self._num_items, self._read_at = num_items, time.monotonic()
                self._took = self._read_at - started
            return self._contents

    def forget(self) -> None:
        """Read the contents again when they are next asked for."""
        self._num_items = None

    def _read(self) -> Contents:
        import pyarrow as pa

        batches = list(checked(self._library.store.scan(columns=["path", "file_duration"])))
        if not batches:
            return Contents()
        table = pa.Table.from_batches(batches).group_by("path").aggregate([("file_duration", "max")])
        folders: dict[str, int] = {}
        for path in table["path"].to_pylist():
            folder = path.rpartition("/")[0] or "/"
            folders[folder] = folders.get(folder, 0) + 1
        seconds = sum(table["file_duration_max"].to_pylist())
        return Contents(table.num_rows, seconds, tuple(sorted(folders.items())))
