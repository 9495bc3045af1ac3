"""Keeping a library in PostgreSQL quick and small, while others read and write."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import psycopg

from gare.library.store.base import Progress, Stats
from gare.library.store.postgres_tables import VECTOR_INDEX

INDEX_FROM_ROWS = 10_000
"""Below this, reading every vector takes a few milliseconds."""
_LOCK = 0x67617266
_TABLES = ("gare_items", "gare_frames", "gare_files", "gare_facts")


def maintain_database(
    connection: psycopg.Connection[Any], *, orphan_age: timedelta, progress: Progress | None
) -> Stats:
    def say(what: str, done: int) -> None:
        if progress:
            progress(what, done, 3)

    if not _value(connection, "SELECT pg_try_advisory_lock(%s)", [_LOCK]):
        busy = "another process is at it already: nothing was done"
        return Stats(_count(connection), _count_indexed(connection), 0, (busy,))
    try:
        actions = []
        size = _size(connection)
        say("removing orphaned frames", 0)
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
        freed = max(0, size - _size(connection))
        return Stats(_count(connection), _count_indexed(connection), freed, tuple(actions))
    finally:
        if not connection.closed:
            connection.execute("SELECT pg_advisory_unlock(%s)", [_LOCK])


def _build_index(connection: psycopg.Connection[Any]) -> str:
    """Once; from then on PostgreSQL keeps it itself. A killed build leaves an index that nobody may use."""
    num_items = _count(connection)
    if _count_indexed(connection) or num_items < INDEX_FROM_ROWS:
        return ""
    connection.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {VECTOR_INDEX}")
    connection.execute("SET maintenance_work_mem = '1GB'")
    connection.execute(
        f"CREATE INDEX CONCURRENTLY {VECTOR_INDEX} ON gare_items USING hnsw (vector vector_ip_ops)"
    )
    connection.execute("RESET maintenance_work_mem")
    return f"built the vector index over {num_items:,} items"


def _count(connection: psycopg.Connection[Any]) -> int:
    return int(_value(connection, "SELECT count(*) FROM gare_items"))


def _count_indexed(connection: psycopg.Connection[Any]) -> int:
    is_valid = _value(
        connection,
        "SELECT coalesce(bool_or(indisvalid), false) FROM pg_index WHERE indexrelid = to_regclass(%s)",
        [VECTOR_INDEX],
    )
    return _count(connection) if is_valid else 0


def _size(connection: psycopg.Connection[Any]) -> int:
    statement = "SELECT sum(pg_total_relation_size(name::regclass)) FROM unnest(%s::text[]) name"
    return int(_value(connection, statement, [list(_TABLES)]))


def _value(connection: psycopg.Connection[Any], statement: str, values: list[Any] | None = None) -> Any:
    row = connection.execute(statement, values).fetchone()
    assert row is not None
    return row[0]
