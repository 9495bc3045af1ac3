"""A library in a folder or on object storage, as Lance tables: items, frames, files, facts about itself."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from gare.errors import LibraryError, MissingLibraryError
from gare.library.filters.tree import Filter, name_key
from gare.library.schema import SCHEMA_VERSION, ModelStamp, file_schema, frame_schema, item_schema
from gare.library.store.base import Hits, Progress, Stats
from gare.library.store.checks import (
    check_query,
    check_same_model,
    checked_files,
    checked_frames,
    checked_items,
    split_columns,
)
from gare.library.store.failures import explained
from gare.library.store.lance_filter import NAME_COLUMN, to_lance
from gare.library.store.lance_search import search_items
from gare.library.store.lance_table import LanceTable, Place, Snapshot
from gare.library.store.lance_upkeep import maintain_tables
from gare.library.store.migrations import migrate

if TYPE_CHECKING:
    import pyarrow as pa

WRITTEN_COLUMN = "written"
_NOTE = "note:"
_SCAN_ROWS = 8192
_SCAN_ROWS_WITH_FRAMES = 1024


class LanceStore:
    """See the module; `open_store` makes one.

    Every writer of frames adds the time, so that `maintain` can leave alone what somebody is still writing.
    """

    def __init__(self, uri: str, *, stamp: ModelStamp | None, create: bool, read_only: bool) -> None:
        self.uri = uri
        self.orphan_age = timedelta(days=1)
        self.version_age = timedelta(hours=1)
        self._place = Place(uri, read_only, storage_options(os.environ) if "://" in uri else {})
        self._facts = LanceTable(self._place, "facts", ("key",))
        self._items = LanceTable(self._place, "items", ("id", "frames_key"))
        self._frames = LanceTable(self._place, "frames", ("frames_key",))
        self._files = LanceTable(self._place, "files", ("path",))
        with explained(uri):
            self._open(stamp, create)

    def _open(self, stamp: ModelStamp | None, create: bool) -> None:
        tables = (self._facts, self._items, self._frames, self._files)
        repairs = [repair for table in tables for repair in table.mend()]
        if not self._facts.exists():
            if not create or stamp is None:
                raise MissingLibraryError(
                    f"there is no library at {self.uri}. Check the address, or make one with 'gare index DIR'"
                )
            self._found(stamp)
        facts = self._read_facts()
        self.stamp = ModelStamp(**json.loads(facts["stamp"]))
        check_same_model(self.uri, self.stamp, stamp)
        repairs += migrate(self, int(facts["schema_version"]), read_only=self._place.read_only)
        self.repairs = tuple(repairs)
        for table, schema in (  # a process may have died between the facts and the tables
            (self._frames, stored_frame_schema()),
            (self._files, file_schema()),
            (self._items, stored_item_schema(self.stamp.stage1_dim)),
        ):
            if not table.exists():
                if self._place.read_only:
                    raise LibraryError(f"library {self.uri} is not finished; run 'gare index' again")
                table.create(schema)

    def _found(self, stamp: ModelStamp) -> None:
        """Write the facts. The library exists from here on; its other tables follow from them."""
        import pyarrow as pa

        if self._place.folder:
            self._place.folder.mkdir(parents=True, exist_ok=True)
        schema = pa.schema([pa.field(name, pa.string(), nullable=False) for name in ("key", "value")])
        facts = {"schema_version": str(SCHEMA_VERSION), "stamp": json.dumps(asdict(stamp))}
        self._facts.create(schema, [{"key": key, "value": value} for key, value in facts.items()])

    # Items and frames

    def upsert(self, items: pa.Table, frames: pa.Table) -> int:
        import pyarrow as pa

        items = checked_items(items, self.stamp)
        frames = checked_frames(frames, self.stamp)
        with self._place.writing():  # nobody removes the frames of these items in between
            held = self._frames.snapshot(fresh=True).rows
            given = frames["frames_key"].to_pylist()
            is_new = [place is None for place in held.find(given)]
            needed = [key for key in set(items["frames_key"].to_pylist()) - set(given)]
            if None in held.find(needed):
                raise ValueError("items refer to frames that are neither given nor in the library")
            frames = frames.filter(pa.array(is_new, pa.bool_()))
            if frames.num_rows:
                self._frames.append(frames.append_column(*_now(frames.num_rows)))
            if items.num_rows:
                names = pa.array([name_key(path) for path in items["path"].to_pylist()], pa.string())
                self._items.merge(items.append_column(_not_null(NAME_COLUMN, pa.string()), names))
        return int(items.num_rows)

    def delete(self, ids: Sequence[str]) -> int:
        return self._items.remove(ids) if len(ids) else 0

    def count(self, where: Filter | None = None) -> int:
        with explained(self.uri):
            dataset = self._items.snapshot().dataset
            return int(dataset.count_rows(to_lance(where) if where is not None else None))

    def search(
        self, vectors: np.ndarray, k: int, *, where: Filter | None = None, exact: bool = False
    ) -> list[Hits]:
        queries = check_query(vectors, k, self.stamp)
        with explained(self.uri):
            condition = to_lance(where) if where is not None else None
            return search_items(self._items.snapshot(), queries, k, condition, exact=exact)

    def fetch(self, ids: Sequence[str], columns: Sequence[str]) -> pa.Table:
        item_columns, frame_columns = split_columns(columns, self.stamp)
        with explained(self.uri):
            items = self._items.snapshot()
            rows = items.rows.addresses(place for place in items.rows.find(ids) if place)
            arrays: dict[str, Any] = {}
            if frame_columns:
                keys = items.rows.values_at("frames_key", rows)
                frames, places = self._find_frames(keys)
                rows = rows[[place is not None for place in places]]
                frame_rows = frames.rows.addresses(place for place in places if place)
                arrays |= _take(frames.dataset, frame_rows, frame_columns)
            if set(item_columns) <= {"id", "frames_key"}:
                arrays |= {name: _strings(items.rows.values_at(name, rows)) for name in item_columns}
            else:
                arrays |= _take(items.dataset, rows, item_columns)
        return _table(arrays, columns, self.stamp)

    def _find_frames(self, keys: list[str]) -> tuple[Snapshot, list[tuple[int, int] | None]]:
        """Where frames lie. They are written before their items; only a deleted item can be without."""
        frames = self._frames.snapshot()
        places = frames.rows.find(keys)
        if None in places:
            frames = self._frames.snapshot(fresh=True)
            places = frames.rows.find(keys)
        return frames, places

    def scan(
        self, *, where: Filter | None = None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        columns = list(columns) if columns is not None else item_schema(self.stamp.stage1_dim).names
        _, frame_columns = split_columns(columns, self.stamp)
        condition = to_lance(where) if where is not None else None
        with explained(self.uri):
            dataset = self._items.snapshot().dataset
            if not frame_columns:
                yield from dataset.to_batches(columns=columns, filter=condition, batch_size=_SCAN_ROWS)
                return
            batches = dataset.to_batches(columns=["id"], filter=condition, batch_size=_SCAN_ROWS_WITH_FRAMES)
            for batch in batches:
                yield from self.fetch(batch["id"].to_pylist(), columns).combine_chunks().to_batches()

    # The ledger and the notes

    def record_files(self, files: pa.Table) -> None:
        files = checked_files(files)
        if files.num_rows:
            self._files.merge(files)

    def forget_files(self, paths: Sequence[str]) -> None:
        if len(paths):
            self._files.remove(paths)

    def scan_files(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        with explained(self.uri):
            names = list(columns) if columns is not None else file_schema().names
            yield from self._files.snapshot().dataset.to_batches(columns=names)

    def get_notes(self) -> dict[str, str]:
        with explained(self.uri):
            facts = self._read_facts()
        return {key.removeprefix(_NOTE): value for key, value in facts.items() if key.startswith(_NOTE)}

    def set_notes(self, notes: Mapping[str, str]) -> None:
        self._write_facts({_NOTE + key: value for key, value in notes.items()})

    def _read_facts(self) -> dict[str, str]:
        table = self._facts.snapshot().dataset.to_table()
        return dict(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True))

    def _write_facts(self, facts: Mapping[str, str]) -> None:
        import pyarrow as pa

        if facts:
            self._facts.merge(
                pa.table({"key": _strings(list(facts)), "value": _strings(list(facts.values()))})
            )

    # Upkeep

    def maintain(self, progress: Progress | None = None) -> Stats:
        with explained(self.uri):
            return maintain_tables(
                self._place,
                items=self._items,
                frames=self._frames,
                others=(self._files, self._facts),
                orphan_age=self.orphan_age,
                version_age=self.version_age,
                progress=progress,
            )

    def add_column(self, table: str, name: str, value: str | bytes) -> None:
        target = {"items": self._items, "frames": self._frames, "files": self._files}[table]
        target.add_column(name, value)

    def set_schema_version(self, version: int) -> None:
        self._write_facts({"schema_version": str(version)})

    def close(self) -> None:
        """Nothing is held open between calls."""


def storage_options(environment: Mapping[str, str]) -> dict[str, str]:
    """What Lance must be told of an S3 service that is not Amazon's; keys come from the usual variables."""
    options = {}
    endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    if endpoint:
        options["aws_endpoint"] = endpoint
        options["allow_http"] = str(endpoint.startswith("http://")).lower()
        options["aws_region"] = (
            environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or "us-east-1"
        )
    return options


