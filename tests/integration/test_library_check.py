"""Damage done by hand: `check` finds it, `--repair` restores what searches answered, or says what is gone."""

from __future__ import annotations

import contextlib
import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import numpy as np
import psycopg
import pyarrow as pa
import pytest
import torch

from clips import numbered_image, steady, write_video
from damages import (
    Home,
    answers,
    copy_library,
    data_file,
    flip,
    index_again,
    lose_table,
    manifests,
    open_table,
    remove_rows,
    tamper,
)
from gare import GARE, GareConfig, Library
from gare.errors import LibraryError
from gare.library.check import CheckReport, check_library, repair_library
from gare.library.check.read_share import ReadShare, choose_items
from gare.library.index.index_run import IndexOptions
from gare.library.library import model_stamp
from gare.library.store import open_store
from gare.library.store.store_schema import ModelStamp, frame_schema, item_schema
from gare.library.vector_set_checks import check_sets, repair_sets
from serve_process import PATIENT, ServeProcess
from stores import STAMP, make_files, make_rows
from warm import run_gare as gare

NUM_VIDEOS = 4


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Four videos of two or three items each; the items of the first two have a tag."""
    folder = tmp_path_factory.mktemp("check")
    torch.manual_seed(0)
    config = {"encoder": {"name": "tiny"}, "temporal": {"num_layers": 1}, "num_frames": 4}
    GARE(GareConfig.load(config)).save_pretrained(folder / "model")
    model = GARE.from_pretrained(str(folder / "model")).eval()
    home = Home(folder, model)
    home.videos.mkdir()
    for number in range(NUM_VIDEOS):
        times = steady(4 + 0.8 * number, fps=5)
        pictures = [numbered_image(977 * (number + 1) + 53 * frame) for frame in range(len(times))]
        write_video(home.videos / f"{number}.mp4", times, pictures=pictures)
        if number in (1, NUM_VIDEOS - 1):
            with Library.open(home.library, model=folder / "model") as library:
                tags = ("first",) if number == 1 else ()
                options = IndexOptions(split="window:2", tags=tags, num_workers=1)
                library.index(home.videos, options=options)
    return home


@pytest.fixture(scope="module")
def before(home: Home) -> list[Any]:
    return answers(home.library, home.model)


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def library(home: Home, tmp_path: Path) -> Path:
    shutil.copytree(home.library, tmp_path / "library")
    return tmp_path / "library"


def repair(home: Home, address: str | Path) -> CheckReport:
    return repair_library(str(address), lambda stamp: (home.model, stamp or model_stamp(home.model, "tiny")))


def item_of(home: Home, number: int) -> dict[str, Any]:
    """The first item of a video."""
    with Library.open(home.library, model=home.model, read_only=True) as library:
        path = str(home.videos / f"{number}.mp4")
        found = min((item for item in library.items() if item["path"] == path), key=lambda i: i["start"])
        (more,) = library.store.fetch([found["id"]], ["frames_key", "vectors", "thumbnail"]).to_pylist()
        return {**found, **more}


# --- damage to rows, in every kind of store -----------------------------------------------------------------


def flipped_vectors(home: Home, address: str) -> None:
    tamper(address, "frames", item_of(home, 0)["frames_key"], "vectors", flip)


def swapped_vectors(home: Home, address: str) -> None:
    """A sum does not see it."""
    key = item_of(home, 0)["frames_key"]
    tamper(address, "frames", key, "vectors", lambda old: old[8:16] + old[:8] + old[16:])


def flipped_thumbnail(home: Home, address: str) -> None:
    tamper(address, "frames", item_of(home, 1)["frames_key"], "thumbnail", flip)


def flipped_strip(home: Home, address: str) -> None:
    tamper(address, "frames", item_of(home, 1)["frames_key"], "strip", flip)


def changed_times(home: Home, address: str) -> None:
    tamper(address, "frames", item_of(home, 2)["frames_key"], "times", lambda old: [old[0] + 0.25, *old[1:]])


def changed_stage1_vector(home: Home, address: str) -> None:
    tamper(address, "items", item_of(home, 0)["id"], "vector", lambda old: [-old[0], *old[1:]])


def changed_end(home: Home, address: str) -> None:
    tamper(address, "items", item_of(home, 0)["id"], "end", lambda old: old + 0.5)


def changed_path(home: Home, address: str) -> None:
    tamper(address, "items", item_of(home, 0)["id"], "path", lambda old: old.replace("0.mp4", "x.mp4"))


def changed_content(home: Home, address: str) -> None:
    tamper(address, "items", item_of(home, 0)["id"], "content", lambda old: "0" + old[1:] + "0")


def changed_name(home: Home, address: str) -> None:
    tamper(address, "items", item_of(home, 0)["id"], "name_key", lambda old: "x" + old)


def lost_frames_row(home: Home, address: str) -> None:
    remove_rows(address, "frames", [item_of(home, 0)["frames_key"], item_of(home, 2)["frames_key"]])


def lost_items_row(home: Home, address: str) -> None:
    remove_rows(address, "items", [item_of(home, 3)["id"]])


def lost_ledger(home: Home, address: str) -> None:
    remove_rows(address, "files", [str(path) for path in home.videos.iterdir()])


def changed_ledger(home: Home, address: str) -> None:
    tamper(address, "files", str(home.videos / "0.mp4"), "content", lambda old: "0" * len(old))


def other_segmentation(home: Home, address: str) -> None:
    """Items of the whole file, beside those of its windows."""
    store = open_store(address)
    (row,) = store.fetch([item_of(home, 0)["id"]], store_columns(store)).to_pylist()
    row["start"] = 0.125
    row["id"] = "f" * 20
    row["frames_key"] = row["frames_key"].replace("window:2", "whole")
    frames = {name: row.pop(name) for name in ("vectors", "times", "thumbnail", "strip")}
    store.upsert(
        pa.Table.from_pylist([row]), pa.Table.from_pylist([{"frames_key": row["frames_key"], **frames}])
    )
    store.close()


def store_columns(store: Any) -> list[str]:
    return list(dict.fromkeys([*item_schema(store.stamp.stage1_dim).names, *frame_schema().names]))


def bad_notes(home: Home, address: str) -> None:
    store = open_store(address)
    store.set_notes({"audit": "{", "split": "windows"})
    store.close()


def changed_stamp(home: Home, address: str) -> None:
    """One letter of the model's fingerprint."""

    def change(old: str) -> str:
        stamp = json.loads(old)
        return json.dumps({**stamp, "fingerprint": "x" + stamp["fingerprint"][1:]})

    tamper(address, "facts", "stamp", "value", change)


