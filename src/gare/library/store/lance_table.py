"""One Lance table: reads see the newest version, writes are atomic, flushed and repeated when they collide.

In a folder writers take turns, and what a commit refers to is on the disk before the commit is. On object
storage a put is durable by itself and Lance's own conflict checks keep writers apart.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gare.errors import LibraryError
from gare.library.store.durable import Flusher, broken_manifests, flush_path, set_aside
from gare.library.store.failures import damaged, explained, with_retries
from gare.library.store.lance_filter import quote
from gare.library.store.lance_rows import RowMap
from gare.library.store.locks import FolderLock

if TYPE_CHECKING:
    import pyarrow as pa

_REMOTE_REFRESH_S = 1.0  # asking object storage for the newest version costs a round trip
_PRIMARY_KEY = {"lance-schema:unenforced-primary-key": "true"}  # two writers of one key then collide


@dataclass
class Place:
    """A folder or a prefix on object storage that holds the tables of one library."""

    uri: str
    read_only: bool
    options: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path | None:
        return None if "://" in self.uri else Path(self.uri)

    @cached_property
    def lock(self) -> FolderLock | None:
        return FolderLock(self.folder / ".write-lock") if self.folder else None

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Hold whatever a writer must hold here."""
        if self.read_only:
            raise LibraryError(f"library {self.uri} is open for reading only; open it for writing first")
        with explained(self.uri), self.lock.held() if self.lock else contextlib.nullcontext():
            yield


@dataclass(frozen=True)
class Snapshot:
    """One version of a table; it stays readable while others write."""

    dataset: Any
    key_columns: tuple[str, ...]
    before: list[RowMap] = field(default_factory=list)

    @cached_property
    def rows(self) -> RowMap:
        rows = RowMap(self.dataset, self.key_columns, self.before[0] if self.before else None)
        self.before[:] = [rows]
        return rows


