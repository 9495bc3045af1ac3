"""A library in PostgreSQL with pgvector: tables gare_items, gare_frames, gare_files and gare_facts.

Several libraries share a database through `?options=-csearch_path%3Dname,public`. With synchronous replicas
no acknowledged row is lost when the primary is; list all hosts in the address and work goes on at another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import psycopg
from psycopg import errors, sql

from gare.library.filters.filter_simplification import simplify
from gare.library.filters.filter_tree import (
    And,
    DurationBetween,
    Filter,
    HasTag,
    IdIn,
    InFolder,
    ModifiedBetween,
    NameLike,
    Not,
    Or,
    folder_needle,
    modified_limits,
    name_key,
    name_regex,
)
from gare.library.store.postgres_link import Link
from gare.library.store.postgres_tables import (
    CREATE_FACTS,
    count_indexed,
    create_statements,
    database_bytes,
    drop_index,
    empty_set,
    has_rows,
    lost_tables,
    maintain_database,
    quoted,
    set_schema,
    stamp_copies,
    to_rows,
    to_table,
    upsert_statement,
)
from gare.library.store.read_deadline import check_deadline
from gare.library.store.row_checksums import CHECKSUM_COLUMN
from gare.library.store.shared_records import PostgresRecords, Records
from gare.library.store.store_protocol import (
    Hits,
    Progress,
    Stats,
    Store,
    damaged_library,
    no_library,
    parse_facts,
)
from gare.library.store.store_schema import (
    SCHEMA_VERSION,
    ModelStamp,
    check_query,
    check_same_model,
    checked_files,
    checked_frames,
    checked_items,
    file_schema,
    item_schema,
    migrate,
    sort_columns,
)

if TYPE_CHECKING:
    import pyarrow as pa

SCAN_MATCHES = 20_000
_MOST_CANDIDATES = 1000  # pgvector's own limit for hnsw.ef_search
_NOTE = "note:"
_SCAN_ROWS = 2048
_CHECKSUMS_SINCE = 2
_MADE_WITH = "made_with_format"  # libraries made before format 2 have none
_LOCK = 0x67617265  # "gare": makers and migrators of a library wait for each other

Connection = psycopg.Connection[Any]
Condition = tuple[str, list[Any]]


class PostgresStore(Store):
    """A library as PostgreSQL tables; `open_store` makes one."""

    def __init__(
        self,
        uri: str,
        *,
        stamp: ModelStamp | None,
        create: bool,
        read_only: bool,
        schema: str | None = None,
    ) -> None:
        """`schema` holds the tables of another model's vectors; None is where the address leads."""
        self._link = Link(uri, read_only=read_only, schema=schema)
        self._schema = schema
        self.uri = self._link.shown
        self.orphan_age = timedelta(days=1)
        self.repairs: tuple[str, ...] = ()
        try:
            self._link.run(lambda connection: self._open(connection, stamp, create), patient=False)
            self._link.vector_exists()
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        return self._link.address

    def _open(self, connection: Connection, stamp: ModelStamp | None, create: bool) -> None:
        facts = self._read_facts(connection) if self._has_facts(connection) else {}
        if not facts:
            # Without its facts, another model might take it over.
            if has_rows(connection, self._schema):
                raise damaged_library(self.uri, "its table gare_facts is gone or empty")
            if not create or stamp is None:
                raise no_library(self.uri)
            facts = self._found(connection, stamp)
        self.stamp, version = parse_facts(self.uri, facts)
        if lost := lost_tables(connection, self._schema):
            raise damaged_library(self.uri, f"its table {lost[0]} is gone")
        self.counts_deletions = _MADE_WITH in facts
        check_same_model(self.uri, self.stamp, stamp)
        self._lacks_checksums = version < _CHECKSUMS_SINCE and self._link.read_only
        if version == SCHEMA_VERSION:
            return
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
            version = int(self._read_facts(connection)["schema_version"])
            self.repairs = migrate(self, version, read_only=self._link.read_only)
            if self.repairs:
                for statement in stamp_copies(self.stamp):
                    connection.execute(statement)

    def _found(self, connection: Connection, stamp: ModelStamp) -> dict[str, str]:
        """Make the tables and the facts in one transaction; whoever comes second finds them."""
        facts = {
            "schema_version": str(SCHEMA_VERSION),
            "stamp": json.dumps(asdict(stamp)),
            _MADE_WITH: str(SCHEMA_VERSION),
        }
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
            if self._schema is not None:
                schema = sql.Identifier(self._schema)
                connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(schema))
            connection.execute(CREATE_FACTS)
            if found := self._read_facts(connection):
                return found
            for statement in create_statements(stamp):
                connection.execute(statement)
            self._write_facts(connection, facts)
        return facts

    def _has_facts(self, connection: Connection) -> bool:
        """Whether the schema has tables: without them, their names would lead to those of the library."""
        if self._schema is None:
            return True
        statement = "SELECT count(*) > 0 FROM pg_tables WHERE schemaname = %s AND tablename = 'gare_facts'"
        return bool(_one(connection, statement, [self._schema]))

    # Items and frames

    def upsert(self, items: pa.Table, frames: pa.Table) -> int:
        self._write_rows(items, frames, None)
        return int(items.num_rows)

    def replace_files(self, items: pa.Table, frames: pa.Table, files: pa.Table) -> None:
        self._write_rows(items, frames, checked_files(files))

    def _write_rows(self, items: pa.Table, frames: pa.Table, files: pa.Table | None) -> None:
        """In one transaction. The ledger comes first: who writes the same file waits there for the other."""
        items = checked_items(items, self.stamp)
        names = [name_key(path) for path in items["path"].to_pylist()]
        items = items.append_column("name_key", [names])
        tables = [
            ("gare_frames", checked_frames(frames, self.stamp), "frames_key", False),
            ("gare_items", items, "id", True),
        ]
        if files is not None:
            tables.insert(0, ("gare_files", files, "path", True))

        def write(connection: Connection) -> None:
            with connection.transaction(), connection.cursor() as cursor:
                for table, rows, key, replace in tables:
                    if rows.num_rows:
                        statement = upsert_statement(table, rows.column_names, key, replace=replace)
                        cursor.executemany(statement, to_rows(rows, key))
                if files is not None:
                    cursor.execute(
                        "DELETE FROM gare_items WHERE path = ANY(%s) AND id <> ALL(%s)",
                        [files["path"].to_pylist(), items["id"].to_pylist()],
                    )

        try:
            self._link.run(write)
        except errors.ForeignKeyViolation:
            raise ValueError("items refer to frames that are neither given nor in the library") from None

    def items_of(self, paths: Sequence[str]) -> dict[str, str]:
        statement = "SELECT id, frames_key FROM gare_items WHERE path = ANY(%s)"
        return self._link.run(
            lambda connection: dict(connection.execute(statement, [list(paths)]).fetchall())
        )

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
                hits = [_nearest(connection, query, k, condition, values) for query in queries]
                return [replace(hit, is_exact=True) for hit in hits]

        return self._link.run(find)

    def fetch(self, ids: Sequence[str], columns: Sequence[str]) -> pa.Table:
        _, frame_columns = sort_columns(columns, self.stamp)
        statement = (
            f"SELECT {self._selected(columns, frame_columns)} "
            "FROM unnest(%s::text[]) WITH ORDINALITY AS wanted(id, place) "
            f"JOIN gare_items i USING (id) {_with_frames(frame_columns)} ORDER BY place"
        )

        def read(connection: Connection) -> list[Any]:
            return connection.execute(statement, [list(ids)], binary=True).fetchall()

        rows = self._link.run(read)
        if frame_columns and len(rows) < len(ids) and (lost := self._without_frames(ids)):
            raise damaged_library(self.uri, f"item {lost[0]} has no frames")
        return to_table(rows, list(columns), self.stamp)

    def _without_frames(self, ids: Sequence[str] | None = None) -> list[str]:
        """Items whose frames are gone: those that were deleted just now are not there at all."""
        statement = (
            "SELECT id FROM gare_items i WHERE (%s::text[] IS NULL OR id = ANY(%s)) AND NOT EXISTS "
            "(SELECT 1 FROM gare_frames f WHERE f.frames_key = i.frames_key) ORDER BY id"
        )
        wanted = None if ids is None else list(ids)
        rows = self._link.run(lambda connection: connection.execute(statement, [wanted, wanted]).fetchall())
        return [row[0] for row in rows]

    def scan(
        self, *, where: Filter | None = None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        columns = list(columns) if columns is not None else item_schema(self.stamp.stage1_dim).names
        _, frame_columns = sort_columns(columns, self.stamp)
        condition, values = to_postgres(where)
        statement = (
            f"SELECT {self._selected(columns, frame_columns)} FROM gare_items i "
            f"{_with_frames(frame_columns)} WHERE {condition}"
        )
        yield from self._read_batches(statement, values, columns)

    def _read_batches(
        self, statement: str, values: list[Any], columns: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        """Read over a connection of its own: the reader may write to the store between two batches.

        A connection that is lost before the first batch is made anew; later its reader hears of it.
        """

        def begin(_: Connection) -> tuple[ExitStack, Any, list[Any]]:
            with ExitStack() as stack:
                connection = stack.enter_context(self._link.connect())
                stack.enter_context(connection.transaction())
                cursor = stack.enter_context(connection.cursor("gare_scan", binary=True))
                cursor.execute(statement, values)
                rows = cursor.fetchmany(_SCAN_ROWS)
                return stack.pop_all(), cursor, rows

        held, cursor, rows = self._link.run(begin)
        with self._link.explained(), held:
            while rows:
                check_deadline()
                yield from to_table(rows, list(columns), self.stamp).to_batches()
                rows = cursor.fetchmany(_SCAN_ROWS)

    def _selected(self, columns: Sequence[str], frame_columns: list[str]) -> str:
        return ", ".join(
            "''"
            if self._lacks_checksums and name == CHECKSUM_COLUMN
            else f"{'f' if name in frame_columns else 'i'}.{quoted(name)}"
            for name in columns
        )

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

    def records(self) -> Records:
        return PostgresRecords(self._link)

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

    # Vectors of another model

    def beside(self, name: str, *, stamp: ModelStamp | None, create: bool, read_only: bool) -> Store:
        schema = self._link.run(lambda connection: set_schema(connection, name))
        return PostgresStore(self.address, stamp=stamp, create=create, read_only=read_only, schema=schema)

    def drop_beside(self, name: str) -> None:
        """Empty its tables. They stay: who still reads there would be led to the tables of the library."""
        self._link.run(lambda connection: empty_set(connection, name))

    def discard(self) -> None:
        self._link.run(lambda connection: connection.execute("TRUNCATE gare_items, gare_frames, gare_files"))

    def num_bytes(self) -> int:
        return self._link.run(database_bytes)

    # Upkeep

    def check(self) -> None:
        if lost := self._link.run(lambda connection: lost_tables(connection, self._schema)):
            raise damaged_library(self.uri, f"its table {lost[0]} is gone")
        if missing := self._without_frames():
            raise damaged_library(self.uri, f"{len(missing):,} items have no frames, such as {missing[0]}")

    def num_indexed(self) -> int:
        return self._link.run(count_indexed)

    def drop_index(self) -> None:
        self._link.run(drop_index)

    def misnamed(self) -> list[str]:
        statement = "SELECT id, path, name_key FROM gare_items"
        rows = self._link.run(lambda connection: connection.execute(statement).fetchall())
        return [item for item, path, name in rows if name != name_key(path)]

    def frames_keys(self) -> set[str] | None:
        statement = "SELECT frames_key FROM gare_frames"
        rows = self._link.run(lambda connection: connection.execute(statement).fetchall())
        return {row[0] for row in rows}

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
        """Note the version of the format."""
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


def _with_frames(frame_columns: list[str]) -> str:
    return "JOIN gare_frames f USING (frames_key)" if frame_columns else ""


# --- filters, as conditions; values travel as parameters, never in the text ---------------------------------


def to_postgres(where: Filter | None) -> Condition:
    """The condition of the simplified filter with placeholders, and what goes into them.

    Raises:
        QueryError: the filter is too deep or too long.
    """
    return ("true", []) if where is None else _condition(simplify(where))


def _condition(where: Filter) -> Condition:
    match where:
        case InFolder(folder):
            at_start, needle = folder_needle(folder)
            return _text("starts_with(i.path, %s)" if at_start else "strpos(i.path, %s) > 0", needle)
        case NameLike(pattern):
            return _text("i.name_key ~ %s", name_regex(pattern))
        case DurationBetween(shortest, longest):
            return _limits("i.file_duration", "float8", ((">=", shortest), ("<=", longest)))
        case ModifiedBetween():
            first, beyond = modified_limits(where)
            return _limits("i.modified", "timestamptz", ((">=", first), ("<", beyond)))
        case HasTag(tag):
            return _text("%s = ANY(i.tags)", tag)
        case IdIn(ids):
            return "i.id = ANY(%s)", [[one for one in ids if "\0" not in one]]
        case And(filters):
            return _join(filters, " AND ", "true")
        case Or(filters):
            return _join(filters, " OR ", "false")
        case Not(part):
            condition, values = _condition(part)
            return f"NOT {condition}", values


def _text(condition: str, value: str) -> Condition:
    """PostgreSQL has no text with a NUL, so nothing it holds can match one."""
    return ("false", []) if "\0" in value else (f"({condition})", [value])


def _limits(expression: str, kind: str, limits: tuple[tuple[str, Any], ...]) -> Condition:
    set_limits = [(sign, value) for sign, value in limits if value is not None]
    conditions = [f"{expression} {sign} %s::{kind}" for sign, _ in set_limits]
    return f"({' AND '.join(conditions) or 'true'})", [value for _, value in set_limits]


def _join(filters: tuple[Filter, ...], operator: str, when_empty: str) -> Condition:
    parts = [_condition(part) for part in filters]
    joined = operator.join(condition for condition, _ in parts)
    return f"({joined or when_empty})", [value for _, values in parts for value in values]
