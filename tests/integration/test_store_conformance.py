"""What every store does, held against a folder, S3 and PostgreSQL, all real."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from gare.errors import LibraryError
from gare.library.filters import And, DurationBetween, HasTag, InFolder, NameLike, Not, matches
from gare.library.store import Store, lance_store, lance_upkeep, open_store, postgres_tables
from gare.library.store.lance_storage import Place
from gare.library.store.lance_table import LanceTable
from gare.library.store.store_schema import frame_schema, item_id
from servers import HANG_S
from stores import STAMP, make_files, make_rows, read_all

PATHS = [f"/videos/{number % 7}/clip {number:03}.mp4" for number in range(60)]
KINDS = ["folder", "s3", "postgres"]


@pytest.fixture(params=KINDS)
def uri(request: pytest.FixtureRequest, new_library: Any) -> str:
    return str(new_library(request.param))


@pytest.fixture
def store(uri: str) -> Iterator[Store]:
    store = open_store(uri, stamp=STAMP, create=True)
    yield store
    store.close()


@pytest.fixture
def filled(store: Store) -> Store:
    assert store.upsert(*make_rows(PATHS)) == len(PATHS)
    return store


def test_what_was_written_is_read_back(filled: Store):
    items, frames = make_rows(PATHS)
    assert read_all(filled).equals(items.sort_by("id"))
    fetched = filled.fetch(items["id"].to_pylist(), frame_schema().names)
    assert fetched.select(frames.column_names).equals(frames)
    assert filled.count() == len(PATHS)


def test_writing_twice_equals_writing_once(filled: Store):
    filled.upsert(*make_rows(PATHS))
    items, _ = make_rows(PATHS)
    assert read_all(filled).equals(items.sort_by("id"))
    assert sum(batch.num_rows for batch in filled.scan(columns=["id", "vectors"])) == len(PATHS)


def test_a_row_with_a_known_id_replaces_it(filled: Store):
    items, frames = make_rows(PATHS[:3], seed=1, version="2")
    filled.upsert(items, frames)
    assert filled.count() == len(PATHS)
    got = filled.fetch(items["id"].to_pylist(), ["vector", "thumbnail"])
    assert got["vector"].to_pylist() == items["vector"].to_pylist()
    assert got["thumbnail"].to_pylist() == frames["thumbnail"].to_pylist()


def test_deleting_and_adding_again_equals_never_deleting(filled: Store):
    before = read_all(filled)
    gone = before["id"].to_pylist()[:10]
    assert filled.delete([*gone, "unknown"]) == 10
    assert filled.count() == len(PATHS) - 10
    assert filled.fetch(gone, ["id"]).num_rows == 0
    filled.upsert(*make_rows(PATHS))
    assert read_all(filled).equals(before)
    assert filled.delete([]) == 0


def test_fetch_keeps_the_order_and_leaves_out_what_is_unknown(filled: Store):
    ids = [item_id(path, 0.0) for path in reversed(PATHS[5:9])]
    got = filled.fetch([ids[0], "unknown", *ids[1:], ids[0]], ["strip", "path", "id", "times"])
    assert got.column_names == ["strip", "path", "id", "times"]
    assert got["id"].to_pylist() == [*ids, ids[0]]
    assert filled.fetch(["unknown"], ["id", "vectors"]).num_rows == 0
    assert filled.fetch([], ["path"]).num_rows == 0
    with pytest.raises(ValueError, match="no column colour"):
        filled.fetch(ids, ["colour"])


def test_a_moved_file_keeps_its_frames(filled: Store):
    items, frames = (table.slice(0, 1) for table in make_rows(PATHS))
    moved, _ = make_rows(["/elsewhere/a.mp4"], frames_key=items["frames_key"].to_pylist())
    filled.upsert(moved, frame_schema().empty_table())
    filled.delete(items["id"].to_pylist())
    got = filled.fetch(moved["id"].to_pylist(), ["vectors"])
    assert got["vectors"].to_pylist() == frames["vectors"].to_pylist()


def test_items_without_frames_are_refused_and_nothing_is_written(store: Store):
    items, _ = make_rows(PATHS[:2])
    with pytest.raises(ValueError, match="frames that are neither given nor"):
        store.upsert(items, frame_schema().empty_table())
    assert store.count() == 0


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"vector": [[float("nan")] * 9]}, "NaN"),
        ({"tags": [None]}, "items"),
    ],
)
def test_bad_items_are_refused(store: Store, columns: dict[str, Any], message: str):
    items, frames = make_rows(PATHS[:1])
    for name, values in columns.items():
        field = items.schema.field(name).with_nullable(True)
        items = items.set_column(items.schema.get_field_index(name), field, [pa.array(values, field.type)])
    with pytest.raises(ValueError, match=message):
        store.upsert(items, frames)
    assert store.count() == 0


def test_vectors_of_another_size_are_refused(filled: Store):
    with pytest.raises(ValueError, match="schema of this library"):
        filled.upsert(*make_rows(["/a"], stamp=replace(STAMP, stage1_dim=7)))
    with pytest.raises(ValueError, match="1 to 4 float16 vectors of 8"):
        filled.upsert(*make_rows(["/a"], stamp=replace(STAMP, num_frames=5)))
    items, frames = make_rows(["/a", "/a"])
    with pytest.raises(ValueError, match="same id twice"):
        filled.upsert(items, frames)
    with pytest.raises(ValueError, match=r"\[queries, 9\]"):
        filled.search(np.zeros((1, 8)), 5)
    with pytest.raises(ValueError, match="k must be"):
        filled.search(np.zeros((1, 9)), 0)


@pytest.mark.parametrize("where", [None, InFolder("/videos/3"), HasTag("nobody")])
@pytest.mark.parametrize("exact", [True, False])
def test_search_finds_the_largest_inner_products(filled: Store, where: Any, exact: bool):
    items = read_all(filled)
    if where is not None:
        items = items.filter(pa.array([matches(where, row) for row in items.to_pylist()], pa.bool_()))
    queries = np.random.default_rng(5).normal(size=(3, 9)).astype(np.float32)
    results = filled.search(queries, 7, where=where, exact=exact)
    assert len(results) == 3
    for query, hits in zip(queries, results, strict=True):
        vectors = np.array(items["vector"].to_pylist(), np.float32).reshape(-1, 9)
        scores = vectors @ query
        best = np.argsort(-scores)[:7]
        assert hits.ids == [items["id"][int(place)].as_py() for place in best]
        np.testing.assert_allclose(hits.scores, scores[best], rtol=1e-5)


def test_search_for_more_than_there_is_gives_all(filled: Store):
    (hits,) = filled.search(np.ones((1, 9)), 1000)
    assert sorted(hits.ids) == read_all(filled)["id"].to_pylist()
    assert list(hits.scores) == sorted(hits.scores, reverse=True)


def test_a_version_grows_with_every_change_of_items(store: Store, uri: str):
    """Where a store has one: a GPU that holds the items asks it whether they changed."""

    def changes(change: Any) -> None:
        before = store.version()
        assert store.version() == before
        change()
        after = store.version()
        assert (after is None) == (before is None) == uri.startswith("postgresql")
        assert before is None or after > before

    items, frames = make_rows(PATHS[:3])
    changes(lambda: store.upsert(items, frames))
    changes(lambda: store.upsert(*make_rows(PATHS[:1], version="2")))
    changes(lambda: store.delete(items["id"].to_pylist()[:1]))


def test_an_empty_library_answers(store: Store):
    assert store.count() == 0
    assert [hits.ids for hits in store.search(np.ones((2, 9)), 3)] == [[], []]
    assert list(store.scan()) == []
    assert store.maintain().num_items == 0


def test_the_ledger_keeps_one_row_per_file(store: Store):
    store.record_files(make_files(["/a", "/b", "/c"]))
    store.record_files(make_files(["/b"], state="failed", error="it's 100 % broken \\ \n"))
    store.forget_files(["/c", "/never seen"])
    rows = [row for batch in store.scan_files() for row in batch.to_pylist()]
    assert {row["path"]: row["state"] for row in rows} == {"/a": "indexed", "/b": "failed"}
    assert [row["error"] for row in rows if row["path"] == "/b"] == ["it's 100 % broken \\ \n"]
    assert pa.Table.from_batches(store.scan_files(["size", "path"])).column_names == ["size", "path"]


def test_notes_are_kept(store: Store, uri: str):
    store.set_notes({"folders": '["/a"]', "audit": "1"})
    store.set_notes({"audit": "it's 2"})
    other = open_store(uri)
    assert other.get_notes() == {"folders": '["/a"]', "audit": "it's 2"}
    store.set_notes({"audit": "3"})
    assert other.get_notes()["audit"] == "3"  # at once: which vectors are current is a note
    other.close()


def test_another_model_is_refused_and_the_message_says_what_to_do(filled: Store, uri: str):
    for change in ({"fingerprint": "beef"}, {"dim": 16}, {"stage1_dim": 17}, {"num_frames": 12}):
        with pytest.raises(LibraryError, match=r"made by model 'tiny'.*--model tiny"):
            open_store(uri, stamp=replace(STAMP, **change))
    renamed = open_store(uri, stamp=replace(STAMP, name="the same model elsewhere"))
    assert renamed.stamp == STAMP
    renamed.close()


def test_a_missing_library_is_an_error_unless_it_may_be_made(uri: str):
    with pytest.raises(LibraryError, match="there is no library at"):
        open_store(uri, stamp=STAMP)
    with pytest.raises(LibraryError, match="there is no library at"):
        open_store(uri, read_only=True)


def test_a_place_where_no_folder_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "at" / "all")
    for place, message in (
        (tmp_path / "file" / "library", f"{tmp_path}/file is a file"),
        (tmp_path / "link", "cannot be made there .*name another folder"),
    ):
        with pytest.raises(LibraryError, match=message):
            open_store(place, stamp=STAMP, create=True)


def test_a_library_newer_than_gare_is_refused(filled: Store, uri: str):
    filled.set_schema_version(99)  # type: ignore[attr-defined]
    with pytest.raises(LibraryError, match="upgrade gare"):
        open_store(uri)


def test_a_library_open_for_reading_refuses_to_write(filled: Store, uri: str):
    reader = open_store(uri, read_only=True)
    for write in (
        lambda: reader.delete(["x"]),
        lambda: reader.upsert(*make_rows(PATHS)),
        lambda: reader.record_files(make_files(["/a"])),
        lambda: reader.set_notes({"a": "b"}),
        lambda: reader.maintain(),
    ):
        with pytest.raises(LibraryError, match=r"reading only|may not write"):
            write()
    assert reader.count() == len(PATHS)
    reader.close()


def test_a_reader_sees_what_others_write(filled: Store, uri: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gare.library.store.lance_table._REMOTE_REFRESH_S", 0.0)
    reader = open_store(uri, read_only=True)
    assert reader.count() == len(PATHS)
    items, frames = make_rows(["/new.mp4"], vector=[[9.0] * 9])
    filled.upsert(items, frames)
    assert reader.search(np.ones((1, 9)), 1)[0].ids == items["id"].to_pylist()
    assert reader.fetch(items["id"].to_pylist(), ["thumbnail"])["thumbnail"].to_pylist() == [
        b"thumbnail 1 of /new.mp4"
    ]
    filled.delete(items["id"].to_pylist())
    assert reader.count() == len(PATHS)
    reader.close()


def test_one_may_write_while_scanning(filled: Store):
    seen = []
    for batch in filled.scan(columns=["id", "path"], where=NameLike("*")):
        seen += batch["id"].to_pylist()
        filled.delete(batch["id"].to_pylist())
    assert len(seen) == len(PATHS)
    assert filled.count() == 0


def test_two_writers_of_the_same_rows_double_nothing(store: Store, uri: str):
    """In every round both set out at once to add rows that neither finds."""
    start = Barrier(2)

    def write(seed: int) -> None:
        mine = open_store(uri, stamp=STAMP)
        for number in range(8):
            paths = [f"/{number}/{part}.mp4" for part in range(3)]
            items, frames = make_rows(paths, seed=seed, version=f"{seed}-{number}")
            start.wait(HANG_S)
            mine.upsert(items, frames)
            mine.record_files(make_files(paths))
            mine.set_notes({f"{number}": str(seed)})
        mine.close()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, range(2)))
    fresh = open_store(uri)
    rows = read_all(fresh)["path"].to_pylist()
    assert len(rows) == len(set(rows)) == 24
    assert sum(batch.num_rows for batch in fresh.scan_files()) == 24
    assert len(fresh.get_notes()) == 8
    fresh.close()


def test_maintain_removes_orphans_only_when_they_are_old(filled: Store):
    items, frames = make_rows(PATHS)
    filled.delete(items["id"].to_pylist()[:10])
    assert not any("frames of" in action for action in filled.maintain().actions)
    filled.upsert(items, frame_schema().empty_table())  # the frames are still there
    filled.delete(items["id"].to_pylist()[:10])
    filled.orphan_age = timedelta(0)  # type: ignore[attr-defined]
    assert "removed the frames of 10 items that are gone" in filled.maintain().actions
    with pytest.raises(ValueError, match="frames that are neither"):
        filled.upsert(items, frame_schema().empty_table())
    kept = filled.fetch(items["id"].to_pylist(), ["vectors"])
    assert kept["vectors"].to_pylist() == frames["vectors"].to_pylist()[10:]


def test_the_index_finds_what_a_full_reading_finds(store: Store, monkeypatch: pytest.MonkeyPatch):
    """With filters at 1 % and 0.1 %, which must be exact, and with rows newer than the index."""
    for module in (lance_upkeep, postgres_tables):
        monkeypatch.setattr(module, "INDEX_FROM_ROWS", 1000)
    paths = [f"/v/{number}.mp4" for number in range(3000)]
    tags = [[t for t, every in (("percent", 100), ("permille", 1000)) if n % every == 0] for n in range(3000)]
    store.upsert(*make_rows(paths, tags=tags, file_duration=[10.0 + n for n in range(3000)]))
    stats = store.maintain()
    assert (stats.num_items, stats.num_indexed) == (3000, 3000)
    assert any("vector index over 3,000" in action for action in stats.actions)
    new, frames = make_rows(["/new.mp4"], vector=[[9.0] * 9])
    store.upsert(new, frames)
    monkeypatch.setattr(lance_store, "SCAN_MATCHES", 500)
    monkeypatch.setattr("gare.library.store.postgres_store.SCAN_MATCHES", 500)
    queries = np.random.default_rng(1).normal(size=(5, 9)).astype(np.float32)
    queries[0] = 1.0
    selective = (HasTag("percent"), HasTag("permille"), DurationBetween(longest=100.0))
    for where in (None, Not(HasTag("percent")), *selective):
        found = store.search(queries, 50, where=where)
        truth = store.search(queries, 50, where=where, exact=True)
        pairs = zip(found, truth, strict=True)
        recall = np.mean([len({*some.ids} & {*best.ids}) / len(best.ids) for some, best in pairs])
        assert recall >= (1.0 if where in selective else 0.95), where
    assert store.search(queries[:1], 1)[0].ids == new["id"].to_pylist()
    assert store.count(And((HasTag("percent"), HasTag("permille")))) == 3


def test_opening_for_creation_is_refused_when_it_makes_no_sense():
    with pytest.raises(ValueError, match="pass stamp"):
        open_store("/nowhere", create=True)
    with pytest.raises(LibraryError, match="no store for mysql://"):
        open_store("mysql://host/db")


# --- records that several processes change ------------------------------------------------------------------


def test_records_are_changed_only_by_who_has_read_the_newest(store: Store):
    records = store.records()
    assert records.read() == {}
    assert records.swap("shard/1", None, "waiting")
    assert not records.swap("shard/1", None, "mine")
    assert not records.swap("shard/1", "gone", "mine")
    assert records.swap("shard/1", "waiting", "it's mine, 'ünï'")
    records.put({"files/1": "a", "shard/2": "waiting"})
    assert records.read("shard/") == {"shard/1": "it's mine, 'ünï'", "shard/2": "waiting"}
    store.maintain()
    assert records.read("files/") == {"files/1": "a"}
    records.clear()
    assert records.read() == {}
    assert store.count() == 0


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_of_many_who_make_a_table_the_first_one_counts(kind: str, new_library: Any):
    """Lance's own mode "create" lets a late comer empty the table, here once in two times on S3."""
    uri = str(new_library(kind))
    place = Place(
        uri, read_only=False, options=lance_store.storage_options(os.environ) if kind == "s3" else {}
    )
    if place.folder:
        place.folder.mkdir()
    num_threads = 4
    schema = pa.schema([pa.field("key", pa.string(), nullable=False)])
    for number in range(5):
        start = Barrier(num_threads)

        def make(who: str, name: str = f"table{number}", start: Barrier = start) -> list[str]:
            table = LanceTable(place, name, ("key",))
            start.wait(HANG_S)
            table.create(schema, [{"key": who}])
            seen = table.snapshot(fresh=True).dataset.to_table()["key"].to_pylist()
            table.merge(pa.table({"key": pa.array([f"then {who}"])}))
            return [*seen, *table.snapshot(fresh=True).dataset.to_table()["key"].to_pylist()]

        with ThreadPoolExecutor(num_threads) as pool:
            seen = list(pool.map(make, "abcd"))
        first = {keys[0] for keys in seen}
        assert len(first) == 1
        for who, keys in zip("abcd", seen, strict=True):
            assert f"then {who}" in keys
        final = LanceTable(place, f"table{number}", ("key",)).snapshot().dataset.to_table()["key"].to_pylist()
        assert sorted(final) == sorted([*first, *(f"then {who}" for who in "abcd")])


def test_of_many_who_want_a_record_one_gets_it(uri: str, store: Store):
    """Each has a connection of its own, as processes have; a counter that all raise loses no step."""
    store.records().put({"counter": "0"})
    num_threads, num_steps = 3, 4
    start = Barrier(num_threads)

    def raise_often(number: int) -> int:
        mine = open_store(uri)
        records, num_won = mine.records(), 0
        start.wait(HANG_S)
        won_first = records.swap("first", None, f"by {number}")
        while num_won < num_steps:
            old = records.read("counter")["counter"]
            count = int(old.split()[0])
            num_won += records.swap("counter", old, f"{count + 1} by {number}")
        mine.close()
        return int(won_first)

    with ThreadPoolExecutor(num_threads) as pool:
        assert sum(pool.map(raise_often, range(num_threads))) == 1
    assert store.records().read("counter")["counter"].startswith(f"{num_threads * num_steps} ")
