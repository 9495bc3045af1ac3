"""An item has the vectors of its own file, whatever happens to files and processes meanwhile."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from clips import steady, write_video
from gare import GARE, GareConfig
from gare.data.workers import Limits
from gare.library.index import index_run
from gare.library.index.commit import Copy, Source, Writer, copy_rows
from gare.library.index.content_hash import HashQueue
from gare.library.index.extract_task import ExtractTask
from gare.library.index.index_report import IndexReport
from gare.library.index.index_run import IndexOptions, index_folders
from gare.library.index.object_files import Scratch
from gare.library.index.scan import FoundFile
from gare.library.library import model_stamp
from gare.library.store import Store, open_store
from gare.library.store.store_schema import item_id
from servers import HANG_S
from stores import STAMP, make_files, make_rows


@pytest.fixture(scope="module")
def model() -> GARE:
    torch.manual_seed(0)
    return GARE(GareConfig.load({"encoder": {"name": "tiny"}, "temporal": {"num_layers": 1}})).eval()


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three videos of one colour each, equally long: only their vectors tell them apart."""
    folder = tmp_path_factory.mktemp("clips")
    for name, colour in (("red", (250, 20, 20)), ("green", (20, 250, 20)), ("blue", (20, 20, 250))):
        pictures = [Image.new("RGB", (64, 48), colour)] * 20
        write_video(folder / f"{name}.mp4", steady(2), pictures=pictures)
    return folder


@pytest.fixture
def store(model: GARE, tmp_path: Path) -> Store:
    return open_store(tmp_path / "library", stamp=model_stamp(model, "tiny"), create=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "videos").mkdir()
    return tmp_path / "videos"


def index(store: Store, model: GARE, root: Path, **options: Any) -> IndexReport:
    return index_folders(store, model, [root], options=IndexOptions(num_workers=2, **options))


def vectors(store: Store, path: Path) -> np.ndarray:
    (row,) = store.fetch([item_id(str(path), 0.0)], ["vectors"]).to_pylist()
    return np.frombuffer(row["vectors"], dtype="<f2").astype(np.float32)


def expected(model: GARE, path: Path) -> np.ndarray:
    video = model.encode_video([str(path)])
    return video.frames_VFD[0][video.mask_VF[0]].numpy().ravel()


def assert_own_vectors(store: Store, model: GARE, root: Path) -> None:
    for path in sorted(root.glob("*.mp4")):
        np.testing.assert_allclose(vectors(store, path), expected(model, path), atol=2e-3, err_msg=path.name)


def hashes_in(order: tuple[str, ...], pause: float) -> type[HashQueue]:
    """Gives hashes in this order, each so long after the one before that its file may be done."""

    class Ordered(HashQueue):
        def __init__(self, files: Iterable[FoundFile], scratch: Scratch | None = None) -> None:
            ordered = sorted(files, key=lambda file: order.index(os.path.basename(file.path)))
            super().__init__(ordered, scratch)
            self._due = time.monotonic()

        def _fill(self) -> None:
            if not self._running:
                super()._fill()

        def next(self, timeout: float) -> Any:
            if time.monotonic() < self._due:
                time.sleep(0.01)
                return None
            found = super().next(timeout)
            self._due = time.monotonic() + pause
            return found

    return Ordered


