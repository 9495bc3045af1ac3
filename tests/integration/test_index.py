"""Folders of real files into a real store: what is new, changed, moved, copied, gone and broken."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from clips import steady, write_video
from faults import faulty_extract, lying_extract, refuse
from gare import GARE, GareConfig
from gare.data.workers import Limits
from gare.errors import LibraryError
from gare.library.index.index_report import IndexReport
from gare.library.index.index_run import IndexOptions, index_folders
from gare.library.library import model_stamp
from gare.library.store import Store, open_store
from gare.library.store.store_schema import item_id
from video_tree import COPIES, FAILURES, GOOD, build_tree
from warm import run_gare as gare

WORKERS = 2


@pytest.fixture(scope="module")
def model() -> GARE:
    torch.manual_seed(0)
    return GARE(GareConfig.load({"encoder": {"name": "tiny"}, "temporal": {"num_layers": 1}})).eval()


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tree(tmp_path_factory.mktemp("index") / "tree")


@pytest.fixture
def tree(pristine: Path, tmp_path: Path) -> Path:
    """A copy to play with; dates are kept."""
    subprocess.run(["cp", "-a", pristine, tmp_path / "tree"], check=True)
    (tmp_path / "tree" / "loop").unlink()
    (tmp_path / "tree" / "loop").symlink_to(tmp_path / "tree")
    return tmp_path / "tree"


@pytest.fixture
def store(model: GARE, tmp_path: Path) -> Store:
    return open_store(tmp_path / "library", stamp=model_stamp(model, "tiny"), create=True)


def index(store: Store, model: GARE, *roots: Path, extractor: Any = None, **options: Any) -> IndexReport:
    given = {"extractor": extractor} if extractor else {}
    return index_folders(store, model, roots, options=IndexOptions(num_workers=WORKERS, **options), **given)


def items(store: Store) -> dict[str, dict[str, Any]]:
    columns = ["id", "path", "start", "end", "content", "tags", "added", "modified", "file_duration", "width"]
    rows = [row for batch in store.scan(columns=columns) for row in batch.to_pylist()]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


def ledger(store: Store) -> dict[str, dict[str, Any]]:
    rows = [row for batch in store.scan_files() for row in batch.to_pylist()]
    assert len({row["path"] for row in rows}) == len(rows)
    return {row["path"]: row for row in rows}


def counts(report: IndexReport) -> dict[str, int]:
    names = ("new", "changed", "moved", "duplicate", "unchanged", "deleted", "failed", "failed_before")
    return {name: getattr(report, name) for name in names if getattr(report, name)}


def test_a_folder_of_everything_then_nothing_to_do(tree: Path, store: Store, model: GARE) -> None:
    report = index(store, model, tree, tags=("first",))
    assert counts(report) == {"new": GOOD - COPIES, "duplicate": COPIES, "failed": len(FAILURES)}
    assert report.num_items_encoded == GOOD - COPIES
    failures = {os.path.relpath(failure.path, tree): failure.kind for failure in report.failures}
    assert failures == FAILURES
    rows = items(store)
    assert len(rows) == GOOD == store.count()
    for key, row in rows.items():
        assert key == item_id(row["path"], 0.0)
        assert os.path.exists(row["path"])
        assert row["end"] == row["file_duration"] > 0
        assert row["tags"] == ["first"]
        assert row["modified"].timestamp() == pytest.approx(os.path.getmtime(row["path"]), abs=1e-3)
    states = {os.path.relpath(path, tree): row for path, row in ledger(store).items()}
    assert {name: row["error_kind"] for name, row in states.items() if row["state"] == "failed"} == FAILURES
    assert len(states) == GOOD + len(FAILURES)
    assert json.loads(store.get_notes()["folders"]) == [str(tree)]

    again = index(store, model, tree, extractor=refuse)
    assert counts(again) == {"unchanged": GOOD, "failed_before": len(FAILURES)}
    assert not again.did_something
    assert items(store) == rows


def test_vectors_are_those_of_the_model(tree: Path, store: Store, model: GARE) -> None:
    folder = tree / "year 2003"
    index(store, model, folder)
    paths = sorted(row["path"] for row in items(store).values())
    video = model.encode_video(paths)
    rows = store.fetch([item_id(path, 0.0) for path in paths], ["vectors", "times", "vector", "thumbnail"])
    for position, row in enumerate(rows.to_pylist()):
        expected = video.frames_VFD[position][video.mask_VF[position]].numpy()
        stored = np.frombuffer(row["vectors"], dtype="<f2").reshape(-1, model.dim)
        np.testing.assert_allclose(stored, expected, atol=2e-3)
        assert len(row["times"]) == len(expected)
        assert len(row["vector"]) == model.dim + 1
        assert np.asarray(Image.open(io.BytesIO(row["thumbnail"])).convert("L")).std() > 20


def test_moved_copied_touched_and_deleted_files_cost_no_encoding(
    tree: Path, store: Store, model: GARE
) -> None:
    index(store, model, tree, tags=("kept",))
    before = items(store)
    (tree / "elsewhere").mkdir()
    shutil.move(tree / "year 2001", tree / "elsewhere" / "2001")  # five files
    shutil.move(tree / "web.webm", tree / "renamed.webm")
    shutil.copy(tree / "old.avi", tree / "third.avi")
    os.utime(tree / "rotated.mov", (1, 1))
    (tree / "UPPER.MP4").unlink()
    (tree / "year 2002" / "02" / "clip02.mp4").unlink()
    report = index(store, model, tree, tags=("later",))
    assert report.num_items_encoded == 0
    # The alias leads to a file that is gone: one more failure, reported.
    expected = {"moved": 6, "duplicate": 1, "deleted": 2, "unchanged": GOOD - 8, "failed": 1}
    assert counts(report) == {**expected, "failed_before": len(FAILURES)}
    after = items(store)
    assert len(after) == GOOD - 1
    assert all(os.path.exists(row["path"]) for row in after.values())
    old, new = before[item_id(str(tree / "web.webm"), 0)], after[item_id(str(tree / "renamed.webm"), 0)]
    assert new["tags"] == ["kept", "later"]
    assert (new["added"], new["content"]) == (old["added"], old["content"])
    assert after[item_id(str(tree / "third.avi"), 0)]["tags"] == ["later"]
    assert after[item_id(str(tree / "rotated.mov"), 0)]["modified"].timestamp() == 1
    assert set(ledger(store)) >= {row["path"] for row in after.values()}
    assert str(tree / "web.webm") not in ledger(store)
    assert index(store, model, tree).did_something is False


def test_a_changed_file_is_encoded_again_and_keeps_tags(tmp_path: Path, store: Store, model: GARE) -> None:
    root = tmp_path / "videos"
    root.mkdir()
    path = write_video(root / "a.mp4", steady(25))
    write_video(root / "b.mp4", steady(3))
    assert index(store, model, root, split="window:5", tags=("mine",)).num_items_encoded == 6
    before = items(store)[item_id(str(path), 0)]
    write_video(path, steady(11.9))
    os.utime(path, (5, 5))
    report = index(store, model, root, split="window:5")
    assert counts(report) == {"changed": 1, "unchanged": 1}
    rows = [row for row in items(store).values() if row["path"] == str(path)]
    assert sorted((row["start"], row["end"]) for row in rows) == [(0, 5), (5, 10), (10, 11.9)]
    assert all(row["tags"] == ["mine"] and row["content"] != before["content"] for row in rows)

    report = index(store, model, root, split="whole")  # cut in another way
    assert counts(report) == {"changed": 2}
    assert sorted((row["start"], row["end"]) for row in items(store).values()) == [(0, 3), (0, 11.9)]

    path.write_bytes(b"not a video any more")
    report = index(store, model, root)
    assert counts(report) == {"unchanged": 1, "failed": 1}
    assert [row["path"] for row in items(store).values()] == [str(root / "b.mp4")]
    write_video(path, steady(4))
    assert counts(index(store, model, root)) == {"changed": 1, "unchanged": 1}


def test_failed_files_are_tried_again_when_asked(tmp_path: Path, store: Store, model: GARE) -> None:
    root = tmp_path / "videos"
    root.mkdir()
    whole = write_video(root / "a.mp4", steady(12)).read_bytes()
    (root / "a.mp4").write_bytes(whole[:-200])
    assert counts(index(store, model, root)) == {"failed": 1}
    assert counts(index(store, model, root)) == {"failed_before": 1}
    assert counts(index(store, model, root, retry_failed=True)) == {"failed": 1}
    assert store.count() == 0


def test_damaged_files_give_what_they_have_when_asked(tmp_path: Path, store: Store, model: GARE) -> None:
    root = tmp_path / "videos"
    root.mkdir()
    options = {"movflags": "faststart"}
    whole = write_video(root / "a.mp4", steady(12), container_options=options).read_bytes()
    (root / "a.mp4").write_bytes(whole[:-200])
    assert counts(index(store, model, root)) == {"failed": 1}
    assert counts(index(store, model, root, retry_failed=True, keep_damaged=True)) == {"changed": 1}
    assert store.count() == 1


def test_an_unmounted_disk_does_not_empty_the_library(tmp_path: Path, store: Store, model: GARE) -> None:
    root, other = tmp_path / "disk", tmp_path / "other"
    for folder in (root, other):
        folder.mkdir()
        write_video(folder / "a.mp4", steady(2 if folder is root else 3))
    index(store, model, root, other)
    root.rename(tmp_path / "unmounted")
    for _ in range(2):  # first it is not there, then it is an empty mount point
        report = index(store, model, root, other)
        assert list(report.skipped_roots) == [str(root)]
        assert counts(report) == {"unchanged": 1}
        assert store.count() == 2
        root.mkdir(exist_ok=True)
    assert counts(index(store, model, root, other, prune=True)) == {"unchanged": 1, "deleted": 1}
    assert store.count() == 1
    with pytest.raises(LibraryError, match="does not exist"):
        index(store, model, tmp_path / "never")


def test_a_decoder_that_hangs_eats_or_crashes_costs_one_file(
    tmp_path: Path, store: Store, model: GARE
) -> None:
    root = tmp_path / "videos"
    root.mkdir()
    for number, name in enumerate(("a", "hang", "b", "crash", "c", "eat", "d", "e")):
        write_video(root / f"{name}.mp4", steady(2 + number / 10))
    limits = Limits(seconds=10, memory_bytes=2**29)  # far more than a busy machine takes for the others
    report = index(store, model, root, extractor=faulty_extract, limits=limits)
    kinds = {os.path.basename(failure.path): failure.kind for failure in report.failures}
    assert kinds == {"hang.mp4": "timeout", "crash.mp4": "decoder_crashed", "eat.mp4": "out_of_memory"}
    assert counts(report) == {"new": 5, "failed": 3}
    assert store.count() == report.num_items_encoded == 5
    assert counts(index(store, model, root, retry_failed=True)) == {"unchanged": 5, "changed": 3}


LIES = ("large", "flat", "many", "back", "miscounted", "script", "reversed", "late", "pickle")


def test_a_decoder_that_lies_costs_one_file(tmp_path: Path, store: Store, model: GARE) -> None:
    root = tmp_path / "videos"
    root.mkdir()
    for number, name in enumerate(("a", *LIES, "b")):
        write_video(root / f"{name}.mp4", steady(1 + number / 10))
    report = index(store, model, root, extractor=lying_extract)
    kinds = {Path(failure.path).stem: failure.kind for failure in report.failures}
    assert kinds == dict.fromkeys(LIES, "decoder_misbehaved")
    assert counts(report) == {"new": 2, "failed": len(LIES)}
    assert store.count() == 2


def test_files_that_are_still_written_wait(tmp_path: Path, store: Store, model: GARE) -> None:
    root = tmp_path / "videos"
    root.mkdir()
    path = write_video(root / "a.mp4", steady(2))
    assert counts(index(store, model, root, settle_seconds=3600.0)) == {}
    os.utime(path, (1, 1))
    assert counts(index(store, model, root, settle_seconds=3600.0)) == {"new": 1}
    os.utime(path)
    assert counts(index(store, model, root, settle_seconds=3600.0)) == {}
    assert store.count() == 1


def test_another_models_store_is_refused(tmp_path: Path, store: Store) -> None:
    other = GARE(GareConfig.load({"encoder": {"name": "tiny", "dim": 8}})).eval()
    with pytest.raises(LibraryError, match="index with tiny"):
        index(store, other, tmp_path)


def test_stamps_tell_models_apart(model: GARE) -> None:
    torch.manual_seed(1)
    other = GARE(model.config).eval()
    assert model_stamp(model, "a").fingerprint == model_stamp(model, "b").fingerprint
    assert model_stamp(model, "a").fingerprint != model_stamp(other, "a").fingerprint


def test_the_command_line(tree: Path, model: GARE, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    first = gare("index", tree, "--model", tmp_path / "model", "--exclude", "year *", "--workers", 2)
    assert first.returncode == 0, first.stderr
    assert f"library {tree / '.gare'}: {GOOD - 20} items" in first.stdout
    assert "8 files are not in the library" in first.stderr
    assert "Traceback" not in first.stderr
    second = gare("index", tree, "--exclude", "year *", "--json")  # the library knows its model
    report = json.loads(second.stdout)
    assert (report["unchanged"], report["failed_before"], report["num_items_encoded"]) == (GOOD - 20, 8, 0)
    failed = gare("index", "--failed", "--library", tree / ".gare", "--json")
    rows = {os.path.relpath(row["path"], tree): row["kind"] for row in json.loads(failed.stdout)}
    assert rows == FAILURES
    wrong = gare("index", tree / "nothing here", "--library", tree / ".gare")
    assert wrong.returncode == 1
    assert "does not exist" in wrong.stderr
    assert "Traceback" not in wrong.stderr
    assert gare("index", tree / "nothing here").returncode == 1
    assert not (tree / "nothing here").exists()
