"""The tables of a library in PostgreSQL, and how Arrow rows become theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gare.library.schema import ModelStamp, file_schema, frame_schema, item_schema

if TYPE_CHECKING:
    import pyarrow as pa

VECTOR_INDEX = "gare_items_vector"
CREATE_FACTS = "CREATE TABLE IF NOT EXISTS gare_facts (key text PRIMARY KEY, value text NOT NULL)"


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
            vector vector({int(stamp.stage1_dim)}) NOT NULL, name_key text COLLATE "C" NOT NULL)""",
        "ALTER TABLE gare_items ALTER vector SET STORAGE PLAIN",
        "CREATE INDEX IF NOT EXISTS gare_items_frames_key ON gare_items (frames_key)",
        """CREATE TABLE IF NOT EXISTS gare_files (
            path text COLLATE "C" PRIMARY KEY, size int8 NOT NULL, mtime_ns int8 NOT NULL,
            content text NOT NULL, state text NOT NULL, error_kind text NOT NULL, error text NOT NULL,
            num_items int NOT NULL, split text NOT NULL, checked timestamptz NOT NULL)""",
    ]


def upsert_statement(table: str, columns: list[str], key: str, *, replace: bool) -> str:
    names = ", ".join(quoted(name) for name in columns)
    places = ", ".join("%s::real[]" if name == "times" else "%s" for name in columns)
    updates = ", ".join(f"{quoted(name)} = EXCLUDED.{quoted(name)}" for name in columns if name != key)
    conflict = f"DO UPDATE SET {updates}" if replace else "DO NOTHING"
    return f"INSERT INTO {table} ({names}) VALUES ({places}) ON CONFLICT ({key}) {conflict}"


def quoted(column: str) -> str:
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

    schemas = (file_schema(), frame_schema(), item_schema(stamp.stage1_dim))
    fields = {field.name: field for schema in schemas for field in schema}
    schema = pa.schema([fields[name] for name in columns])
    values = zip(*rows, strict=True) if rows else ([] for _ in columns)
    arrays = [
        pa.array([_from_database(value) for value in column], field.type)
        for column, field in zip(values, schema, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _from_database(value: Any) -> Any:
    return value.to_numpy() if hasattr(value, "to_numpy") else value
