"""Damage done by hand to a real library, and what a search of it answers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lance
import psycopg
import pyarrow as pa

from gare import GARE, Library
from gare.library.index.index_run import IndexOptions
from gare.library.store import open_store
from gare.library.store.lance_damage import TABLE_KEYS, Files
from gare.library.store.lance_store import storage_options

QUERIES = ("a dog in the snow", "stripes", "a film - stripes")


@dataclass(frozen=True)
class Home:
    """Videos, the model that encoded them, and their library in a folder; nobody changes them."""

    folder: Path
    model: GARE

    @property
    def videos(self) -> Path:
        return self.folder / "videos"

    @property
    def library(self) -> Path:
        return self.folder / "library"


def answers(address: str | Path, model: GARE) -> list[Any]:
    """Everything that searches tell of a library: ids, scores, paths, moments, tags."""
    with Library.open(address, model=model, read_only=True) as library:
        found = [
            [
                (hit.id, hit.score, hit.path, hit.start, hit.end, hit.moment, hit.frame_times, hit.tags)
                for hit in library.search(query, top=100, exhaustive=exhaustive)
            ]
            for query in QUERIES
            for exhaustive in (False, True)
        ]
        assert library.searcher.damaged.warning() is None
        ids = sorted(item["id"] for item in library.items())
        pictures = library.store.fetch(ids, ["id", "thumbnail", "strip"]).to_pylist()
        named = sorted(item["id"] for item in library.items("name:*.mp4 tag:first"))
        return [found, pictures, named]


def copy_library(home: Home, address: str) -> None:
    """The same rows in another store."""
    source = open_store(home.library, read_only=True)
    target = open_store(address, stamp=source.stamp, create=True)
    columns = ["id", "frames_key", "vectors", "times", "thumbnail", "strip"]
    items = pa.Table.from_batches(list(source.scan()))
    frames = pa.Table.from_batches(list(source.scan(columns=columns))).drop_columns(["id"])
    files = pa.Table.from_batches(list(source.scan_files()))
    target.replace_files(items, frames, files)
    target.set_notes(source.get_notes())
    target.close()


def index_again(home: Home, address: str | Path) -> Any:
    with Library.open(address, model=home.model) as library:
        return library.index(home.videos, options=IndexOptions(num_workers=1))


# --- rows, in any store -------------------------------------------------------------------------------------


def tamper(address: str, table: str, key: str, column: str, change: Callable[[Any], Any]) -> None:
    """Change one value of a row behind the library's back."""
    if address.startswith("postgresql://"):
        name = TABLE_KEYS[table]
        with psycopg.connect(address, autocommit=True) as connection:
            kind = "::real[]" if column == "vector" else ""
            (value,) = connection.execute(
                f'SELECT "{column}"{kind} FROM gare_{table} WHERE {name} = %s', [key]
            ).fetchone() or (None,)
            changed = change(value)
            kind = "::real[]::vector" if column == "vector" else ""
            connection.execute(
                f'UPDATE gare_{table} SET "{column}" = %s{kind} WHERE {name} = %s', [changed, key]
            )
        return
    dataset = open_table(address, table)
    where = f"{TABLE_KEYS[table]} = '{key}'"
    (row,) = dataset.to_table(filter=where).to_pylist()
    row[column] = change(row[column])
    dataset.delete(where)
    lance.write_dataset(
        pa.Table.from_pylist([row], schema=dataset.schema),
        dataset.uri,
        mode="append",
        storage_options=dataset._storage_options,
    )


def open_table(address: str, table: str) -> Any:
    import os

    options = storage_options(os.environ) if "://" in address else {}
    return lance.dataset(f"{address}/{table}.lance", storage_options=options)


def remove_rows(address: str, table: str, keys: list[str]) -> None:
    if address.startswith("postgresql://"):
        with psycopg.connect(address, autocommit=True) as connection:
            if table == "frames":
                connection.execute("ALTER TABLE gare_items DROP CONSTRAINT gare_items_frames_key_fkey")
            connection.execute(f"DELETE FROM gare_{table} WHERE {TABLE_KEYS[table]} = ANY(%s)", [keys])
        return
    literals = ", ".join(f"'{key}'" for key in keys)
    open_table(address, table).delete(f"{TABLE_KEYS[table]} IN ({literals})")


def flip(content: bytes) -> bytes:
    """One bit in the middle."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def lose_table(address: str, table: str) -> None:
    if address.startswith("postgresql://"):
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute(f"DROP TABLE gare_{table} CASCADE")
    elif "://" in address:
        files = Files(address)
        for name in files.names(f"{table}.lance"):
            files.move(name, f"elsewhere/{name}")
    else:
        shutil.rmtree(Path(address) / f"{table}.lance")


# --- files, in a folder -------------------------------------------------------------------------------------


def data_file(library: Path, table: str) -> Path:
    return max((library / f"{table}.lance" / "data").iterdir(), key=lambda path: path.stat().st_size)


def manifests(library: Path, table: str) -> list[Path]:
    """The newest first."""
    return sorted((library / f"{table}.lance" / "_versions").glob("*.manifest"))
