"""Mends the Lance tables of a library, so that it opens again. What is damaged is moved to `set-aside/`.

The steps follow each other so that a crash after any of them leaves something that the next repair finishes:
rows that can still be read are appended before the fragment they came from leaves the table, and files are
set aside when no version that is read refers to them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gare.atomic import flush
from gare.library.filters.filter_tree import name_key
from gare.library.store.lance_damage import (
    TABLE_KEYS,
    Files,
    TableState,
    describe_index,
    describe_table,
    doubled_rows,
    find_stamp,
    is_readable,
    look_at_table,
    version_hint,
    wrong_facts,
)
from gare.library.store.lance_storage import SET_ASIDE, Place, explained
from gare.library.store.lance_store import (
    NAME_COLUMN,
    SETS_FOLDER,
    copy_stamp,
    first_facts,
    is_in,
    storage_options,
    table_schemas,
)
from gare.library.store.lance_table import VECTOR_INDEX, LanceTable
from gare.library.store.row_checksums import CHECKSUM_COLUMN, SHOWN_COLUMNS, shown_checksum
from gare.library.store.store_damage import REPAIR_FACT, Damage, Surgeon
from gare.library.store.store_schema import ModelStamp

if TYPE_CHECKING:
    import pyarrow as pa

_SAMPLE = 16
_ORDER = ("facts", "frames", "files", "items")
# What stands for a value that cannot be read. Its checksum tells, and the row is mended from there.
_FILLERS: dict[str, dict[str, Any]] = {
    "items": {NAME_COLUMN: "", CHECKSUM_COLUMN: "", "tags": [], "vector": None},
    "frames": {"vectors": b"", "times": [], "thumbnail": b"", "strip": b""},
}


class LanceSurgeon(Surgeon):
    """For libraries in a folder and on object storage."""

    def __init__(self, uri: str) -> None:
        self.uri = os.path.abspath(os.path.expanduser(uri.removeprefix("file://"))) if _is_path(uri) else uri
        options = {} if _is_path(uri) else storage_options(os.environ)
        self._files = Files(self.uri)
        self._place = Place(self.uri, False, options)
        self._stamp_now = time.strftime("%Y%m%dT%H%M%S")

    def exists(self) -> bool:
        return any(self._files.names(f"{name}.lance") for name in _ORDER)

    def beside(self, name: str) -> Surgeon:
        return LanceSurgeon(f"{self.uri.rstrip('/')}/{SETS_FOLDER}/{name}")

    def is_unfinished(self) -> bool:
        is_whole = all(self._files.names(f"{name}.lance/_versions") for name in _ORDER)
        return not is_whole and _was_never_finished(self._look(read_all=False))

    def stamp(self) -> ModelStamp | None:
        return find_stamp(self._look(read_all=False))

    def examine(self, *, read_all: bool = False) -> list[Damage]:
        states = self._look(read_all=read_all)
        if _was_never_finished(states):
            return []
        damages = [damage for state in states.values() for damage in describe_table(self._files, state)]
        damages += describe_index(self._files, states["items"])
        facts = states["facts"]
        if facts.is_there and not facts.bad_fragments and (wrong := wrong_facts(states)):
            what = f"facts.lance: {', '.join(wrong)} gone or not as written"
            damages.append(Damage("lost_facts", "facts", what))
        return damages

    def _look(self, *, read_all: bool) -> dict[str, TableState]:
        return {  # the facts are small, and what opens a library
            name: look_at_table(self._files, self._place, name, read_all=read_all or name == "facts")
            for name in _ORDER
        }

    def sample(self) -> pa.Table:
        states = self._look(read_all=False)
        items, frames = states["items"].dataset, states["frames"].dataset

        def read() -> pa.Table:
            found = items.to_table(columns=["path", "content", "start", "frames_key"], limit=_SAMPLE)
            keys = is_in("frames_key", found["frames_key"].to_pylist())
            vectors = frames.to_table(columns=["frames_key", "vectors"], filter=keys)
            return found.join(vectors, "frames_key", join_type="inner")

        if items is None or frames is None:
            return _no_sample()
        found = is_readable(self.uri, read)
        return _no_sample() if found is None else found

    def mend(self, stamp: ModelStamp, *, read_all: bool = True) -> list[str]:
        with self._place.writing():
            states = self._look(read_all=read_all)
            if _was_never_finished(states):
                return []
            damaged = [name for name, state in states.items() if describe_table(self._files, state)]
            done = self._mend_table(states.pop("facts"), stamp)
            done += self._mend_facts(stamp)
            if damaged:  # a crash from here on must not make the next repair forget what was lost
                self._write_facts({REPAIR_FACT: ",".join(damaged)})
            done += [line for state in states.values() for line in self._mend_table(state, stamp)]
            done += self._mend_index()
            copy_stamp([self._table(name) for name in _ORDER], stamp)
            return done

    # One table

    def _mend_table(self, state: TableState, stamp: ModelStamp) -> list[str]:
        done = []
        if state.dataset is None:
            kept = self._set_aside(self._files.names(f"{state.name}.lance"))
            self._table(state.name).create(table_schemas(stamp)[state.name])
            found = f"what was left of it is in {SET_ASIDE}/" if kept else "nothing was left of it"
            return [f"the table {state.name}.lance was made anew; {found}"]
        if state.num_broken or state.lost_version:
            self._set_aside([*state.manifests[: state.num_broken], version_hint(state.name)])
            version = state.dataset.version
            done.append(f"{state.name}.lance went back to version {version}; what is newer could not be read")
        if state.bad_fragments:
            done.append(self._drop_fragments(state))
        if removed := self._remove_doubled(state.name):
            done.append(f"removed {removed:,} rows of {state.name}.lance that were there twice")
        return done

    def _table(self, name: str) -> LanceTable:
        return LanceTable(self._place, name, (TABLE_KEYS[name],))

    def _drop_fragments(self, state: TableState) -> str:
        """Replace the fragments that cannot be read by what can be read of them."""
        import lance
        from lance import LanceOperation

        table = self._table(state.name)
        dataset = table.snapshot(fresh=True).dataset
        bad = [f for f in dataset.get_fragments() if f.fragment_id in state.bad_fragments]
        num_rows = sum(fragment.metadata.physical_rows for fragment in bad)
        known = _keys_of(dataset, state)
        saved = 0
        for fragment in bad:
            rows = self._salvage(dataset, fragment, state.name)
            if rows is not None and rows.num_rows:
                keys = rows[TABLE_KEYS[state.name]].to_pylist()
                # Rows that were removed may come back with their list of removed rows lost: newer ones stay.
                rows = rows.filter([key not in known for key in keys])
                known.update(keys)
                if rows.num_rows:
                    table.append(rows)
                    saved += rows.num_rows
        newest = table.snapshot(fresh=True).dataset
        operation = LanceOperation.Delete([], [fragment.fragment_id for fragment in bad], "damaged")
        with explained(self.uri):
            lance.LanceDataset.commit(
                self._table_uri(state.name),
                operation,
                read_version=newest.version,
                storage_options=self._place.options,
            )
        self._flush(state.name)
        self._set_aside([f"{state.name}.lance/data/{file.path}" for f in bad for file in f.metadata.files])
        return (
            f"{len(bad)} data files of {state.name}.lance could not be read: {saved:,} of at most "
            f"{num_rows:,} rows in them were saved, and the files moved to {SET_ASIDE}/"
        )

    def _salvage(self, dataset: Any, fragment: Any, name: str) -> Any:
        """The rows of a fragment that can be read, with fillers for what cannot; None where none can."""
        import pyarrow as pa

        count = fragment.metadata.physical_rows
        schema = dataset.schema
        columns: dict[str, dict[int, Any]] = {column: {} for column in schema.names}
        for file in fragment.metadata.files:
            uri = f"{self._table_uri(name)}/data/{file.path}"
            for column in is_readable(self.uri, partial(self._columns_in, uri)) or []:
                if column in columns:
                    self._read_column(uri, column, 0, count, columns[column])
        fillers = _FILLERS.get(name, {})
        needed = [column for column in schema.names if column not in fillers]
        rows = [
            {column: columns[column].get(place, fillers.get(column)) for column in schema.names}
            for place in sorted(self._live_rows(fragment, count))
            if all(place in columns[column] for column in needed)
        ]
        rows = [_filled(row, schema) for row in rows]
        return pa.Table.from_pylist(rows, schema=schema) if rows else None

    def _live_rows(self, fragment: Any, count: int) -> set[int]:
        """The rows that were not removed; all, where the list of removed rows is lost."""

        def read() -> set[int]:
            addresses: set[int] = set()
            for batch in fragment.to_batches(columns=[], with_row_address=True):
                addresses.update(address & 0xFFFFFFFF for address in batch["_rowaddr"].to_pylist())
            return addresses

        live = is_readable(self.uri, read)
        return set(range(count)) if live is None else live

    def _read_column(self, file: str, column: str, first: int, last: int, found: dict[int, Any]) -> None:
        """Read a range of rows of a data file, halving it where it cannot be read."""
        from lance.file import LanceFileReader

        def read() -> list[Any]:
            reader = LanceFileReader(file, storage_options=self._place.options, columns=[column])
            batches = list(reader.read_range(first, last - first).to_batches())
            for batch in batches:
                batch.validate(full=True)
            return [value for batch in batches for value in batch.column(0).to_pylist()]

        values = is_readable(self.uri, read)
        if values is not None and len(values) == last - first:
            found.update(zip(range(first, last), values, strict=True))
        elif last - first > 1:
            middle = (first + last) // 2
            self._read_column(file, column, first, middle, found)
            self._read_column(file, column, middle, last, found)

    def _columns_in(self, uri: str) -> list[str]:
        from lance.file import LanceFileReader

        names: list[str] = LanceFileReader(uri, storage_options=self._place.options).metadata().schema.names
        return names

    def _remove_doubled(self, name: str) -> int:
        """Keep the newest of the rows with one key; of items, one that is as it was written."""
        table = self._table(name)
        dataset = table.snapshot(fresh=True).dataset
        doubled = doubled_rows(dataset, TABLE_KEYS[name])
        if not doubled:
            return 0
        surplus = []
        for addresses in doubled.values():
            ordered = sorted(addresses)
            best = ordered[-1]
            if name == "items":
                best = next((a for a in reversed(ordered) if _is_intact_item(dataset, a)), best)
            surplus += [address for address in ordered if address != best]
        with explained(self.uri):
            newest = dataset.checkout_version(dataset.version)
            newest.delete(f"_rowaddr IN ({', '.join(map(str, surplus))})")
        self._flush(name)
        return len(surplus)

    # The facts, the index

    def _mend_facts(self, stamp: ModelStamp) -> list[str]:
        states = self._look(read_all=False)
        wrong = wrong_facts(states)
        missing = {key: value for key, value in first_facts(stamp).items() if key in wrong}
        if "schema_version" in missing:  # what the tables look like tells
            items = states["items"].dataset
            is_old = items is not None and CHECKSUM_COLUMN not in items.schema.names
            missing["schema_version"] = "1" if is_old else missing["schema_version"]
        if not missing:
            return []
        self._write_facts(missing)
        return [f"wrote the facts of the library anew: {', '.join(sorted(missing))}"]

    def _write_facts(self, facts: dict[str, str]) -> None:
        import pyarrow as pa

        schema = pa.schema([("key", pa.string()), ("value", pa.string())])
        rows = {"key": list(facts), "value": list(facts.values())}
        self._table("facts").merge(pa.table(rows, schema=schema))

    def _mend_index(self) -> list[str]:
        items = self._table("items")
        state = look_at_table(self._files, self._place, "items", read_all=False)
        if not describe_index(self._files, state):
            return []
        items.drop_index(VECTOR_INDEX)
        return ["removed the vector index, which could not be read; it is built anew"]

    # Files

    def _table_uri(self, name: str) -> str:
        return f"{self.uri.rstrip('/')}/{name}.lance"

    def _set_aside(self, names: Sequence[str]) -> int:
        """Move files out of their table, with the names they had there; how many there were."""
        num_moved = 0
        for name in names:
            if self._files.size(name) is not None:
                self._files.move(name, f"{SET_ASIDE}/{self._stamp_now}/{name}")
                num_moved += 1
        return num_moved

    def _flush(self, name: str) -> None:
        if self._place.folder:
            self._table(name)._flush()
            flush(Path(self._table_uri(name)))


def _no_sample() -> pa.Table:
    import pyarrow as pa

    return pa.table({"path": []})


def _is_path(uri: str) -> bool:
    return "://" not in uri or uri.startswith("file://")


def _was_never_finished(states: dict[str, TableState]) -> bool:
    """A process died while it made the library: facts, and no row in any other table."""
    facts, *others = states.values()
    return (
        facts.is_there
        and not facts.bad_fragments
        and all(
            not state.manifests
            or (state.is_there and not state.bad_fragments and not state.dataset.count_rows())
            for state in others
        )
    )


def _keys_of(dataset: Any, state: TableState) -> set[str]:
    """The keys in the fragments that can be read."""
    keys: set[str] = set()
    for fragment in dataset.get_fragments():
        if fragment.fragment_id not in state.bad_fragments:
            key = TABLE_KEYS[state.name]
            for batch in fragment.to_batches(columns=[key]):
                keys.update(batch[key].to_pylist())
    return keys


def _filled(row: dict[str, Any], schema: Any) -> dict[str, Any]:
    """A row with fillers of the right shape."""
    if "vector" in row and row["vector"] is None:
        row = {**row, "vector": [0.0] * schema.field("vector").type.list_size}
    if row.get(NAME_COLUMN) == "":
        row = {**row, NAME_COLUMN: name_key(row["path"])}
    return row


def _is_intact_item(dataset: Any, address: int) -> bool:
    if CHECKSUM_COLUMN not in dataset.schema.names:
        return True
    (row,) = dataset._take_rows([address], columns=[*SHOWN_COLUMNS, CHECKSUM_COLUMN]).to_pylist()
    return not row[CHECKSUM_COLUMN] or row[CHECKSUM_COLUMN][:8] == shown_checksum(row)
