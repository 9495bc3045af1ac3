"""A store of one's own, written here alone and in docs/how-to/add-a-store.md: SQLite.

It is registered, or installed, and used through `gare.Library` and the command line like any other.
"""

from __future__ import annotations

import inspect
import json
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from typer.testing import CliRunner

import gare
from clips import steady, write_video
from gare.cli.main import app
from gare.errors import LibraryError, MissingLibraryError
from gare.library.filters import Filter, matches
from gare.library.store import STORES, ModelStamp, Store, open_store
from gare.library.store.store_protocol import no_library
from gare.library.store.store_schema import columns_schema, file_schema, item_schema
from strangers import as_it_was, blocks, installed, points

PAGE = "add-a-store.md"
KEYS = {"items": "id", "frames": "frames_key", "files": "path"}


class SqliteStore(Store):
    """Rows by their key, each as a small Arrow stream; the stamp and the notes as JSON."""

    def __init__(self, uri: str, *, stamp: ModelStamp | None, create: bool, read_only: bool) -> None:
        path = os.path.expanduser(uri.removeprefix("sqlite://"))
        if not create and not os.path.exists(path):
            raise no_library(uri)
        self.uri = uri
        self._lock = threading.Lock()
        self._database = sqlite3.connect(path, check_same_thread=False)
        for table in (*KEYS, "facts"):
            self._database.execute(f"CREATE TABLE IF NOT EXISTS {table} (key TEXT PRIMARY KEY, row BLOB)")
        facts = self._facts()
        if "stamp" not in facts:
            if stamp is None:
                raise no_library(uri)
            self._write("INSERT INTO facts VALUES (?, ?)", [("stamp", json.dumps(asdict(stamp)))])
            facts = self._facts()
        self.stamp = ModelStamp(**json.loads(facts["stamp"]))

    def upsert(self, items: pa.Table, frames: pa.Table) -> int:
        self._write("INSERT OR IGNORE INTO frames VALUES (?, ?)", packed("frames", frames))
        self._write("INSERT OR REPLACE INTO items VALUES (?, ?)", packed("items", items))
        return len(items)

    def delete(self, ids: Sequence[str]) -> int:
        return self._write("DELETE FROM items WHERE key = ?", [(item,) for item in ids])

    def scan(
        self, *, where: Filter | None = None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        schema = columns_schema(columns or item_schema(self.stamp.stage1_dim).names, self.stamp)
        frames = {row["frames_key"]: row for row in self._rows("frames")}
        items = [item for item in self._rows("items") if where is None or matches(where, item)]
        yield pa.RecordBatch.from_pylist([frames[item["frames_key"]] | item for item in items], schema=schema)

    def record_files(self, files: pa.Table) -> None:
        self._write("INSERT OR REPLACE INTO files VALUES (?, ?)", packed("files", files))

    def forget_files(self, paths: Sequence[str]) -> None:
        self._write("DELETE FROM files WHERE key = ?", [(path,) for path in paths])

    def scan_files(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        rows = pa.RecordBatch.from_pylist(self._rows("files"), schema=file_schema())
        yield rows.select(columns or file_schema().names)

    def get_notes(self) -> dict[str, str]:
        notes: dict[str, str] = json.loads(self._facts().get("notes", "{}"))
        return notes

    def set_notes(self, notes: Mapping[str, str]) -> None:
        together = json.dumps({**self.get_notes(), **notes})
        self._write("INSERT OR REPLACE INTO facts VALUES (?, ?)", [("notes", together)])

    def close(self) -> None:
        self._database.close()

    def _write(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> int:
        """One transaction: durable when it returns."""
        with self._lock, self._database:
            return self._database.executemany(statement, rows).rowcount

    def _rows(self, table: str) -> list[dict[str, Any]]:
        with self._lock:
            found = self._database.execute(f"SELECT row FROM {table}").fetchall()
        return [pa.ipc.open_stream(row).read_all().to_pylist()[0] for (row,) in found]

    def _facts(self) -> dict[str, str]:
        with self._lock:
            return dict(self._database.execute("SELECT key, row FROM facts").fetchall())


def packed(table: str, rows: pa.Table) -> list[tuple[str, bytes]]:
    """Each row of an Arrow table with its key, as the bytes of an Arrow stream."""
    found = []
    for number, key in enumerate(rows[KEYS[table]].to_pylist()):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema) as stream:
            stream.write_table(rows.slice(number, 1))
        found.append((key, sink.getvalue().to_pybytes()))
    return found


@pytest.fixture(scope="module")
def model() -> gare.GARE:
    torch.manual_seed(0)
    config = {"encoder": {"name": "tiny"}, "temporal": {"num_layers": 1}}
    return gare.GARE(gare.GareConfig.load(config)).eval()


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with as_it_was(STORES):
        STORES.register("sqlite", SqliteStore)
        yield


@pytest.fixture
def holidays(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite://{tmp_path_factory.mktemp('database')}/holidays.db"


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    (tmp_path / "sea").mkdir()
    for number, name in enumerate(("a.mp4", "b.mp4", "sea/c.mp4")):
        write_video(tmp_path / name, steady(6 + 2 * number))
    return tmp_path


def test_the_page_shows_this_code_and_its_lines_run(
    model: gare.GARE, videos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    own, use = blocks(PAGE, "python")
    for part in (SqliteStore, packed):
        assert inspect.getsource(part) in own
    monkeypatch.chdir(videos.parent)
    exec(compile(use.replace('"videos"', repr(str(videos))), PAGE, "exec"), {**globals(), "model": model})
    assert capsys.readouterr().out.startswith("3\n")


def test_an_installed_store_serves_its_addresses_to_every_command(
    model: gare.GARE, videos: Path, holidays: str, tmp_path_factory: pytest.TempPathFactory
):
    site, saved = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("model")
    model.save_pretrained(saved)
    STORES._entries.pop("sqlite")

    def run(*words: object) -> str:
        done = CliRunner().invoke(app, [*map(str, words), "--library", holidays, "--device", "cpu"])
        assert done.exit_code == 0, done.output + str(done.exception)
        return done.stdout

    with installed(site, "my_sqlite", blocks(PAGE, "python")[0], points(PAGE)):
        run("index", videos, "--model", saved)
        assert "c.mp4" in run("search", "a dog", "--where", "folder:sea")
        assert STORES["sqlite"].__module__ == "my_sqlite"


def test_a_stranger_s_store_indexes_and_searches(model: gare.GARE, videos: Path, holidays: str):
    with gare.Library.open(holidays, model=model) as library:
        report = library.index(videos)
        assert (report.new, report.failed, len(library)) == (3, 0, 3)
        hits = library.search("a dog in the snow", top=2)
        exhaustive = library.search("a dog in the snow", top=2, exhaustive=True)
        assert [hit.id for hit in hits] == [hit.id for hit in exhaustive]
        assert [hit.score for hit in hits] == pytest.approx([hit.score for hit in exhaustive], abs=1e-6)
        assert {Path(hit.path).suffix for hit in hits} == {".mp4"}
        assert [hit.path for hit in library.search("a dog", where="folder:sea")] == [
            str(videos / "sea/c.mp4")
        ]
        assert hits[0].id not in {hit.id for hit in library.search(like=hits[0].id)}
    with gare.Library.open(holidays, model=model) as again:
        (videos / "a.mp4").rename(videos / "moved.mp4")
        (videos / "b.mp4").unlink()
        report = again.index()
        assert (report.moved, report.deleted, report.unchanged, report.new) == (1, 1, 1, 0)
        assert sorted(Path(item["path"]).name for item in again.items()) == ["c.mp4", "moved.mp4"]
        assert again.maintain().num_items == 2


def test_what_is_missing_or_of_another_model_is_refused_as_everywhere(
    model: gare.GARE, videos: Path, holidays: str
):
    with pytest.raises(MissingLibraryError, match="there is no library at sqlite://nowhere"):
        gare.Library.open("sqlite://nowhere", model=model, create=False)
    gare.Library.open(holidays, model=model).index(videos)
    with pytest.raises(LibraryError, match="was made by model"):  # though the store itself does not check
        gare.Library.open(holidays, model="gare-mini")


def test_an_address_nobody_serves_lists_those_that_are_served():
    with pytest.raises(LibraryError, match=r"no store for ftp://.*file://…, s3://….*sqlite://…"):
        open_store("ftp://host/library")


def test_a_store_that_lacks_a_method_says_so_when_it_is_made():
    class Half(Store):
        pass

    with pytest.raises(TypeError, match=r"abstract method.*upsert"):
        Half("half://x", stamp=None, create=False, read_only=False)  # type: ignore[abstract]
