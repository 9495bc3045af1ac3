"""A library of an older format becomes one of today, rows and all."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lance
import psycopg
import pyarrow as pa
import pytest

from gare.errors import LibraryError
from gare.library.store import open_store, store_schema
from gare.library.store.store_schema import SCHEMA_VERSION
from stores import STAMP, make_files, make_rows, read_all

PATHS = ["/a.mp4", "/b.mp4"]


def make_version_0(folder: Path) -> None:
    """As version 0 wrote it: no `split` in files, no `strip` in frames."""
    items, frames = make_rows(PATHS)
    files = make_files(PATHS)
    facts = {"schema_version": "0", "stamp": json.dumps(asdict(STAMP))}
    names = pa.array(["a.mp4", "b.mp4"])
    tables = {
        "items": items.append_column(pa.field("name_key", pa.string(), nullable=False), names),
        "frames": frames.drop_columns(["strip"]).append_column("written", items["added"]),
        "files": files.drop_columns(["split"]),
        "facts": pa.table({"key": list(facts), "value": list(facts.values())}),
    }
    for name, table in tables.items():
        lance.write_dataset(table, str(folder / f"{name}.lance"))


def check_migrated(store: Any) -> None:
    assert store.repairs == (
        "the library was brought from format 0 to 1",
        "the library was brought from format 1 to 2",
        "the library was brought from format 2 to 3",
    )
    assert read_all(store)["path"].to_pylist() == make_rows(PATHS)[0].sort_by("id")["path"].to_pylist()
    ids = read_all(store)["id"].to_pylist()
    assert store.fetch(ids, ["strip", "thumbnail"])["strip"].to_pylist() == [b"", b""]
    (batch,) = store.scan_files(["path", "split"])
    assert sorted(zip(batch["path"].to_pylist(), batch["split"].to_pylist(), strict=True)) == [
        ("/a.mp4", "whole"),
        ("/b.mp4", "whole"),
    ]
    store.upsert(*make_rows(["/c.mp4"]))  # today's rows go in
    store.record_files(make_files(["/c.mp4"]))
    assert store.count() == 3


def test_a_folder_of_version_0_is_brought_up_to_date(tmp_path: Path):
    make_version_0(tmp_path)
    with pytest.raises(LibraryError, match="Open it once for writing"):
        open_store(tmp_path, read_only=True)
    check_migrated(open_store(tmp_path, stamp=STAMP))
    assert open_store(tmp_path).repairs == ()
    assert open_store(tmp_path, read_only=True).count() == 3


def test_a_migration_that_was_killed_is_taken_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_version_0(tmp_path)
    real = store_schema.MIGRATIONS[0]

    def half(store: store_schema.Migratable) -> None:
        store.add_column("files", "split", "whole")
        raise KeyboardInterrupt

    monkeypatch.setattr(store_schema, "MIGRATIONS", [half, *store_schema.MIGRATIONS[1:]])
    with pytest.raises(KeyboardInterrupt):
        open_store(tmp_path)
    monkeypatch.setattr(store_schema, "MIGRATIONS", [real, *store_schema.MIGRATIONS[1:]])
    check_migrated(open_store(tmp_path))


def test_a_database_of_version_0_is_brought_up_to_date(new_library: Any):
    uri = new_library("postgres")
    store = open_store(uri, stamp=STAMP, create=True)
    store.upsert(*make_rows(PATHS))
    store.record_files(make_files(PATHS))
    store.close()
    with psycopg.connect(uri, autocommit=True) as connection:
        connection.execute("ALTER TABLE gare_items DROP COLUMN checksum")
        connection.execute("ALTER TABLE gare_files DROP COLUMN split")
        connection.execute("ALTER TABLE gare_frames DROP COLUMN strip")
        connection.execute("UPDATE gare_facts SET value = '0' WHERE key = 'schema_version'")
    with pytest.raises(LibraryError, match="Open it once for writing"):
        open_store(uri, read_only=True)
    store = open_store(uri)
    check_migrated(store)
    store.close()


def test_a_folder_of_version_1_is_read_as_it_is_and_gets_checksums_when_written(tmp_path: Path):
    open_store(tmp_path, stamp=STAMP, create=True).upsert(*make_rows(PATHS))
    lance.dataset(str(tmp_path / "items.lance")).drop_columns(["checksum"])
    facts = lance.dataset(str(tmp_path / "facts.lance"))
    facts.update({"value": "'1'"}, where="key = 'schema_version'")
    check_version_1(str(tmp_path))


def test_a_database_of_version_1_is_read_as_it_is_and_gets_checksums_when_written(new_library: Any):
    uri = new_library("postgres")
    store = open_store(uri, stamp=STAMP, create=True)
    store.upsert(*make_rows(PATHS))
    store.close()
    with psycopg.connect(uri, autocommit=True) as connection:
        connection.execute("ALTER TABLE gare_items DROP COLUMN checksum")
        connection.execute("UPDATE gare_facts SET value = '1' WHERE key = 'schema_version'")
    check_version_1(uri)


def check_version_1(uri: str) -> None:
    old = open_store(uri, read_only=True)
    ids = read_all(old, ["id", "checksum"])["id"].to_pylist()
    for table in (read_all(old, ["id", "checksum"]), old.fetch(ids, ["path", "checksum", "times"])):
        assert table["checksum"].to_pylist() == ["", ""]
    old.close()
    store = open_store(uri)
    steps = ("the library was brought from format 1 to 2", "the library was brought from format 2 to 3")
    assert store.repairs == steps
    assert store.fetch(ids, ["checksum"])["checksum"].to_pylist() == ["", ""]
    store.upsert(*make_rows(PATHS))
    assert all(store.fetch(ids, ["checksum"])["checksum"].to_pylist())
    store.close()


def test_there_is_a_step_from_every_version():
    assert len(store_schema.MIGRATIONS) == SCHEMA_VERSION