def lost_stamp(home: Home, address: str) -> None:
    remove_rows(address, "facts", ["stamp"])


ROW_DAMAGES = [
    (flipped_vectors, "damaged_frames"),
    (swapped_vectors, "damaged_frames"),
    (flipped_thumbnail, "damaged_frames"),
    (flipped_strip, "damaged_frames"),
    (changed_times, "damaged_frames"),
    (changed_stage1_vector, "damaged_vector"),
    (changed_end, "damaged_item"),
    (changed_path, "wrong_id"),
    (changed_content, "wrong_key"),
    (changed_name, "misnamed_item"),
    (lost_frames_row, "item_without_frames"),
    (lost_items_row, "lost_items"),
    (lost_ledger, "lost_ledger"),
    (changed_ledger, "ledger_mismatch"),
    (other_segmentation, "mixed_items"),
    (bad_notes, "bad_note"),
    (lost_stamp, "lost_facts"),
    (changed_stamp, "lost_facts"),
    *((lambda home, address, table=table: lose_table(address, table), "lost_table") for table in
      ("frames", "items", "files", "facts")),
]  # fmt: skip
DAMAGE_IDS = [getattr(damage, "__name__", "") for damage, _ in ROW_DAMAGES[:-4]]
DAMAGE_IDS += ["no_frames", "no_items", "no_files", "no_facts"]


