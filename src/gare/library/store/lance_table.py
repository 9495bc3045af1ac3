"""One Lance table: reads see the newest version, writes are atomic, flushed and repeated when they collide.

In a folder writers take turns, and what a commit refers to is on the disk before the commit is. On object
storage a put is durable by itself and Lance's own conflict checks keep writers apart.

Where each row lies is kept in memory. Lance finds 256 rows by address in 4 ms, but by key, through its index,
in 20. A fragment is read once and kept until it changes, so that a growing library costs a reader only what
is new. So are the short columns that a search reads of candidates and hits: from a folder they take longer
than the frames do, on object storage each value costs a request. An item and its frames take some 450 bytes,
and the dictionaries that find their keys as many again.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gare.atomic import flush
from gare.errors import DamagedLibraryError, LibraryError
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
from gare.library.store.read_deadline import check_deadline, checked

if TYPE_CHECKING:
    import pyarrow as pa

VECTOR_INDEX = "vector_idx"
_REMOTE_REFRESH_S = 1.0  # asking object storage for the newest version costs a round trip
_UPDATE_PAUSE_S = 0.5
_PRIMARY_KEY = {"lance-schema:unenforced-primary-key": "true"}  # two writers of one key then collide

PIECE_ROWS = 200_000
"""Rows that are read in one call of Lance, which nothing can interrupt; a larger fragment is read whole.

