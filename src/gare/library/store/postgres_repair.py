"""Finds and mends what is wrong with the tables of a library in PostgreSQL, below its rows.

The server looks after its own pages; here is what happens above them: tables that were dropped, facts that
were deleted, items that no rule binds to their frames any more. An index that a killed `maintain` left is no
damage: nobody uses it, and the next one builds it.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import errors

from gare.errors import DamagedLibraryError
from gare.library.store.postgres_link import Link
from gare.library.store.postgres_tables import (
    CREATE_FACTS,
    create_statements,
    lost_tables,
    set_schema,
    stamp_copies,
    upsert_statement,
)
from gare.library.store.store_damage import REPAIR_FACT, Damage, Surgeon
from gare.library.store.store_schema import SCHEMA_VERSION, ModelStamp, parse_stamp

if TYPE_CHECKING:
    import pyarrow as pa

Connection = psycopg.Connection[Any]


class PostgresSurgeon(Surgeon):
    """For libraries in PostgreSQL."""

    def __init__(self, uri: str, schema: str | None = None) -> None:
        """`schema` holds the tables of another model's vectors; None is where the address leads."""
        self._link = Link(uri, read_only=False, schema=schema)
        self._schema = schema
        self.uri = self._link.shown

    def beside(self, name: str) -> Surgeon:
        schema = self._link.run(lambda connection: set_schema(connection, name))
        return PostgresSurgeon(self._link.address, schema)

    def exists(self) -> bool:
        return bool(
            self._link.run(
                lambda connection: lost_tables(connection, self._schema, there=True), patient=False
            )
        )

    def stamp(self) -> ModelStamp | None:
        return self._link.run(_find_stamp)

    def examine(self, *, read_all: bool = False) -> list[Damage]:
        return self._link.run(lambda connection: _examine(connection, self._schema))

    def sample(self) -> pa.Table:
        import pyarrow as pa

        statement = (
            "SELECT i.path, i.content, i.start, i.frames_key, f.vectors FROM gare_items i "
            "JOIN gare_frames f USING (frames_key) LIMIT 16"
        )
        try:
            rows = self._link.run(lambda connection: connection.execute(statement).fetchall())
        except DamagedLibraryError:
            rows = []
        columns = ("path", "content", "start", "frames_key", "vectors")
        return pa.Table.from_pylist([dict(zip(columns, row, strict=True)) for row in rows])

    def mend(self, stamp: ModelStamp, *, read_all: bool = True) -> list[str]:
        return self._link.run(lambda connection: _mend(connection, stamp, self._schema))

    def close(self) -> None:
        self._link.close()


def _examine(connection: Connection, schema: str | None) -> list[Damage]:
    lost = lost_tables(connection, schema)
    damages = [Damage("lost_table", name.removeprefix("gare_"), f"the table {name} is gone") for name in lost]
    wrong = [] if "gare_facts" in lost else _wrong_facts(connection, _find_stamp(connection))
    if wrong:
        what = f"gare_facts: {', '.join(wrong)} gone or not as written"
        damages.append(Damage("lost_facts", "facts", what))
    if not lost and not _is_linked(connection):
        what = "gare_items has lost its foreign key: the database does not check that items have frames"
        damages.append(Damage("lost_link", "items", what))
    return damages


def _mend(connection: Connection, stamp: ModelStamp, schema: str | None) -> list[str]:
    """In one transaction, but for the index."""
    done = []
    with connection.transaction():
        lost = lost_tables(connection, schema)
        had_facts = "gare_facts" not in lost
        if not had_facts:
            connection.execute(CREATE_FACTS)
        columns = _columns(connection, "gare_items")
        if lost:
            for statement in create_statements(stamp):
                connection.execute(statement)
            done += [f"the table {name} was made anew" for name in lost]
        is_old = bool(columns) and "checksum" not in columns
        whole = {"stamp": json.dumps(asdict(stamp)), "schema_version": "1" if is_old else str(SCHEMA_VERSION)}
        missing = {name: whole[name] for name in _wrong_facts(connection, stamp)}
        if missing:
            done.append(f"wrote the facts of the library anew: {', '.join(sorted(missing))}")
        if damaged := [*lost, *(["gare_facts"] if missing else [])]:
            names = ",".join(name.removeprefix("gare_") for name in damaged)
            statement = upsert_statement("gare_facts", ["key", "value"], "key", replace=True)
            with connection.cursor() as cursor:
                cursor.executemany(statement, sorted({**missing, REPAIR_FACT: names}.items()))
        for statement in stamp_copies(stamp):
            connection.execute(statement)
    if not _is_linked(connection):
        # Not valid yet: items whose frames are gone get theirs afterwards, and new ones are checked at once.
        connection.execute(
            "ALTER TABLE gare_items ADD FOREIGN KEY (frames_key) REFERENCES gare_frames NOT VALID"
        )
        done.append("the database checks again that items have frames")
    return done


def _facts(connection: Connection) -> dict[str, str]:
    return dict(connection.execute("SELECT key, value FROM gare_facts").fetchall())


def _find_stamp(connection: Connection) -> ModelStamp | None:
    """The stamp that most copies say: that of the facts, and one with each table."""
    try:
        with connection.transaction():
            texts = [_facts(connection).get("stamp")]
    except errors.UndefinedTable:
        texts = []
    statement = "SELECT obj_description(to_regclass(name)::oid, 'pg_class') FROM unnest(%s::text[]) name"
    names = ["gare_items", "gare_frames", "gare_files"]
    texts += [row[0] for row in connection.execute(statement, [names]).fetchall()]
    stamps = Counter(stamp for stamp in map(parse_stamp, texts) if stamp is not None)
    return stamps.most_common(1)[0][0] if stamps else None


def _wrong_facts(connection: Connection, stamp: ModelStamp | None) -> list[str]:
    """The keys of facts that are not there, or cannot be right."""
    facts = _facts(connection)
    found = parse_stamp(facts.get("stamp"))
    wrong = ["stamp"] if found is None or found != stamp else []
    return wrong if facts.get("schema_version", "").isdecimal() else [*wrong, "schema_version"]


def _columns(connection: Connection, table: str) -> set[str]:
    statement = "SELECT attname FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attnum > 0"
    return {row[0] for row in connection.execute(statement, [table]).fetchall()}


def _is_linked(connection: Connection) -> bool:
    statement = (
        "SELECT 1 FROM pg_constraint WHERE contype = 'f' AND conrelid = to_regclass('gare_items') "
        "AND confrelid = to_regclass('gare_frames')"
    )
    return connection.execute(statement).fetchone() is not None
