"""The tables of a library in PostgreSQL: made, filled from Arrow rows, kept quick and small."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import psycopg
from psycopg import sql

from gare.library.store.store_protocol import Progress, Stats
from gare.library.store.store_schema import ModelStamp, columns_schema

if TYPE_CHECKING:
    import pyarrow as pa

VECTOR_INDEX = "gare_items_vector"
INDEX_FROM_ROWS = 10_000
"""The fewest items that get a vector index: reading fewer takes a few milliseconds."""
_UPKEEP_LOCK = 0x67617266
_TABLES = ("gare_items", "gare_frames", "gare_files", "gare_facts")
CREATE_FACTS = "CREATE TABLE IF NOT EXISTS gare_facts (key text PRIMARY KEY, value text NOT NULL)"

CREATE_PATH_INDEX = "CREATE INDEX IF NOT EXISTS gare_items_path ON gare_items (path)"


def create_statements(stamp: ModelStamp) -> list[str]:
    """Text is compared byte by byte (collation C): patterns must not depend on a server's language."""
    return [
        """CREATE TABLE IF NOT EXISTS gare_frames (
            frames_key text COLLATE "C" PRIMARY KEY, vectors bytea NOT NULL, times real[] NOT NULL,
            thumbnail bytea NOT NULL, strip bytea NOT NULL, written timestamptz NOT NULL DEFAULT now())""",
        # Compressing what does not compress costs time only.
        """ALTER TABLE gare_frames ALTER vectors SET STORAGE EXTERNAL, ALTER thumbnail SET STORAGE EXTERNAL,
            ALTER strip SET STORAGE EXTERNAL""",
        f"""CREATE TABLE IF NOT EXISTS gare_items (
            id text COLLATE "C" PRIMARY KEY, path text COLLATE "C" NOT NULL, content text NOT NULL,
            start float8 NOT NULL, "end" float8 NOT NULL, file_duration float8 NOT NULL,
            width int NOT NULL, height int NOT NULL,
            modified timestamptz NOT NULL, added timestamptz NOT NULL, tags text[] NOT NULL,
            frames_key text COLLATE "C" NOT NULL REFERENCES gare_frames,
            vector vector({int(stamp.stage1_dim)}) NOT NULL, checksum text NOT NULL DEFAULT '',
            name_key text COLLATE "C" NOT NULL)""",
        "ALTER TABLE gare_items ALTER vector SET STORAGE PLAIN",
        "CREATE INDEX IF NOT EXISTS gare_items_frames_key ON gare_items (frames_key)",
        CREATE_PATH_INDEX,
        """CREATE TABLE IF NOT EXISTS gare_files (
            path text COLLATE "C" PRIMARY KEY, size int8 NOT NULL, mtime_ns int8 NOT NULL,
            content text NOT NULL, state text NOT NULL, error_kind text NOT NULL, error text NOT NULL,
            num_items int NOT NULL, split text NOT NULL, checked timestamptz NOT NULL)""",
        *stamp_copies(stamp),
    ]


def stamp_copies(stamp: ModelStamp) -> list[str]:
    """Statements that keep a copy of the stamp with each table, should the facts be lost."""
    text = json.dumps(asdict(stamp)).replace("'", "''")
    return [f"COMMENT ON TABLE {table} IS '{text}'" for table in _TABLES if table != "gare_facts"]


def set_schema(connection: psycopg.Connection[Any], name: str) -> str:
    """The schema that holds the vectors of another model, beside those of this connection."""
    here = str(_value(connection, "SELECT current_schema()"))
    return f"{here[:40]}_gare_{name}"


def lost_tables(
    connection: psycopg.Connection[Any], schema: str | None = None, *, there: bool = False
) -> list[str]:
    """Tables of a library that are not there; or those that are.

    Args:
        schema: where they must be; None is wherever their names lead.
    """
    place = "" if schema is None else f"{sql.Identifier(schema).as_string(connection)}."
    statement = "SELECT name FROM unnest(%s::text[]) name WHERE (to_regclass(%s || name) IS NOT NULL) = %s"
    rows = connection.execute(statement, [list(_TABLES), place, there]).fetchall()
    return [row[0] for row in rows]


def empty_set(connection: psycopg.Connection[Any], name: str) -> None:
    """Empty every table of the vectors of another model, in one step."""
    schema = set_schema(connection, name)
    place = sql.Identifier(schema).as_string(connection)
    if held := lost_tables(connection, schema, there=True):
        connection.execute("TRUNCATE " + ", ".join(f"{place}.{table}" for table in held))


def has_rows(connection: psycopg.Connection[Any], schema: str | None = None) -> bool:
    """Whether there are items or frames."""
    held = set(lost_tables(connection, schema, there=True)) & {"gare_items", "gare_frames"}
    return any(_value(connection, f"SELECT EXISTS (SELECT 1 FROM {name})") for name in sorted(held))


def upsert_statement(table: str, columns: list[str], key: str, *, replace: bool) -> str:
    """The statement that adds a row; `replace` says what happens to one with the same key."""
    names = ", ".join(quoted(name) for name in columns)
    places = ", ".join("%s::real[]" if name == "times" else "%s" for name in columns)
    updates = ", ".join(f"{quoted(name)} = EXCLUDED.{quoted(name)}" for name in columns if name != key)
    conflict = f"DO UPDATE SET {updates}" if replace else "DO NOTHING"
    return f"INSERT INTO {table} ({names}) VALUES ({places}) ON CONFLICT ({key}) {conflict}"