Lance reads the columns of a filter at 20 million rows a second on two cores, so a piece is a few milliseconds
there, and the largest fragment (a million items) a tenth of a second. Smaller pieces would not end sooner.
"""
TAKE_ROWS = 4096
"""Rows that are read by their address in one call, or in two at once."""
_ROWS_FOR_TWO = 64  # for fewer, handing one half to another thread takes longer than reading it
_reader = ThreadPoolExecutor(2, thread_name_prefix="gare-read")

State = tuple[tuple[str, ...], int]


@dataclass(frozen=True)
class Snapshot:
    """One version of a table; it stays readable while others write."""

    dataset: Any
    key_columns: tuple[str, ...]
    near_columns: tuple[str, ...] = ()
    before: list[RowMap] = field(default_factory=list)
    values: ValueFiles | None = None
    """What reads large values without Lance; None on object storage."""

    @cached_property
    def rows(self) -> RowMap:
        """Where each row lies."""
        rows = RowMap(self.dataset, self.before[0] if self.before else None)
        try:
            rows.load(self.dataset, self.key_columns, self.near_columns)
        finally:
            self.before[:] = [rows]  # even if time was up: the next one reads what is still missing
        return rows

    @cached_property
    def pieces(self) -> list[list[Any] | None]:
        """The fragments in groups of some `PIECE_ROWS` rows; None for all of them, where one will do."""
        if self.dataset.count_rows() <= PIECE_ROWS:
            return [None]
        return list(group_fragments(self.dataset.get_fragments()))

    def batches(self, **wanted: Any) -> Iterator[pa.RecordBatch]:
        """What a scanner of the table gives, piece by piece; it ends when the deadline is over."""
        for piece in self.pieces:
            check_deadline()
            yield from checked(self.dataset.scanner(fragments=piece, **wanted).to_batches())

    def count(self, condition: str | None) -> int:
        """How many rows fit a condition; it ends when the deadline is over."""
        if condition is None or self.pieces == [None]:
            check_deadline()
            return int(self.dataset.count_rows(condition))
        total = 0
        for piece in self.pieces:
            check_deadline()
            scanner = self.dataset.scanner(
                columns=[], filter=condition, with_row_id=True, fragments=piece, scan_in_order=False
            )
            total += int(scanner.count_rows())
        return total

    def take(self, addresses: np.ndarray, columns: list[str]) -> pa.Table:
        """Rows by their address, in this order; it ends when the deadline is over."""
        import pyarrow as pa

        if len(columns) == 1 and (values := self._take_values(addresses, columns[0])) is not None:
            return pa.table({columns[0]: values})
        if len(addresses) < _ROWS_FOR_TWO:
            return self.dataset._take_rows(addresses.tolist(), columns=columns)
        order = np.argsort(addresses)  # Lance reads neighbours in less time
        parts = []
        for start in range(0, len(order), TAKE_ROWS):
            check_deadline()
            rows = addresses[order[start : start + TAKE_ROWS]]
            parts += _side_by_side(lambda some: self.dataset._take_rows(some.tolist(), columns=columns), rows)
        places = np.empty(len(order), dtype=np.int64)
        places[order] = np.arange(len(order))
        table = pa.concat_tables(parts)
        return pa.table({name: _in_order(table[name], places) for name in columns})

    def _take_values(self, addresses: np.ndarray, column: str) -> pa.ChunkedArray | None:
        """The same of a column of large values; None where Lance has to read them."""
        import pyarrow as pa

        if self.values is None or not pa.types.is_large_binary(self.dataset.schema.field(column).type):
            return None
        parts = []
        for start in range(0, len(addresses), TAKE_ROWS):
            check_deadline()
            part = self.values.read(self.dataset, column, addresses[start : start + TAKE_ROWS])
            if part is None:
                return None
            parts.append(part)
        return pa.chunked_array(parts, pa.large_binary())


def _side_by_side(read: Callable[[np.ndarray], pa.Table], rows: np.ndarray) -> list[pa.Table]:
    """Both halves at once: Lance takes rows one after the other, and leaves a second core idle."""
    half = len(rows) // 2
    other = _reader.submit(read, rows[half:])
    try:
        first = read(rows[:half])
    finally:
        wait([other])  # so that an error of the first does not leave the second reading
    return [first, other.result()]


def _in_order(column: pa.ChunkedArray, places: np.ndarray) -> pa.Array:
    """The values at these places, as one array. Large values are copied once: Arrow would copy them twice."""
    import pyarrow as pa

    if not pa.types.is_large_binary(column.type) or column.null_count:
        return column.combine_chunks().take(pa.array(places))
    values: list[memoryview] = []
    for chunk in column.chunks:
        _, offsets, data = chunk.buffers()
        ends = np.frombuffer(offsets, np.int64)[chunk.offset : chunk.offset + len(chunk) + 1].tolist()
        content = memoryview(data or b"")
        values += [content[start:end] for start, end in itertools.pairwise(ends)]
    chosen = [values[place] for place in places.tolist()]
    ends = np.cumsum([0, *map(len, chosen)], dtype=np.int64)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(chosen))]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(chosen), buffers)


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


# --- where rows lie -----------------------------------------------------------------------------------------


class _Fragment:
    """The live rows of one fragment."""

    def __init__(self, state: State, addresses: np.ndarray, columns: dict[str, Any], key: str) -> None:
        self.state = state
        self.addresses = addresses
        self.columns = columns
        self.key = key

    @cached_property
    def position_of(self) -> dict[str, int]:
        return {key: position for position, key in enumerate(self.columns[self.key].to_pylist())}


class RowMap:
    """The rows of one version of a table, once they are loaded.

    Args:
        dataset: Lance dataset, at the version wanted.
        before: the map of another version, to take what has not changed.
    """

    def __init__(self, dataset: Any, before: RowMap | None = None) -> None:
        known = before._fragments if before else {}
        self._states = states = {
            fragment.fragment_id: _state(fragment) for fragment in dataset.get_fragments()
        }
        self._fragments: dict[int, _Fragment] = {
            number: known[number]
            for number, state in states.items()
            if number in known and known[number].state == state
        }

    def load(self, dataset: Any, columns: Sequence[str], near: Sequence[str] = ()) -> None:
        """Read what is missing, in pieces. When the deadline is over, what was read until then is kept.

        Args:
            columns: short string columns to keep; the first is the key.
            near: further columns to keep, where they can be read: whoever needs a damaged one meets it then.
        """
        near = [name for name in near if name in dataset.schema.names]
        missing = [number for number in self._states if number not in self._fragments]
        fragments = [dataset.get_fragment(number) for number in missing]
        for piece in group_fragments(fragments):
            check_deadline()
            for number, addresses, values in _read_readable(dataset, piece, columns, near):
                state = self._states[number]
                self._fragments[number] = _Fragment(state, addresses, values, columns[0])

    def find(self, keys: Iterable[str]) -> list[tuple[int, int] | None]:
        """Fragment and position of each key, None where there is none."""
        tables = [(number, part.position_of) for number, part in self._fragments.items()]
        tables.reverse()  # what was written last is asked for most
        places: list[tuple[int, int] | None] = []
        for key in keys:  # a plain loop: a generator for each key would take twice as long
            for number, rows in tables:
                if (position := rows.get(key)) is not None:
                    places.append((number, position))
                    break
            else:
                places.append(None)
        return places

    def addresses(self, places: Iterable[tuple[int, int]]) -> np.ndarray:
        """Lance's row addresses of these fragments and positions."""
        found = [self._fragments[number].addresses[position] for number, position in places]
        return np.array(found, dtype=np.uint64)

    def keeps(self, column: str) -> bool:
        """Whether the values of a column are here."""
        return all(column in part.columns for part in self._fragments.values())

    def values_at(self, column: str, addresses: np.ndarray) -> list[str]:
        """One value per address, as a search or `addresses` returned them."""
        return list(self.columns_at([column], addresses)[column].to_pylist()) if len(addresses) else []

    def columns_at(self, columns: Sequence[str], addresses: np.ndarray) -> dict[str, pa.Array]:
        """Several columns as arrays; there is at least one address."""
        import pyarrow as pa

        order = np.argsort(addresses)
        ordered, places = addresses[order], np.empty(len(order), dtype=np.int64)
        places[order] = np.arange(len(order))
        numbers, firsts = np.unique((ordered >> 32).astype(np.int64), return_index=True)
        parts = []
        for number, some in zip(numbers.tolist(), np.split(ordered, firsts[1:]), strict=True):
            part = self._fragments[number]
            parts.append((part.columns, pa.array(np.searchsorted(part.addresses, some))))
        back = pa.array(places)
        return {
            name: pa.concat_arrays([values[name].take(positions) for values, positions in parts]).take(back)
            for name in columns
        }


