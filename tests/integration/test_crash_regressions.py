"""What the crash tests found, each as small as it can be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from gare.library.index.commit import Catalogue, Writer
from gare.library.index.plan import read_ledger
from gare.library.store import Store, open_store, postgres_link
from gare.library.store.store_schema import file_schema
from gare.train.run_log import RunLog
from gare.train.train_state import Progress
from stores import STAMP, make_files, make_rows


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "library", stamp=STAMP, create=True)


def test_a_kill_while_a_file_is_forgotten_does_not_leave_it_unchanged(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its items are gone and its line is there: a file that comes back must be read again."""
    store.upsert(*make_rows(["/a.mp4"]))
    store.record_files(make_files(["/a.mp4"]))

    def die(self: Store, paths: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(store), "forget_files", die)
    with pytest.raises(KeyboardInterrupt):
        Writer(store, Catalogue(store), 5.0, set()).forget(["/a.mp4"])
    assert store.count() == 0
    (line,) = [row for batch in store.scan_files() for row in batch.to_pylist()]
    assert line["size"] == -1  # no file has this size


def test_a_file_that_lost_an_item_is_no_source_for_copies(store: Store) -> None:
    """Its copies would lack the item that was deleted there, and nobody deleted it here."""
    keys = [f"c0ffee/window:1/{start:.3f}/x" for start in (0.0, 1.0)]
    times = {"start": [0.0, 1.0], "end": [1.0, 2.0], "file_duration": [2.0] * 2}
    items, frames = make_rows(["/a.mp4"] * 2, **times, frames_key=keys, content=["c0ffee"] * 2)
    store.upsert(items, frames)
    source = Catalogue(store).find("c0ffee", "window:1", "/b.mp4")
    assert source is not None
    assert len(source.item_ids) == 2
    store.delete(items["id"].to_pylist()[:1])
    assert Catalogue(store).find("c0ffee", "window:1", "/b.mp4") is None


def test_a_ledger_that_speaks_of_other_items_than_there_are_is_not_believed(store: Store) -> None:
    """Of two indexers with different splits, one was killed between its items and its ledger."""
    keys = {"/whole.mp4": "c0ffee/whole/0.000/x", "/other.mp4": "c0ffee/window:1/0.000/y"}
    store.upsert(*make_rows(list(keys), frames_key=list(keys.values()), content=["c0ffee"] * 2))
    lines = [{**line, "content": "c0ffee", "split": "whole"} for line in make_files(list(keys)).to_pylist()]
    store.record_files(pa.Table.from_pylist(lines, schema=file_schema()))
    ledger = read_ledger(store)
    assert ledger["/whole.mp4"].size == lines[0]["size"]
    assert ledger["/other.mp4"].size == -1


@pytest.mark.parametrize("when", ["opening", "scanning"])
def test_a_connection_that_is_lost_is_made_anew(
    when: str, new_library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = new_library("postgres")
    store = open_store(uri, stamp=STAMP, create=True)
    store.upsert(*make_rows(["/a.mp4"]))
    real, num_calls = postgres_link.register_vector, 0

    def fail_once(connection: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise psycopg.OperationalError("server closed the connection unexpectedly")
        real(connection)

    monkeypatch.setattr(postgres_link, "register_vector", fail_once)
    reader = open_store(uri) if when == "opening" else store
    assert [row["path"] for batch in reader.scan(columns=["path"]) for row in batch.to_pylist()] == ["/a.mp4"]
    assert num_calls >= 2
    for one in {store, reader}:
        one.close()


def test_a_log_with_lines_that_a_power_cut_spoilt_is_read(tmp_path: Path) -> None:
    """What comes after the last flush may be anything; a run is resumed all the same."""
    whole = {"step": 1, "loss": 0.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(whole) + "\n" + "\0\0\0\n" + '"x"\n{"step": 1, "lo\n')
    RunLog(tmp_path, Progress(step=1), enabled=True).__exit__()
    assert (tmp_path / "metrics.jsonl").read_text() == json.dumps(whole) + "\n"
