"""A library in PostgreSQL with pgvector: tables gare_items, gare_frames, gare_files and gare_facts.

Several libraries share a database through `?options=-csearch_path%3Dname,public`. With synchronous replicas
no acknowledged row is lost when the primary is; list all hosts in the address and work goes on at another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import psycopg
from psycopg import errors, sql

from gare.errors import MissingLibraryError
from gare.library.filters.tree import Filter, name_key
from gare.library.schema import SCHEMA_VERSION, ModelStamp, file_schema, item_schema
from gare.library.store.base import Hits, Progress, Stats
from gare.library.store.checks import (
    check_query,
    check_same_model,
    checked_files,
    checked_frames,
    checked_items,
    split_columns,
)
from gare.library.store.migrations import migrate
from gare.library.store.postgres_filter import to_postgres
from gare.library.store.postgres_link import Link
from gare.library.store.postgres_tables import (
    create_statements,
    quoted,
    to_rows,
    to_table,
    upsert_statement,
)
from gare.library.store.postgres_upkeep import maintain_database

if TYPE_CHECKING:
    import pyarrow as pa

SCAN_MATCHES = 20_000
_MOST_CANDIDATES = 1000  # pgvector's own limit for hnsw.ef_search
_NOTE = "note:"
_SCAN_ROWS = 2048
_LOCK = 0x67617265  # "gare": makers and migrators of a library wait for each other

Connection = psycopg.Connection[Any]


class PostgresStore:
    """See the module; `open_store` makes one."""

    def __init__(self, uri: str, *, stamp: ModelStamp | None, create: bool, read_only: bool) -> None:
        self._link = Link(uri, read_only=read_only)
        self.uri = self._link.shown
        self.orphan_age = timedelta(days=1)
        self.repairs: tuple[str, ...] = ()
        try:
            self._link.run(lambda connection: self._open(connection, stamp, create), patient=False)
            self._link.vector_exists()
        except BaseException:
            self.close()
            raise

    def _open(self, connection: Connection, stamp: ModelStamp | None, create: bool) -> None:
        facts = self._read_facts(connection)
        if not facts:
            if not create or stamp is None:
                raise MissingLibraryError(
                    f"there is no library at {self.uri}. Check the address, or make one with 'gare index DIR'"
                )
            facts = self._found(connection, stamp)
        self.stamp = ModelStamp(**json.loads(facts["stamp"]))
        check_same_model(self.uri, self.stamp, stamp)
        version = int(facts["schema_version"])
        if version == SCHEMA_VERSION:
            return
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
            version = int(self._read_facts(connection)["schema_version"])
            self.repairs = migrate(self, version, read_only=self._link.read_only)

    def _found(self, connection: Connection, stamp: ModelStamp) -> dict[str, str]:
        """Make the tables and the facts in one transaction; whoever comes second finds them."""
        facts = {"schema_version": str(SCHEMA_VERSION), "stamp": json.dumps(asdict(stamp))}
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
            connection.execute(
                "CREATE TABLE IF NOT EXISTS gare_facts (key text PRIMARY KEY, value text NOT NULL)"
            )
            if found := self._read_facts(connection):
                return found
            for statement in create_statements(stamp):
                connection.execute(statement)
            self._write_facts(connection, facts)
        return facts

    # Items and frames

    def upsert(self, items: pa.Table, frames: pa.Table) -> int:
        items = checked_items(items, self.stamp)
        frames = checked_frames(frames, self.stamp)
        names = [name_key(path) for path in items["path"].to_pylist()]
        items = items.append_column("name_key", [names])

        def write(connection: Connection) -> None:
            with connection.transaction(), connection.cursor() as cursor:
                for table, rows, key, replace in (
                    ("gare_frames", frames, "frames_key", False),
                    ("gare_items", items, "id", True),
                ):
                    if rows.num_rows:
                        statement = upsert_statement(table, rows.column_names, key, replace=replace)
                        cursor.executemany(statement, to_rows(rows, key))

        try:
            self._link.run(write)
        except errors.ForeignKeyViolation:
            raise ValueError("items refer to frames that are neither given nor in the library") from None
        return int(items.num_rows)

    def delete(self, ids: Sequence[str]) -> int:
        statement = "DELETE FROM gare_items WHERE id = ANY(%s)"
        return self._link.run(lambda connection: connection.execute(statement, [list(ids)]).rowcount)

    def count(self, where: Filter | None = None) -> int:
        condition, values = to_postgres(where)
        statement = f"SELECT count(*) FROM gare_items i WHERE {condition}"
        return int(self._link.run(lambda connection: _one(connection, statement, values)))

    def search(
        self, vectors: np.ndarray, k: int, *, where: Filter | None = None, exact: bool = False
    ) -> list[Hits]:
        queries = check_query(vectors, k, self.stamp)
        condition, values = to_postgres(where)

        def find(connection: Connection) -> list[Hits]:
            num_matches = self.count(where)
            by_scan = exact or (where is not None and num_matches <= SCAN_MATCHES) or k > _MOST_CANDIDATES
            with connection.transaction():
                if not by_scan:
                    _use_index(connection, k)
                    hits = [_nearest(connection, query, k, condition, values) for query in queries]
                    if all(len(hit.ids) == min(k, num_matches) for hit in hits):
                        return hits
                connection.execute("SET LOCAL enable_indexscan = off")
                return [_nearest(connection, query, k, condition, values) for query in queries]

        return self._link.run(find)

    def fetch(self, ids: Sequence[str], columns: Sequence[str]) -> pa.Table:
        _, frame_columns = split_columns(columns, self.stamp)
        statement = (
            f"SELECT {_selected(columns, frame_columns)} "
            "FROM unnest(%s::text[]) WITH ORDINALITY AS wanted(id, place) "
            f"JOIN gare_items i USING (id) {_with_frames(frame_columns)} ORDER BY place"
        )

        def read(connection: Connection) -> list[Any]:
            return connection.execute(statement, [list(ids)], binary=True).fetchall()

        return to_table(self._link.run(read), list(columns), self.stamp)

    def scan(
        self, *, where: Filter | None = None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        columns = list(columns) if columns is not None else item_schema(self.stamp.stage1_dim).names
        _, frame_columns = split_columns(columns, self.stamp)
        condition, values = to_postgres(where)
        statement = (
            f"SELECT {_selected(columns, frame_columns)} FROM gare_items i "
            f"{_with_frames(frame_columns)} WHERE {condition}"
        )
        yield from self._read_batches(statement, values, columns)

    def _read_batches(
        self, statement: str, values: list[Any], columns: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        """Over a connection of its own: the reader may write to the store between two batches."""
        with (
            self._link.explained(),
            self._link.connect() as connection,
            connection.transaction(),
            connection.cursor("gare_scan", binary=True) as cursor,
        ):
            cursor.execute(statement, values)
            while rows := cursor.fetchmany(_SCAN_ROWS):
                yield from to_table(rows, list(columns), self.stamp).to_batches()

    # The ledger and the notes

    def record_files(self, files: pa.Table) -> None:
        rows = to_rows(checked_files(files), "path")
        statement = upsert_statement("gare_files", file_schema().names, "path", replace=True)

        def write(connection: Connection) -> None:
            with connection.transaction(), connection.cursor() as cursor:
                cursor.executemany(statement, rows)

        if rows:
            self._link.run(write)

    def forget_files(self, paths: Sequence[str]) -> None:
        statement = "DELETE FROM gare_files WHERE path = ANY(%s)"
        self._link.run(lambda connection: connection.execute(statement, [list(paths)]).rowcount)

    def scan_files(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        names = list(columns) if columns is not None else file_schema().names
        yield from self._read_batches(f"SELECT {', '.join(map(quoted, names))} FROM gare_files", [], names)

    def get_notes(self) -> dict[str, str]:
        facts = self._link.run(self._read_facts)
        return {key.removeprefix(_NOTE): value for key, value in facts.items() if key.startswith(_NOTE)}

    def set_notes(self, notes: Mapping[str, str]) -> None:
        facts = {_NOTE + key: value for key, value in notes.items()}
        self._link.run(lambda connection: self._write_facts(connection, facts))

    def _read_facts(self, connection: Connection) -> dict[str, str]:
        try:
            with connection.transaction():
                return dict(connection.execute("SELECT key, value FROM gare_facts").fetchall())
        except errors.UndefinedTable:
            return {}

    def _write_facts(self, connection: Connection, facts: Mapping[str, str]) -> None:
        statement = upsert_statement("gare_facts", ["key", "value"], "key", replace=True)
        with connection.transaction(), connection.cursor() as cursor:
            cursor.executemany(statement, sorted(facts.items()))

    # Upkeep

    def maintain(self, progress: Progress | None = None) -> Stats:
        return self._link.run(
            lambda connection: maintain_database(connection, orphan_age=self.orphan_age, progress=progress)
        )

    def add_column(self, table: str, name: str, value: str | bytes) -> None:
        statement = sql.SQL("ALTER TABLE {} ADD COLUMN IF NOT EXISTS {} {} NOT NULL DEFAULT {}").format(
            sql.Identifier(f"gare_{table}"),
            sql.Identifier(name),
            sql.SQL("text" if isinstance(value, str) else "bytea"),
            sql.Literal(value),
        )
        self._link.run(lambda connection: connection.execute(statement))

    def set_schema_version(self, version: int) -> None:
        facts = {"schema_version": str(version)}
        self._link.run(lambda connection: self._write_facts(connection, facts))

    def close(self) -> None:
        self._link.close()


def _one(connection: Connection, statement: str, values: list[Any]) -> Any:
    row = connection.execute(statement, values).fetchone()
    assert row is not None
    return row[0]


def _use_index(connection: Connection, k: int) -> None:
    """Three times as many candidates as wanted, and on until enough rows pass the filter."""
    connection.execute(f"SET LOCAL hnsw.ef_search = {min(max(3 * k, 200), _MOST_CANDIDATES)}")
    connection.execute("SET LOCAL hnsw.iterative_scan = strict_order")


def _nearest(connection: Connection, query: np.ndarray, k: int, condition: str, values: list[Any]) -> Hits:
    statement = (
        "SELECT i.id, -(i.vector <#> %s) FROM gare_items i "
        f"WHERE {condition} ORDER BY i.vector <#> %s LIMIT %s"
    )
    rows = connection.execute(statement, [query, *values, query, k], binary=True).fetchall()
    return Hits([row[0] for row in rows], np.array([row[1] for row in rows], np.float32))


def _selected(columns: Sequence[str], frame_columns: list[str]) -> str:
    return ", ".join(f"{'f' if name in frame_columns else 'i'}.{quoted(name)}" for name in columns)


def _with_frames(frame_columns: list[str]) -> str:
    return "JOIN gare_frames f USING (frames_key)" if frame_columns else ""