def _state(fragment: Any) -> State:
    """Changes whenever a row of the fragment does."""
    metadata = fragment.metadata
    deleted = metadata.deletion_file.num_deleted_rows if metadata.deletion_file else 0
    return tuple(file.path for file in metadata.files), deleted


def group_fragments(fragments: Iterable[Any]) -> Iterator[list[Any]]:
    """Fragments in groups of at least `PIECE_ROWS` rows, the last one perhaps of fewer."""
    group: list[Any] = []
    num_rows = 0
    for fragment in fragments:
        group.append(fragment)
        num_rows += fragment.physical_rows
        if num_rows >= PIECE_ROWS:
            yield group
            group, num_rows = [], 0
    if group:
        yield group


def _read_readable(
    dataset: Any, fragments: list[Any], columns: Sequence[str], near: Sequence[str]
) -> list[tuple[int, np.ndarray, dict[str, Any]]]:
    """As `_read`; without the near columns, if one of them is damaged."""
    if near:
        with suppress(DamagedLibraryError), explained(dataset.uri):
            return list(_read(dataset, fragments, [*columns, *near]))
    return list(_read(dataset, fragments, columns))


def _read(
    dataset: Any, fragments: list[Any], columns: Sequence[str]
) -> Iterator[tuple[int, np.ndarray, dict[str, Any]]]:
    """The live rows of these fragments, one after the other."""
    import pyarrow as pa

    numbers = [fragment.fragment_id for fragment in fragments]
    scanner = dataset.scanner(columns=list(columns), fragments=fragments, with_row_address=True)
    table = scanner.to_table().combine_chunks()
    addresses = table["_rowaddr"].to_numpy()
    order = np.argsort(addresses, kind="stable")
    if (np.diff(order) != 1).any():
        table, addresses = table.take(order), addresses[order]
    owners = (addresses >> 32).astype(np.int64)
    for number in numbers:
        first, last = np.searchsorted(owners, [number, number + 1])
        part = table.slice(first, last - first)
        values = {
            name: pa.concat_arrays(part[name].chunks)
            if part.num_rows
            else pa.array([], part.schema.field(name).type)
            for name in columns
        }
        yield number, addresses[first:last], values


def quote(text: str) -> str:
    """A literal: in this dialect only the quote itself is special."""
    return "'" + text.replace("'", "''") + "'"