@pytest.mark.parametrize("pause", [0.0, 0.7])
@pytest.mark.parametrize("order", list(itertools.permutations(["rec.mp4", "rec_old.mp4", "third.mp4"])))
def test_a_renamed_file_keeps_its_vectors_when_another_takes_its_name(
    order: tuple[str, ...],
    pause: float,
    root: Path,
    clips: Path,
    store: Store,
    model: GARE,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copy(clips / "red.mp4", root / "rec.mp4")
    index(store, model, root, tags=("mine",))
    (root / "rec.mp4").rename(root / "rec_old.mp4")
    shutil.copy(clips / "green.mp4", root / "rec.mp4")
    shutil.copy(clips / "blue.mp4", root / "third.mp4")
    monkeypatch.setattr(index_run, "HashQueue", hashes_in(order, pause))
    index(store, model, root, commit_seconds=3600)
    assert_own_vectors(store, model, root)
    assert index(store, model, root).unchanged == 3


def test_two_files_that_change_names_keep_their_vectors(
    root: Path, clips: Path, store: Store, model: GARE
) -> None:
    shutil.copy(clips / "red.mp4", root / "a.mp4")
    shutil.copy(clips / "green.mp4", root / "b.mp4")
    index(store, model, root)
    (root / "a.mp4").rename(root / "c")
    (root / "b.mp4").rename(root / "a.mp4")
    (root / "c").rename(root / "b.mp4")
    os.utime(root / "a.mp4")
    os.utime(root / "b.mp4")
    report = index(store, model, root, commit_seconds=3600)
    assert report.num_items_encoded == 0
    assert_own_vectors(store, model, root)


def test_rows_of_other_content_are_not_copied(root: Path, clips: Path, store: Store, model: GARE) -> None:
    """As when another process gives the source another content after our catalogue was read."""
    shutil.copy(clips / "red.mp4", root / "rec.mp4")
    index(store, model, root)
    source = Source(str(root / "rec.mp4"), (item_id(str(root / "rec.mp4"), 0.0),))
    copy = Copy(FoundFile(str(root / "new.mp4"), 1, 1), "another content", source, is_move=False)
    (result,) = copy_rows(store, [copy], "whole", ())
    assert result == (copy, [], [])


class SwappedBefore(ExtractTask):
    """The file is replaced after it was hashed, once."""

    def open(self) -> int:
        if (new := Path(self.item.path).with_suffix(".next")).exists():
            os.replace(new, self.item.path)
        return super().open()


class SwappedWhile(ExtractTask):
    """The file is replaced just before it is opened, and put back just after."""

    def open(self) -> int:
        path = self.item.path
        new, kept = Path(path).with_suffix(".next"), Path(path).with_suffix(".kept")
        if not new.exists():
            return super().open()
        os.replace(path, kept)
        os.replace(new, path)
        try:
            return super().open()
        finally:
            os.replace(kept, path)


class PutBack(ExtractTask):
    """Another file lies there while it is decoded. The right one is back before the end."""

    def open(self) -> int:
        path = Path(self.item.path)
        descriptor = super().open()
        if path.with_suffix(".next").exists():
            os.replace(path, path.with_suffix(".kept"))
            os.replace(path.with_suffix(".next"), path)
            os.replace(path.with_suffix(".kept"), path)
        return descriptor


class Growing(ExtractTask):
    """The file grows whenever it is decoded."""

    def take(self, record: Any) -> Any:
        with open(self.item.path, "ab") as file:
            file.write(b"\0\0\0\x0cfreemore")
        return super().take(record)


@pytest.mark.parametrize("task", [SwappedBefore, SwappedWhile, PutBack])
def test_a_file_swapped_between_hash_and_decode_is_read_again(
    task: Any, root: Path, clips: Path, store: Store, model: GARE, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_run, "ExtractTask", task)
    shutil.copy(clips / "red.mp4", root / "rec.mp4")
    shutil.copy(clips / "red.mp4", root / "twin.mp4")
    for name in ("rec.next", "twin.next"):  # one of the two is decoded, the other copied
        shutil.copy(clips / "green.mp4", root / name)
    report = index(store, model, root, exclude=("*.next", "*.kept"))
    assert report.failed == 0
    assert len(list(root.glob("*.next"))) < 2
    assert_own_vectors(store, model, root)
    assert index(store, model, root).unchanged == 2


def test_a_file_that_never_holds_still_stays_as_it_was(
    root: Path, clips: Path, store: Store, model: GARE, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(clips / "red.mp4", root / "rec.mp4")
    index(store, model, root)
    before = vectors(store, root / "rec.mp4")
    shutil.copy(clips / "green.mp4", root / "rec.mp4")
    monkeypatch.setattr(index_run, "ExtractTask", Growing)
    report = index(store, model, root)
    monkeypatch.undo()
    assert [failure.kind for failure in report.failures] == ["changing"]
    np.testing.assert_array_equal(vectors(store, root / "rec.mp4"), before)
    assert index(store, model, root).changed == 1  # when it holds still
    assert_own_vectors(store, model, root)


def test_a_file_swapped_after_the_scan_is_not_unchanged_when_it_comes_back(
    root: Path, clips: Path, store: Store, model: GARE, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger has the size and date of what was hashed, not of what the scan saw."""
    path, kept = root / "rec.mp4", root / "kept"
    shutil.copy(clips / "red.mp4", path)
    scan = index_run.scan_sources

    def swap_after(*args: Any, **options: Any) -> Any:
        found = scan(*args, **options)
        if not kept.exists():
            path.rename(kept)
            shutil.copy(clips / "green.mp4", path)
        return found

    monkeypatch.setattr(index_run, "scan_sources", swap_after)
    index(store, model, root)
    monkeypatch.undo()
    os.replace(kept, path)
    assert index(store, model, root).unchanged == 0
    assert_own_vectors(store, model, root)


# --- one generation of items per file -----------------------------------------------------------------------


def generations(store: Store, *, with_ledger: bool = True) -> dict[str, str]:
    """How the items of each file were segmented; asserts that they are whole and that the ledger says so."""
    columns = ["path", "content", "start", "end", "file_duration", "frames_key"]
    rows = [row for batch in store.scan(columns=columns) for row in batch.to_pylist()]
    ledger = {row["path"]: row for batch in store.scan_files() for row in batch.to_pylist()}
    found = {}
    for path in sorted({row["path"] for row in rows}):
        mine = sorted((row for row in rows if row["path"] == path), key=lambda row: float(row["start"]))
        edges = [0.0, *(row["end"] for row in mine)]
        assert [row["start"] for row in mine] == edges[:-1]
        assert edges[-1] == mine[0]["file_duration"]
        (content,) = {row["content"] for row in mine}
        (found[path],) = {row["frames_key"].split("/")[1] for row in mine}
        line = ledger[path]
        if with_ledger:
            expected_line = (content, found[path], len(mine))
            assert (line["content"], line["split"], line["num_items"]) == expected_line
    return found


@pytest.mark.parametrize("kind", ["folder", "s3", "postgres"])
def test_two_indexers_with_different_splits_store_no_file_twice(
    kind: str, new_library: Any, tmp_path: Path, root: Path, model: GARE
) -> None:
    for number in range(8):
        write_video(root / f"{number}.mp4", steady(2 + number / 10))
    model.save_pretrained(tmp_path / "model")
    uri = new_library(kind)
    open_store(uri, stamp=model_stamp(model, "tiny"), create=True).close()
    script = Path(__file__).parents[1] / "index_driver.py"
    command = [sys.executable, script, "splits", root, uri, tmp_path / "model", "whole", "window:1"]
    subprocess.run([str(part) for part in command], check=True, timeout=HANG_S, stdout=subprocess.DEVNULL)
    store = open_store(uri)
    assert len(generations(store, with_ledger=kind != "s3")) == 8  # there the next run may have to look again
    index(store, model, root, split="window:1")
    assert list(generations(store).values()) == ["window:1"] * 8
    index(store, model, root, split="whole")
    assert list(generations(store).values()) == ["whole"] * 8
    assert store.count() == 8
    store.close()


@pytest.mark.parametrize("kind", ["folder", "s3", "postgres"])
def test_a_commit_replaces_all_items_of_its_files(kind: str, new_library: Any) -> None:
    store = open_store(new_library(kind), stamp=STAMP, create=True)
    store.upsert(*make_rows(["/a.mp4", "/a.mp4", "/b.mp4", "/c.mp4"], start=[0.0, 5.0, 3.0, 0.0]))
    items, frames = make_rows(["/a.mp4", "/a.mp4"], start=[0.0, 7.0], version="2")
    store.replace_files(items, frames, make_files(["/a.mp4", "/b.mp4"]))
    found = store.items_of(["/a.mp4", "/b.mp4"])
    assert found == dict(zip(items["id"].to_pylist(), items["frames_key"].to_pylist(), strict=True))
    assert store.count() == 3  # and that of /c.mp4
    assert {path for batch in store.scan_files(["path"]) for path in batch["path"].to_pylist()} == {
        "/a.mp4",
        "/b.mp4",
    }
    store.close()


@pytest.mark.parametrize("target", ["replace_files", "record_files"])
def test_after_a_kill_during_a_switch_of_split_the_old_split_is_not_unchanged(
    target: str, root: Path, clips: Path, store: Store, model: GARE, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies after it wrote the items, and before the ledger."""
    shutil.copy(clips / "red.mp4", root / "a.mp4")
    index(store, model, root, split="window:1")
    real, num_calls = type(store).record_files, 0

    def die(self: Store, files: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if target == "replace_files" or num_calls == 2:
            raise KeyboardInterrupt
        real(self, files)

    monkeypatch.setattr(type(store), "record_files", die)
    with pytest.raises(KeyboardInterrupt):
        index(store, model, root, split="whole")
    monkeypatch.undo()
    index(store, model, root, split="window:1")
    assert generations(store) == {str(root / "a.mp4"): "window:1"}


def test_a_file_that_is_gone_takes_the_items_of_every_split_along(
    root: Path, clips: Path, store: Store, model: GARE, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may have given it other items after our catalogue was read."""
    shutil.copy(clips / "red.mp4", root / "a.mp4")
    shutil.copy(clips / "green.mp4", root / "b.mp4")
    index(store, model, root)
    (root / "a.mp4").unlink()
    os.utime(root / "b.mp4")
    real = Writer.forget

    def forget(self: Any, paths: Any) -> None:
        store.upsert(*make_rows([str(root / "a.mp4")], start=[1.0], stamp=store.stamp))
        real(self, paths)

    monkeypatch.setattr(Writer, "forget", forget)
    index(store, model, root)
    assert store.items_of([str(root / "a.mp4")]) == {}


def test_a_small_memory_limit_is_blamed_on_memory(root: Path, clips: Path, store: Store, model: GARE) -> None:
    shutil.copy(clips / "red.mp4", root / "small.mp4")
    write_video(root / "large.mp4", steady(0.5), size=(2048, 1536))
    report = index(store, model, root, limits=Limits(memory_bytes=10**7))
    (failure,) = report.failures  # libraries are loaded before the limit is set: what is small fits
    assert (os.path.basename(failure.path), failure.kind) == ("large.mp4", "out_of_memory")
    assert "0.01 GB; allow more with --memory" in failure.message
    assert "PyAV" not in failure.message
    assert "download" not in failure.message
