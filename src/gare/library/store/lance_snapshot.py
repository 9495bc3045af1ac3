"""One version of a Lance table, for reading: where each of its rows lies, and rows by their address.

Where rows lie is kept in memory. Lance finds 256 rows by address in 4 ms, but by key, through its index, in
20. A fragment is read once and kept until it changes, so that a growing library costs a reader only what is
new. So are the short columns that a search reads of candidates and hits: from a folder they take longer than
the frames do, on object storage each value costs a request. An item and its frames take some 450 bytes, and
the dictionaries that find their keys as many again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from gare.errors import DamagedLibraryError
from gare.library.store.lance_storage import explained
from gare.library.store.lance_values import ValueFiles
from gare.library.store.read_deadline import check_deadline, checked

if TYPE_CHECKING:
    import pyarrow as pa

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
        return list(_group_fragments(self.dataset.get_fragments()))

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
        for piece in _group_fragments(fragments):
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


def _group_fragments(fragments: Iterable[Any]) -> Iterator[list[Any]]:
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