class LanceTable:
    """See the module.

    Args:
        key_columns: short string columns to keep in memory; the first is the key, unique in the table.
    """

    def __init__(self, place: Place, name: str, key_columns: tuple[str, ...]) -> None:
        self.place = place
        self.name = name
        self.key = key_columns[0]
        self.uri = f"{place.uri.rstrip('/')}/{name}.lance"
        self.key_columns = key_columns
        self._snapshot: Snapshot | None = None
        self._checked = 0.0
        self._mutex = threading.Lock()
        self._flusher = Flusher(Path(self.uri)) if place.folder else None

    # Opening

    def exists(self) -> bool:
        try:
            self.snapshot()
        except FileNotFoundError:
            return False
        return True

    def create(self, schema: pa.Schema, rows: list[dict[str, Any]] | None = None) -> None:
        """Make the table, with these rows; one that another process made meanwhile is left as it is."""
        import lance
        import pyarrow as pa

        number = schema.get_field_index(self.key)
        schema = schema.set(number, schema.field(number).with_metadata(_PRIMARY_KEY))
        table = pa.Table.from_pylist(rows or [], schema=schema)
        with self.place.writing():
            try:
                lance.write_dataset(table, self.uri, mode="create", storage_options=self.place.options)
            except OSError as error:
                if "already exists" not in str(error):
                    raise
            self._flush()
            if self.place.folder:
                flush_path(self.place.folder)

    def mend(self) -> list[str]:
        """Set a newest manifest aside that a power cut left unfinished; what was done, in words."""
        if not self.place.folder:
            return []
        broken = broken_manifests(Path(self.uri))
        if broken and self.place.read_only:
            raise LibraryError(
                f"the newest version of {self.uri} is cut short, as after a power cut. Open the library "
                "once for writing, with 'gare index': that repairs it."
            )
        if not broken:
            return []
        with self.place.writing():  # and look again: another process may have mended it
            return [set_aside(manifest) for manifest in broken_manifests(Path(self.uri))]

    # Reading

    def snapshot(self, *, fresh: bool = False) -> Snapshot:
        """The newest version. On object storage it may be a second old, unless it must be fresh."""
        with self._mutex, explained(self.place.uri):
            now = time.monotonic()
            if self._snapshot is None:
                self._snapshot = Snapshot(self._open(), self.key_columns)
            elif fresh or self.place.folder or now - self._checked > _REMOTE_REFRESH_S:
                held = self._snapshot.dataset
                newest = held.latest_version
                if newest != held.version:
                    dataset = held.checkout_version(newest)
                    self._snapshot = Snapshot(dataset, self.key_columns, self._snapshot.before)
            else:
                return self._snapshot
            self._checked = now
            return self._snapshot

    def _open(self) -> Any:
        import lance

        try:
            return lance.dataset(self.uri, storage_options=self.place.options)
        except ValueError as error:
            if "was not found" in str(error):
                raise FileNotFoundError(self.uri) from None
            raise damaged(self.place.uri, error) from error

    # Writing

    def _newest(self) -> Any:
        """A handle for one write, which moves it on to the version it makes; snapshots must not move."""
        dataset = self.snapshot(fresh=True).dataset
        return dataset.checkout_version(dataset.version)

    def merge(self, rows: pa.Table) -> None:
        """Add rows; those whose key is there already replace it."""
        self._merge(rows, lambda builder: builder.when_matched_update_all().when_not_matched_insert_all())

    def remove(self, keys: Sequence[str]) -> int:
        import pyarrow as pa

        rows = pa.table({self.key: pa.array(list(dict.fromkeys(keys)), pa.string())})
        stats = self._merge(rows, lambda builder: builder.when_matched_delete())
        return int(stats["num_deleted_rows"])

    def append(self, rows: pa.Table) -> None:
        import lance
        from lance.fragment import write_fragments

        def attempt() -> None:
            dataset = self._newest()
            if self._flusher:
                transaction = write_fragments(rows, dataset, mode="append", return_transaction=True)
                self._commit(dataset, transaction)
            else:
                lance.write_dataset(rows, dataset, mode="append", storage_options=self.place.options)

        with self.place.writing():
            with_retries(attempt)
            self.snapshot(fresh=True)

    def _merge(self, rows: pa.Table, rule: Any) -> dict[str, int]:
        def attempt() -> dict[str, int]:
            dataset = self._newest()
            builder = rule(dataset.merge_insert(self.key))
            if not self._flusher:
                return builder.conflict_retries(10).execute(rows)  # type: ignore[no-any-return]
            transaction, stats = builder.execute_uncommitted(rows)
            self._commit(dataset, transaction)
            return stats  # type: ignore[no-any-return]

        with self.place.writing():
            stats = with_retries(attempt)
            self.snapshot(fresh=True)
            return stats

    def _commit(self, dataset: Any, transaction: Any) -> None:
        import lance

        self._flush()
        lance.LanceDataset.commit(dataset, transaction)
        self._flush()

    def _flush(self) -> None:
        if self._flusher:
            self._flusher.flush()

    # Upkeep

    def compact(self, *, rows_per_fragment: int) -> int:
        """Join small fragments, one group at a time so that other writers get their turn; how many went."""
        from lance.optimize import Compaction

        options: Any = {"target_rows_per_fragment": rows_per_fragment, "num_threads": 1}

        def attempt() -> int:
            dataset = self._newest()
            tasks = Compaction.plan(dataset, options).tasks
            if not tasks:
                return 0
            rewritten = tasks[0].execute(dataset)
            self._flush()
            metrics = Compaction.commit(dataset, [rewritten])
            self._flush()
            return int(metrics.fragments_removed)

        total = 0
        while True:
            with self.place.writing():
                removed = with_retries(attempt)
            if not removed:
                return total
            total += removed

    def clean(self, older_than: Any) -> int:
        """Delete versions that no reader can still be at; bytes freed."""
        with self.place.writing():
            dataset = self._newest()
            return int(dataset.cleanup_old_versions(older_than=older_than).bytes_removed)

    def build_index(self, name: str, partitions: int) -> None:
        """Index the vectors; others may read and write meanwhile."""

        def attempt() -> None:
            self._newest().create_index(
                "vector", "IVF_HNSW_SQ", name=name, metric="dot", num_partitions=partitions, replace=True
            )

        self._index(attempt)

    def extend_index(self, name: str) -> None:
        """Index the rows that are new, as one more part of the index."""

        def attempt() -> None:
            optimize = self._newest().optimize
            optimize.optimize_indices(index_names=[name], num_indices_to_merge=0)

        self._index(attempt)

    def _index(self, attempt: Any) -> None:
        if self.place.read_only:
            raise LibraryError(f"library {self.place.uri} is open for reading only")
        with explained(self.place.uri):
            with_retries(attempt)
            self._flush()
            self.snapshot(fresh=True)

    def add_column(self, name: str, value: str | bytes) -> None:
        """Add a column with one value in every row, unless it is there already."""
        kind = "Utf8" if isinstance(value, str) else "LargeBinary"
        text = value if isinstance(value, str) else value.decode()

        with self.place.writing():
            dataset = self._newest()
            if name not in dataset.schema.names:
                dataset.add_columns({name: f"arrow_cast({quote(text)}, '{kind}')"})
                self._flush()
                self.snapshot(fresh=True)
