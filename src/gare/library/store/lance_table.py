"""One Lance table: reads see the newest version, writes are atomic, flushed and repeated when they collide.

In a folder writers take turns, and what a commit refers to is on the disk before the commit is. On object
storage a put is durable by itself and Lance's own conflict checks keep writers apart.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gare.atomic import flush
from gare.errors import LibraryError
from gare.library.store.lance_snapshot import Snapshot
from gare.library.store.lance_storage import (
    Flusher,
    Place,
    broken_manifests,
    broken_older_manifests,
    damaged,
    explained,
    explanation,
    folder_bytes,
    set_aside,
    with_retries,
)
from gare.library.store.lance_values import ValueFiles

if TYPE_CHECKING:
    import pyarrow as pa

VECTOR_INDEX = "vector_idx"
_REMOTE_REFRESH_S = 1.0  # asking object storage for the newest version costs a round trip
_UPDATE_PAUSE_S = 0.5
_PRIMARY_KEY = {"lance-schema:unenforced-primary-key": "true"}  # two writers of one key then collide


class LanceTable:
    """One table of a library, by its name.

    Args:
        key_columns: short string columns to keep in memory; the first is the key, unique in the table.
        near_columns: further short columns to keep in memory.
    """

    def __init__(
        self, place: Place, name: str, key_columns: tuple[str, ...], near_columns: tuple[str, ...] = ()
    ) -> None:
        self.place = place
        self.name = name
        self.key = key_columns[0]
        self.uri = f"{place.uri.rstrip('/')}/{name}.lance"
        self.key_columns = key_columns
        self.near_columns = near_columns
        self._snapshot: Snapshot | None = None
        self._checked = 0.0
        self._mutex = threading.Lock()
        self._flusher = Flusher(Path(self.uri)) if place.folder else None
        self._values = ValueFiles(Path(self.uri)) if place.folder else None

    # Opening

    def exists(self) -> bool:
        """Whether the table is there."""
        try:
            self.snapshot()
        except FileNotFoundError:
            return False
        return True

    def create(self, schema: pa.Schema, rows: list[dict[str, Any]] | None = None) -> None:
        """Make the table, with these rows; one that another process made meanwhile is left as it is.

        `lance.write_dataset(mode="create")` will not do: if another one makes the table between its look and
        its commit, it empties that table. A commit upon version 0 that is not repeated fails instead.
        """
        import lance
        import pyarrow as pa
        from lance.fragment import write_fragments

        number = schema.get_field_index(self.key)
        schema = schema.set(number, schema.field(number).with_metadata(_PRIMARY_KEY))
        table = pa.Table.from_pylist(rows or [], schema=schema)
        options = self.place.options
        with self.place.writing():
            try:
                transaction = write_fragments(
                    table, self.uri, mode="create", storage_options=options, return_transaction=True
                )
                self._flush()
                lance.LanceDataset.commit(
                    self.uri,
                    transaction,
                    read_version=0,
                    storage_options=options,
                    enable_v2_manifest_paths=True,
                    max_retries=0,
                )
            except OSError:
                if not self.exists():
                    raise
            self._flush()
            if self.place.folder:
                flush(self.place.folder)

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

    def check_files(self) -> None:
        """Refuse a table in a folder that lacks data files, or has one that is cut short."""
        if not self.place.folder:
            return
        for fragment in self.snapshot(fresh=True).dataset.get_fragments():
            metadata = fragment.metadata
            sizes = {f"data/{file.path}": file.file_size_bytes for file in metadata.files}
            if metadata.deletion_file is not None:
                sizes[metadata.deletion_file.path(fragment.fragment_id)] = None
            for name, size in sizes.items():
                path = Path(self.uri) / name
                if not path.exists():
                    raise damaged(self.place.uri, f"{path} is gone")
                if size is not None and path.stat().st_size != size:
                    raise damaged(self.place.uri, f"{path} has {path.stat().st_size:,} bytes, not {size:,}")

    # Reading

    def snapshot(self, *, fresh: bool = False) -> Snapshot:
        """The newest version. On object storage it may be a second old, unless it must be fresh."""
        with self._mutex, explained(self.place.uri):
            now = time.monotonic()
            if self._snapshot is None:
                self._snapshot = Snapshot(
                    self._open(), self.key_columns, self.near_columns, values=self._values
                )
            elif fresh or self.place.folder or now - self._checked > _REMOTE_REFRESH_S:
                held = self._snapshot.dataset
                newest = held.latest_version
                if newest != held.version:
                    dataset = held.checkout_version(newest)
                    self._snapshot = replace(self._snapshot, dataset=dataset)
            else:
                return self._snapshot
            self._checked = now
            return self._snapshot

    def _open(self) -> Any:
        import lance

        try:
            return lance.dataset(self.uri, storage_options=self.place.options, session=self.place.session)
        except ValueError as error:
            if "was not found" in str(error):
                raise FileNotFoundError(self.uri) from None
            raise explanation(self.place.uri, error) or damaged(self.place.uri, error) from error

    # Writing

    def _newest(self) -> Any:
        """A handle for one write, which moves it on to the version it makes; snapshots must not move."""
        dataset = self.snapshot(fresh=True).dataset
        return dataset.checkout_version(dataset.version)

    def merge(self, rows: pa.Table, *, without: str | None = None) -> None:
        """Add rows; those whose key is there already replace it. Other rows that fit `without` go."""

        def rule(builder: Any) -> Any:
            builder = builder.when_matched_update_all().when_not_matched_insert_all()
            # It reads the whole table: seven times slower than without, with 100,000 rows.
            return builder.when_not_matched_by_source_delete(without) if without else builder

        self._merge(rows, rule)

    def remove(self, keys: Sequence[str]) -> int:
        """Delete the rows of these keys; how many there were."""
        import pyarrow as pa

        rows = pa.table({self.key: pa.array(list(dict.fromkeys(keys)), pa.string())})
        stats = self._merge(rows, lambda builder: builder.when_matched_delete())
        return int(stats["num_deleted_rows"])

    def append(self, rows: pa.Table) -> None:
        """Add rows without checking their keys."""
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

    def insert(self, rows: pa.Table) -> int:
        """Add those rows whose key is not there; how many."""
        stats = self._merge(rows, lambda builder: builder.when_not_matched_insert_all())
        return int(stats["num_inserted_rows"])

    def update(self, rows: pa.Table, condition: str) -> int:
        """Replace rows by their key where they fit a condition; how many.

        A writer that meets another one tries again soon. Lance's own repetition (`_merge`) waits twice as
        long each time it loses: where sixteen write at once, one of them waits for half a minute.
        """

        def attempt() -> int:
            dataset = self._newest()
            builder = dataset.merge_insert(self.key).when_matched_update_all(condition)
            transaction, stats = builder.execute_uncommitted(rows)
            if stats["num_updated_rows"]:
                self._commit(dataset, transaction, max_retries=0)
            return int(stats["num_updated_rows"])

        with self.place.writing():
            num_updated = with_retries(attempt, longest_pause_s=_UPDATE_PAUSE_S)
            self.snapshot(fresh=True)
            return num_updated

    def _merge(self, rows: pa.Table, rule: Callable[[Any], Any]) -> dict[str, int]:
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

    def _commit(self, dataset: Any, transaction: Any, **options: Any) -> None:
        import lance

        self._flush()
        lance.LanceDataset.commit(dataset, transaction, **options)
        self._flush()

    def _flush(self) -> None:
        if self._flusher:
            self._flusher.flush()

    # Upkeep

    def compact(self, *, rows_per_fragment: int, patience_s: float = 60.0) -> int:
        """Join small fragments, one group at a time so that other writers get their turn; how many went.

        Args:
            patience_s: how long to try again where another writer was faster.
        """
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
                removed = with_retries(attempt, seconds=patience_s)
            if not removed:
                return total
            total += removed

    def clean(self, older_than: Any) -> int:
        """Delete versions that no reader can still be at; bytes freed."""
        with self.place.writing():
            if self.place.folder:  # a clean-up reads every version, and one that is spoilt would end it
                for manifest in broken_older_manifests(Path(self.uri)):
                    set_aside(manifest)
            dataset = self._newest()
            return int(dataset.cleanup_old_versions(older_than=older_than).bytes_removed)

    def empty(self) -> None:
        """Remove every row, and at once what earlier versions held."""

        def attempt() -> None:
            self._newest().delete("true")
            self._flush()

        with self.place.writing():
            with_retries(attempt)
            self.snapshot(fresh=True)
            self.clean(timedelta(0))

    def drop(self) -> None:
        """Remove the table, if it is there."""
        import lance

        with self.place.writing():
            if self.exists():
                lance.LanceDataset.drop(self.uri, storage_options=self.place.options)

    def num_bytes(self) -> int:
        """How much room it takes: all files of a folder; on object storage, those of the newest version."""
        if self.place.folder:
            return folder_bytes(Path(self.uri))
        fragments = self.snapshot(fresh=True).dataset.get_fragments()
        return sum(file.file_size_bytes or 0 for part in fragments for file in part.metadata.files)

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

    def drop_index(self, name: str) -> None:
        """Remove an index; one that is not there is left out."""

        def attempt() -> None:
            dataset = self._newest()
            if name in {description.name for description in dataset.describe_indices()}:
                dataset.drop_index(name)

        self._index(attempt)

    def _index(self, attempt: Any) -> None:
        if self.place.read_only:
            raise LibraryError(f"library {self.place.uri} is open for reading only")
        with explained(self.place.uri):
            with_retries(attempt)
            self._flush()
            self.snapshot(fresh=True)

    def set_metadata(self, name: str, value: str) -> None:
        """Keep a text with the schema of the table, unless it is there already."""
        if (self.snapshot(fresh=True).dataset.schema.metadata or {}).get(name.encode()) == value.encode():
            return
        with self.place.writing():
            self._newest().update_schema_metadata({name: value})
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


def quote(text: str) -> str:
    """A literal: in this dialect only the quote itself is special."""
    return "'" + text.replace("'", "''") + "'"