def quoted(column: str) -> str:
    """A column name in quotes: `end` is a word of SQL."""
    return f'"{column}"'


def to_rows(table: pa.Table, key: str) -> list[tuple[Any, ...]]:
    """Rows in the order of their keys: writers that lock in one order never wait in a circle."""
    table = table.sort_by(key)
    return list(zip(*(_to_python(table[name], name) for name in table.column_names), strict=True))


def _to_python(column: Any, name: str) -> list[Any]:
    if name == "vector":
        return list(np.stack(column.to_pylist()).astype(np.float32)) if len(column) else []
    return [_clean(value) for value in column.to_pylist()]


def _clean(value: Any) -> Any:
    """PostgreSQL has no text with a NUL in it; an error message of a decoder may have one."""
    return value.replace("\0", "\ufffd") if isinstance(value, str) else value


def to_table(rows: list[tuple[Any, ...]], columns: list[str], stamp: ModelStamp) -> pa.Table:
    """Rows as read, as the Arrow table every store returns."""
    import pyarrow as pa

    schema = columns_schema(columns, stamp)
    values = zip(*rows, strict=True) if rows else ([] for _ in columns)
    arrays = [
        pa.array([_from_database(value) for value in column], field.type)
        for column, field in zip(values, schema, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _from_database(value: Any) -> Any:
    return value.to_numpy() if hasattr(value, "to_numpy") else value


# --- upkeep, while others read and write --------------------------------------------------------------------


def maintain_database(
    connection: psycopg.Connection[Any], *, orphan_age: timedelta, progress: Progress | None
) -> Stats:
    """Remove orphaned frames, build the vector index, let PostgreSQL clean up."""

    def say(what: str, done: int) -> None:
        if progress:
            progress(what, done, 3)

    if not _value(connection, "SELECT pg_try_advisory_lock(%s)", [_UPKEEP_LOCK]):
        busy = "another process is at it already: nothing was done"
        return Stats(_count(connection), count_indexed(connection), 0, (busy,))
    try:
        actions = []
        size = database_bytes(connection)
        say("removing orphaned frames", 0)
        connection.execute(CREATE_PATH_INDEX)  # libraries made before it lack it
        removed = connection.execute(
            "DELETE FROM gare_frames f WHERE written < now() - %s "
            "AND NOT EXISTS (SELECT 1 FROM gare_items i WHERE i.frames_key = f.frames_key)",
            [orphan_age],
        ).rowcount
        if removed:
            actions.append(f"removed the frames of {removed:,} items that are gone")
        say("indexing vectors", 1)
        if built := _build_index(connection):
            actions.append(built)
        say("vacuum", 2)
        for table in _TABLES:
            connection.execute(f"VACUUM ANALYZE {table}")
        say("done", 3)
        freed = max(0, size - database_bytes(connection))
        return Stats(_count(connection), count_indexed(connection), freed, tuple(actions))
    finally:
        if not connection.closed:
            connection.execute("SELECT pg_advisory_unlock(%s)", [_UPKEEP_LOCK])


def _build_index(connection: psycopg.Connection[Any]) -> str:
    """Once; from then on PostgreSQL keeps it itself. A killed build leaves an index that nobody may use."""
    num_items = _count(connection)
    if count_indexed(connection) or num_items < INDEX_FROM_ROWS:
        return ""
    drop_index(connection)
    connection.execute("SET maintenance_work_mem = '1GB'")
    connection.execute(
        f"CREATE INDEX CONCURRENTLY {VECTOR_INDEX} ON gare_items USING hnsw (vector vector_ip_ops)"
    )
    connection.execute("RESET maintenance_work_mem")
    return f"built the vector index over {num_items:,} items"


def drop_index(connection: psycopg.Connection[Any]) -> None:
    """Remove the vector index, by its full name: without one, that of the library's first model would go."""
    schema = str(_value(connection, "SELECT current_schema()"))
    index = sql.Identifier(schema, VECTOR_INDEX)
    connection.execute(sql.SQL("DROP INDEX CONCURRENTLY IF EXISTS {}").format(index))


def _count(connection: psycopg.Connection[Any]) -> int:
    return int(_value(connection, "SELECT count(*) FROM gare_items"))


def count_indexed(connection: psycopg.Connection[Any]) -> int:
    """Items that the vector index covers: all, or none while it is not valid."""
    is_valid = _value(
        connection,
        "SELECT coalesce(bool_or(indisvalid), false) FROM pg_index JOIN pg_class c ON c.oid = indexrelid "
        "WHERE indrelid = 'gare_items'::regclass AND c.relname = %s",
        [VECTOR_INDEX],
    )
    return _count(connection) if is_valid else 0


def database_bytes(connection: psycopg.Connection[Any]) -> int:
    """The size of the tables and their indexes."""
    statement = "SELECT sum(pg_total_relation_size(name::regclass)) FROM unnest(%s::text[]) name"
    return int(_value(connection, statement, [list(_TABLES)]))


def _value(connection: psycopg.Connection[Any], statement: str, values: list[Any] | None = None) -> Any:
    row = connection.execute(statement, values).fetchone()
    assert row is not None
    return row[0]