def stored_item_schema(stage1_dim: int) -> pa.Schema:
    import pyarrow as pa

    return item_schema(stage1_dim).append(_not_null(NAME_COLUMN, pa.string()))


def stored_frame_schema() -> pa.Schema:
    import pyarrow as pa

    return frame_schema().append(_not_null(WRITTEN_COLUMN, pa.timestamp("us", tz="UTC")))


def _not_null(name: str, kind: Any) -> pa.Field:
    import pyarrow as pa

    return pa.field(name, kind, nullable=False)


def _now(count: int) -> tuple[pa.Field, pa.Array]:
    import pyarrow as pa

    kind = pa.timestamp("us", tz="UTC")
    return _not_null(WRITTEN_COLUMN, kind), pa.array([datetime.now(UTC)] * count, kind)


def _strings(values: Sequence[str]) -> pa.Array:
    import pyarrow as pa

    return pa.array(values, pa.string())


def _take(dataset: Any, addresses: np.ndarray, columns: list[str]) -> dict[str, Any]:
    if not len(addresses):
        return {}
    table = dataset._take_rows(addresses.tolist(), columns=columns)
    return {name: table[name] for name in columns}


def _table(arrays: Mapping[str, Any], columns: Sequence[str], stamp: ModelStamp) -> pa.Table:
    import pyarrow as pa

    fields = {
        field.name: field for schema in (item_schema(stamp.stage1_dim), frame_schema()) for field in schema
    }
    schema = pa.schema([fields[name] for name in columns])
    if not all(name in arrays for name in columns):
        return schema.empty_table()
    return pa.table({name: arrays[name] for name in columns}).cast(schema)