@pytest.mark.parametrize(("damage", "kind"), ROW_DAMAGES, ids=DAMAGE_IDS)
def test_folder(damage: Callable[..., None], kind: str, home: Home, library: Path, before: list[Any]) -> None:
    damage(home, str(library))
    check_finds_and_repair_mends(home, str(library), kind, before, damage.__name__)


ON_S3 = [
    "flipped_vectors",
    "lost_frames_row",
    "lost_ledger",
    "no_frames",
    "no_facts",
]  # tables are Lance's there too
IN_POSTGRES = [
    "flipped_vectors",
    "changed_times",
    "changed_stage1_vector",
    "changed_path",
    "changed_name",
    "lost_frames_row",
    "lost_items_row",
    "lost_ledger",
    "other_segmentation",
    "changed_stamp",
    "no_frames",
    "no_items",
    "no_facts",
]


@pytest.mark.parametrize(
    ("kind_of_store", "name"),
    [*(("s3", name) for name in ON_S3), *(("postgres", name) for name in IN_POSTGRES)],
)
def test_elsewhere(
    kind_of_store: str, name: str, home: Home, before: list[Any], new_library: Callable[[str], str]
) -> None:
    damage, kind = ROW_DAMAGES[DAMAGE_IDS.index(name)]
    address = new_library(kind_of_store)
    copy_library(home, address)
    damage(home, address)
    check_finds_and_repair_mends(home, address, kind, before, damage.__name__)


def check_finds_and_repair_mends(home: Home, address: str, kind: str, before: list[Any], name: str) -> None:
    found = check_library(address, read_data="all")
    assert not found.is_sound
    assert kind in found.kinds(), found.findings
    repaired = repair(home, address)
    assert repaired.is_sound, repaired.left
    assert repaired.mended
    after = answers(address, home.model)
    if name == "<lambda>" and after[2] != before[2]:  # the tags went with the table of items
        after[2] = before[2]
        after[0] = [[hit[:-1] for hit in hits] for hits in after[0]]
        before = [[[hit[:-1] for hit in hits] for hits in before[0]], *before[1:]]
    check_same(after, before)
    again = check_library(address, read_data="all")
    assert again.is_sound, again.findings
    assert repair(home, address).mended == []
    report = index_again(home, address)
    assert report.num_items_encoded == 0
    assert report.unchanged == NUM_VIDEOS


def check_same(after: Any, before: Any) -> None:
    """The same, but for the rounding of scores: they are computed with others, in another order."""
    if isinstance(before, float):
        assert after == pytest.approx(before, abs=2e-6)
    elif isinstance(before, list | tuple):
        assert len(after) == len(before)
        for one, other in zip(after, before, strict=True):
            check_same(one, other)
    else:
        assert after == before


# --- damage to files of a folder ----------------------------------------------------------------------------


def lost_frame_data(library: Path) -> None:
    data_file(library, "frames").unlink()


def lost_item_data(library: Path) -> None:
    data_file(library, "items").unlink()


def cut_frame_data(library: Path) -> None:
    path = data_file(library, "frames")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def overwritten_frame_data(library: Path) -> None:
    """A block of the disk that came back as noise."""
    path = data_file(library, "frames")
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 512] = np.random.default_rng(0).bytes(512)
    path.write_bytes(content)


def noise_in_item_data(library: Path) -> None:
    path = data_file(library, "items")
    content = bytearray(path.read_bytes())
    content[: len(content) // 3] = np.random.default_rng(0).bytes(len(content) // 3)
    path.write_bytes(content)


def empty_manifest(library: Path) -> None:
    manifests(library, "items")[0].write_bytes(b"")


def noise_in_manifest(library: Path) -> None:
    path = manifests(library, "items")[0]
    path.write_bytes(np.random.default_rng(0).bytes(path.stat().st_size - 16) + path.read_bytes()[-16:])


def lost_manifest(library: Path) -> None:
    manifests(library, "items")[0].unlink()


def no_good_manifest(library: Path) -> None:
    for path in manifests(library, "frames"):
        path.write_bytes(b"nothing")


def lost_list_of_removed_rows(library: Path) -> None:
    """Rows that were replaced come back beside those that replaced them."""
    for path in (library / "items.lance" / "_deletions").iterdir():
        path.unlink()


def doubled_rows(library: Path) -> None:
    dataset = lance.dataset(str(library / "items.lance"))
    lance.write_dataset(dataset.to_table(), dataset.uri, mode="append")


FILE_DAMAGES = [
    (lost_frame_data, "lost_data"),
    (lost_item_data, "lost_data"),
    (cut_frame_data, "cut_data"),
    (overwritten_frame_data, None),
    (noise_in_item_data, None),
    (empty_manifest, "broken_manifest"),
    (noise_in_manifest, "broken_manifest"),
    (lost_manifest, "broken_manifest"),
    (no_good_manifest, "lost_table"),
    (lost_list_of_removed_rows, "lost_data"),
    (doubled_rows, "doubled_rows"),
]


@pytest.mark.parametrize(("damage", "kind"), FILE_DAMAGES)
def test_files(
    damage: Callable[[Path], None], kind: str | None, home: Home, library: Path, before: list[Any]
) -> None:
    if damage is lost_list_of_removed_rows:
        store = open_store(library)
        ids = [item_of(home, number)["id"] for number in range(2)]
        store.upsert(store.fetch(ids, store_columns(store)[:-4]), frame_schema().empty_table())
    damage(library)
    found = check_library(library, read_data="all")
    assert not found.is_sound
    assert kind is None or kind in found.kinds(), found.findings
    repaired = repair(home, library)
    assert repaired.is_sound, repaired.left
    check_same(without_tags(answers(library, home.model)), without_tags(before))
    assert check_library(library, read_data="all").is_sound
    assert repair(home, library).mended == []
    assert index_again(home, library).num_items_encoded == 0
    with Library.open(library, model=home.model) as opened:  # upkeep reads what searches do not
        opened.maintain()


def without_tags(found: list[Any]) -> list[Any]:
    """Rows of items may be lost, and their tags with them."""
    searches, pictures, _ = found
    return [[[hit[:-1] for hit in hits] for hits in searches], pictures]


def overwrite(path: Path, place: int, size: int, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[place : place + size] = chance.randbytes(len(content[place : place + size]))
    path.write_bytes(content)


def check_found_or_harmless(home: Home, library: Path, before: list[Any]) -> None:
    if not check_library(library, read_data="all").is_sound:
        assert repair(home, library).is_sound
        assert check_library(library, read_data="all").is_sound
    check_same(without_tags(answers(library, home.model)), without_tags(before))


@pytest.mark.parametrize("seed", range(6))
def test_damage_anywhere_is_found_or_changes_nothing(
    seed: int, home: Home, library: Path, before: list[Any]
) -> None:
    """At a random place of a random file."""
    chance = random.Random(seed)
    tables = [library / f"{name}.lance" for name in ("items", "frames", "files", "facts")]
    # By size: their names are other ones in each run.
    files = [path for table in tables for path in sorted((table / "data").iterdir(), key=size_of)]
    path = chance.choice([*files, *(manifests(library, table.stem)[0] for table in tables)])
    overwrite(path, chance.randrange(size_of(path)), chance.choice([1, 1, 64, 512]), chance)
    check_found_or_harmless(home, library, before)


def size_of(path: Path) -> int:
    return path.stat().st_size


@pytest.mark.parametrize("table", ["items", "frames", "files", "facts"])
def test_damage_to_the_end_of_a_data_file_is_found(
    table: str, home: Home, library: Path, before: list[Any], tmp_path: Path
) -> None:
    """There Lance keeps where everything lies: what it says of nonsense differs from byte to byte."""
    chance = random.Random(table)
    for place in (-640, -512, -384, -256, -128, -64, -40, -16):
        damaged = tmp_path / str(place)
        shutil.copytree(library, damaged)
        path = max((damaged / f"{table}.lance" / "data").iterdir(), key=size_of)
        overwrite(path, max(size_of(path) + place, 0), 64, chance)
        with (
            contextlib.suppress(LibraryError),  # and no other error
            Library.open(damaged, model=home.model, read_only=True) as opened,
        ):
            opened.search("a red square", top=100)
        check_found_or_harmless(home, damaged, before)


def test_a_manifest_without_its_end_is_found(home: Home, library: Path, before: list[Any]) -> None:
    """Lance does not look at the last byte; who opens the library does."""
    newest = manifests(library, "frames")[0]
    newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    assert "broken_manifest" in check_library(library).kinds()
    check_found_or_harmless(home, library, before)


# --- the vector index ---------------------------------------------------------------------------------------


def lost_index_files(folder: Path) -> None:
    shutil.rmtree(folder / "items.lance" / "_indices")


def cut_index_files(folder: Path) -> None:
    for path in (folder / "items.lance" / "_indices").rglob("*.idx"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", [lost_index_files, cut_index_files])
def test_a_broken_vector_index_is_built_anew(
    damage: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gare.library.store.lance_upkeep.INDEX_FROM_ROWS", 100)
    paths = [f"/videos/{number}.mp4" for number in range(400)]
    store = open_store(tmp_path / "library", stamp=STAMP, create=True)
    store.upsert(*make_rows(paths))
    store.record_files(make_files(paths))
    store.maintain()
    queries = np.random.default_rng(3).normal(size=(3, STAMP.stage1_dim)).astype(np.float32)
    before = [hits.ids for hits in store.search(queries, 10)]
    assert store.num_indexed() == len(paths)
    assert check_library(tmp_path / "library").is_sound
    damage(tmp_path / "library")
    assert "broken_index" in check_library(tmp_path / "library").kinds()
    repaired = repair_library(tmp_path / "library", lambda stamp: pytest.fail("no model is needed"))
    assert repaired.is_sound, repaired.left
    store = open_store(tmp_path / "library")
    assert store.num_indexed() == len(paths)
    assert [hits.ids for hits in store.search(queries, 10)] == before
    assert check_library(tmp_path / "library").is_sound


class Crash(Exception):
    pass


@pytest.mark.parametrize("table", ["frames", "items", "facts"])
@pytest.mark.parametrize("where", ["check_rows", "encode_again", "mend_ledger"])
def test_a_repair_that_was_cut_short_is_finished_by_the_next(
    table: str, where: str, home: Home, library: Path, before: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    remove_rows(str(library), "facts", ["made_with_format"])  # as if it was made before losses were known
    lose_table(str(library), table)

    def crash(*_: Any, **__: Any) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(f"gare.library.check.repair_run.{where}", crash)
        if table == "facts" and where == "encode_again":
            assert repair(home, library).is_sound  # nothing is encoded
        else:
            with pytest.raises(Crash):
                repair(home, library)
    assert repair(home, library).is_sound
    check_same(without_tags(answers(library, home.model)), without_tags(before))
    assert index_again(home, library).num_items_encoded == 0
    assert repair(home, library).mended == []


# --- what cannot be mended ----------------------------------------------------------------------------------


def test_what_cannot_be_mended_is_listed_and_the_rest_stays(home: Home, tmp_path: Path) -> None:
    """The file of one damaged item is gone, that of another has other content now."""
    videos = tmp_path / "videos"
    shutil.copytree(home.videos, videos)
    library = tmp_path / "library"
    with Library.open(library, model=home.folder / "model") as opened:
        opened.index(videos, options=IndexOptions(num_workers=1))
        items = {Path(item["path"]).name: item["id"] for item in opened.items()}
        keys = dict(
            zip(
                items,
                opened.store.fetch(list(items.values()), ["frames_key"])["frames_key"].to_pylist(),
                strict=True,
            )
        )
        whole = [hit.id for hit in opened.search(QUERY, top=10)]
    for name in ("0.mp4", "1.mp4", "2.mp4"):
        tamper(str(library), "frames", keys[name], "vectors", flip)
    (videos / "0.mp4").unlink()
    shutil.copy(home.videos / "3.mp4", videos / "1.mp4")
    report = repair(home, library)
    assert not report.is_sound
    assert {Path(finding.path).name for finding in report.left} == {"0.mp4", "1.mp4"}
    assert "cannot be read" in next(f.message for f in report.left if f.path.endswith("0.mp4"))
    assert "another content" in next(f.message for f in report.left if f.path.endswith("1.mp4"))
    with Library.open(library, model=home.folder / "model") as opened:
        found = [hit.id for hit in opened.search(QUERY, top=10)]
        assert found == [item for item in whole if item not in (items["0.mp4"], items["1.mp4"])]
        assert "2 damaged items were left out" in (opened.searcher.damaged.warning() or "")
        assert len(opened) == NUM_VIDEOS  # their rows stay
        done = opened.index(videos, options=IndexOptions(num_workers=1))
        assert (done.deleted, done.duplicate + done.changed) == (1, 1)
    assert check_library(library, read_data="all").is_sound


QUERY = "a dog in the snow"


def test_a_lost_model_is_named_by_the_user_and_compared(home: Home, library: Path) -> None:
    """Libraries of version 0.1 have no copy of the stamp."""
    shutil.rmtree(library / "facts.lance")
    for table in ("items", "frames", "files"):
        dataset = lance.dataset(str(library / f"{table}.lance"))
        dataset.update_schema_metadata({}, replace=True)
    torch.manual_seed(1)
    config = {"encoder": {"name": "tiny"}, "temporal": {"num_layers": 1}, "num_frames": 4}
    other = GARE(GareConfig.load(config)).eval()
    with pytest.raises(LibraryError, match="did not make it"):
        repair_library(library, lambda stamp: (other, model_stamp(other, "other")))
    with pytest.raises(LibraryError, match=r"facts\.lance is gone"):
        Library.open(library, model=other)
    assert repair(home, library).is_sound
    assert check_library(library, read_data="all").is_sound


@pytest.mark.parametrize("kind_of_store", ["folder", "postgres"])
def test_vectors_of_another_model_are_checked_and_mended_too(
    kind_of_store: str, home: Home, tmp_path: Path, new_library: Callable[[str], str]
) -> None:
    address = new_library(kind_of_store)
    copy_library(home, address)
    torch.manual_seed(1)
    config = {"encoder": {"name": "tiny"}, "temporal": {"num_layers": 1}, "num_frames": 4}
    GARE(GareConfig.load(config)).save_pretrained(tmp_path / "other")
    other = GARE.from_pretrained(str(tmp_path / "other")).eval()
    with Library.open(address, model=home.model) as library:
        library.change_model(tmp_path / "other", home.videos, options=IndexOptions(num_workers=1))
        name = next(found.name for found in library.sets() if found.is_current)
        item = item_of(home, 0)["id"]
        key = library.store.fetch([item], ["frames_key"])["frames_key"][0].as_py()
    before = answers(address, other)
    assert check_sets(address, read_data="all").damage == []
    if kind_of_store == "folder":
        tamper(f"{address}/sets/{name}", "frames", key, "vectors", flip)
    else:
        with psycopg.connect(address, autocommit=True) as connection:
            (here,) = connection.execute("SELECT current_schema()").fetchone() or ("",)
            flipped = "set_bit(vectors, 9, 1 - get_bit(vectors, 9))"
            table = f'"{here[:40]}_gare_{name}".gare_frames'
            connection.execute(f"UPDATE {table} SET vectors = {flipped} WHERE frames_key = %s", [key])
    found = check_sets(address, read_data="all")
    assert [(finding.kind, finding.item) for finding in found.damage] == [("damaged_frames", item)]

    def load(stamp: ModelStamp | None) -> tuple[GARE, ModelStamp]:
        assert stamp is not None
        return (other if other.is_known_as(stamp.fingerprint) else home.model), stamp

    repaired = repair_sets(address, load)
    assert repaired.is_sound, repaired.left
    check_same(answers(address, other), before)
    assert check_sets(address, read_data="all").damage == []


# --- a sound library ----------------------------------------------------------------------------------------


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_neither_check_nor_repair_changes_a_sound_library(home: Home, library: Path) -> None:
    files = everything(library)
    assert check_library(library, read_data="all", model=home.model).findings == []
    report = repair(home, library)
    assert (report.mended, report.left, report.findings) == ([], [], [])
    after = everything(library)
    after.pop(str(library / ".write-lock"), None)
    files.pop(str(library / ".write-lock"), None)
    assert after == files


@pytest.mark.parametrize("lost", ["items", "files", "frames"])
def test_a_library_whose_making_was_cut_short_is_not_damaged(lost: str, tmp_path: Path) -> None:
    open_store(tmp_path / "library", stamp=STAMP, create=True).close()
    shutil.rmtree(tmp_path / "library" / f"{lost}.lance")
    assert check_library(tmp_path / "library").kinds() == {"unfinished_library": 1}
    open_store(tmp_path / "library").close()
    assert check_library(tmp_path / "library").findings == []


def test_deleted_items_are_not_taken_for_lost_ones(home: Home, library: Path) -> None:
    with Library.open(library, model=home.model) as opened:
        opened.delete([item_of(home, 0)["id"]])
    assert check_library(library).kinds() == {"orphaned_frames": 1}
    assert repair(home, library).mended == []
    remove_rows(str(library), "items", [item_of(home, 1)["id"]])
    assert check_library(library).kinds()["lost_items"] == 1
    with pytest.raises(LibraryError, match="fewer items than the ledger counts"):
        index_again(home, library)


def test_a_library_without_checksums_says_so_and_gets_them(home: Home, library: Path, before: Any) -> None:
    items, frames = open_table(str(library), "items"), open_table(str(library), "frames")
    for table in (items, frames):  # the keys of version 0.1 end before the checksums
        table.update({"frames_key": "left(frames_key, length(frames_key) - 49)"})
    open_table(str(library), "items").drop_columns(["checksum"])
    open_table(str(library), "facts").update({"value": "'1'"}, where="key = 'schema_version'")
    found = check_library(library, read_data="all")
    assert found.is_sound
    assert found.kinds() == {"unchecked": 1}
    report = repair(home, library)
    assert report.is_sound
    assert any("added checksums" in line for line in report.mended)
    kinds = check_library(library, read_data="all").kinds()
    assert kinds.keys() <= {"orphaned_frames"}
    check_same(answers(library, home.model), before)
    assert repair(home, library).mended == []


def test_a_damaged_library_without_checksums_is_found_with_the_model(home: Home, library: Path) -> None:
    open_table(str(library), "items").update({"checksum": "''"})
    changed_stage1_vector(home, str(library))
    assert check_library(library, read_data="all").is_sound
    assert check_library(library, read_data="all", model=home.model).kinds()["wrong_vector"] == 1


# --- shares of the data -------------------------------------------------------------------------------------


def test_parts_cover_every_item_once_and_shares_go_on(home: Home, library: Path) -> None:
    ids = [f"item {number}" for number in range(1000)]
    parts = [
        choose_items(ids, share.start or 0.0, share.size)
        for n in range(1, 8)
        for share in [ReadShare.parse(f"{n}/7")]
    ]
    assert sorted(item for part in parts for item in part) == sorted(ids)
    with Library.open(library, model=home.model) as opened:
        num_items = len(opened)
        assert sum(opened.check(read_data=f"{n}/5").num_read for n in range(1, 6)) == num_items
        assert sum(opened.check(read_data="20%").num_read for _ in range(5)) == num_items


def test_a_check_that_ran_out_of_time_goes_on(
    home: Home, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gare.library.check.check_run.ROWS_AT_ONCE", 2)
    flipped_vectors(home, str(library))
    first = check_library(library, read_data="all", max_duration=0.0)
    assert (first.num_read, first.is_complete) == (0, False)
    reads = []

    def stop_soon(what: str, done: int, total: int) -> None:
        if what == "reading data":
            reads.append(done)
            if len(reads) == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check_library(library, read_data="all", on_progress=stop_soon)
    rest = check_library(library, read_data="all")
    assert rest.num_read == rest.num_items  # once around, from where it ended
    assert rest.kinds() == {"damaged_frames": 1}


@pytest.mark.parametrize("text", ["0%", "101%", "0/3", "4/3", "some", "5", ""])
def test_a_share_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no share"):
        ReadShare.parse(text)


# --- on the command line ------------------------------------------------------------------------------------


def test_command_line(home: Home, library: Path, tmp_path: Path) -> None:
    sound = gare("check", library, "--read-data", "all")
    assert (sound.returncode, sound.stdout.splitlines()[-1]) == (0, "sound")
    item = item_of(home, 0)
    flipped_vectors(home, str(library))
    found = gare("check", library, "--read-data", "all", "--json")
    assert found.returncode == 3
    report = json.loads(found.stdout)
    assert report["kinds"] == {"damaged_frames": 1}
    assert report["findings"][0]["item"] == item["id"]
    searched = gare("search", QUERY, "--library", library, "--json", "--top", "100")
    assert searched.returncode == 0
    assert item["id"] not in searched.stdout
    assert "1 damaged item was left out" in searched.stderr
    assert "gare check --repair" in searched.stderr
    like = gare("search", "--like", item["id"], "--library", library)
    assert like.returncode == 1
    assert "is damaged" in like.stderr
    audited = gare("audit", "--library", library)
    assert audited.returncode == 1
    assert item["id"] in audited.stderr
    mended = gare("check", "--repair", library)
    assert (mended.returncode, mended.stdout.splitlines()[-1]) == (0, "sound")
    assert "encoded 1 files again" in mended.stdout
    again = gare("search", QUERY, "--library", library, "--json", "--top", "100")
    assert item["id"] in again.stdout
    assert re.fullmatch(r"nothing better is there: all \d+ items were scored\n", again.stderr)
    missing = gare("check", tmp_path / "nowhere")
    assert missing.returncode == 1
    assert "there is no library" in missing.stderr
    assert gare("check", library, "--read-data", "much").returncode == 2


# --- in the server ------------------------------------------------------------------------------------------


def test_the_server_leaves_damaged_items_out_and_says_so(home: Home, library: Path) -> None:
    item, other = item_of(home, 0), item_of(home, 1)
    flipped_vectors(home, str(library))
    flipped_thumbnail(home, str(library))
    with ServeProcess(library, options=PATIENT) as server:
        found = server.get("/api/v1/search?q=a+dog&limit=50").json()
        assert item["id"] not in [hit["id"] for hit in found["hits"]]
        assert "1 damaged item was left out" in found["notices"][0]
        assert b"1 damaged item was left out" in server.get("/results?q=a+dog").content
        picture = server.get(f"/api/v1/items/{other['id']}/thumbnail")
        assert (picture.status, picture.json()["error"]["code"]) == (404, "damaged")
        assert item["id"] in server.log.read_text()
        assert repair(home, library).is_sound
        mended = server.get("/api/v1/search?q=a+dog&limit=50").json()
        assert item["id"] in [hit["id"] for hit in mended["hits"]]
        assert mended["notices"] == []
        assert server.get(f"/api/v1/items/{other['id']}/thumbnail").status == 200
