"""Kills, power cuts, full and read-only disks: nothing that was acknowledged is lost or doubled."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock

from gare.errors import LibraryError
from gare.library.store import Store, lance_storage, lance_upkeep, open_store
from servers import HANG_S, Process
from stores import STAMP, make_files, make_rows, read_all

SCRIPT = Path(__file__).resolve().parents[1] / "store_processes.py"


def start(*arguments: object, wrapper: tuple[str, ...] = ()) -> Process:
    command = [*wrapper, sys.executable, str(SCRIPT), *map(str, arguments)]
    # Unbuffered: `communicate` does not see what `readline` left in a buffer, and a "deleting" was lost so.
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)


class Acknowledged:
    """What a process said it had done."""

    def __init__(self, output: bytes) -> None:
        lines = [line.split() for line in output.decode().splitlines()]
        self.added = {name for verb, *names in lines if verb == "added" for name in names}
        self.touched = {name for verb, *names in lines if verb == "deleting" for name in names}
        self.deleted = {name for verb, *names in lines if verb == "deleted" for name in names}
        self.maintained = sum(verb == "maintaining" for verb, *_ in lines)


def check(store: Store, acknowledged: list[Acknowledged]) -> None:
    counts = Counter(read_all(store, ["id"])["id"].to_pylist())
    assert max(counts.values(), default=1) == 1, "doubled rows"
    assert store.count() == len(counts)
    for one in acknowledged:
        assert one.added - one.touched <= counts.keys(), "lost rows"
        assert not one.deleted & counts.keys(), "deleted rows came back"
    ids = sorted(counts)
    assert store.fetch(ids, ["id", "vectors", "thumbnail"])["id"].to_pylist() == ids
    ledger = Counter(path for batch in store.scan_files(["path"]) for path in batch["path"].to_pylist())
    assert max(ledger.values(), default=1) == 1, "doubled files"
    if ids:  # through the index, where there is one: it must know neither less nor more
        assert sorted(store.search(np.ones((1, 9)), len(ids))[0].ids) == ids


def test_twenty_kills_lose_and_double_nothing(tmp_path: Path):
    """Two writers at a time, killed at random moments while they write, delete and maintain."""
    chance = random.Random(7)
    uri = str(tmp_path / "library")
    acknowledged: list[Acknowledged] = []
    for number in range(10):
        writers = [start("write", uri, 2 * number + part, 10_000) for part in range(2)]
        watched = writers[0].stdout
        assert watched is not None
        seen = b"".join(watched.readline() for _ in range(chance.randint(1, 7)))
        assert seen.startswith(b"open\n"), writers[0].communicate()[1]
        time.sleep(chance.uniform(0.0, 0.1))
        for writer in chance.sample(writers, 2):
            writer.kill()
            time.sleep(chance.uniform(0.0, 0.02))
        for writer in writers:
            output, errors = writer.communicate(timeout=HANG_S)
            assert writer.returncode == -9, errors.decode()
            acknowledged.append(Acknowledged(seen + output))
            seen = b""
        with_repairs = open_store(uri, stamp=STAMP)
        assert with_repairs.repairs == ()
        check(with_repairs, acknowledged)
    assert sum(len(one.added) for one in acknowledged) >= 45  # what was waited for
    assert sum(one.maintained for one in acknowledged) >= 3
    store = open_store(uri, stamp=STAMP)
    store.maintain()
    check(store, acknowledged)


def test_two_writers_and_four_readers_do_not_disturb_each_other(tmp_path: Path):
    uri = str(tmp_path / "library")
    open_store(uri, stamp=STAMP, create=True)
    writers = [start("write", uri, seed, 15) for seed in range(2)]
    stop = tmp_path / "stop"
    readers = [start("read", uri, stop) for _ in range(4)]
    outputs = []
    for process in [*writers, *readers]:
        if process is readers[0]:
            stop.touch()
        output, errors = process.communicate(timeout=HANG_S)
        assert process.returncode == 0, errors.decode()
        outputs.append(output)
    for output in outputs[2:]:
        assert int(output.split()[-1]) > 3
    acknowledged = [Acknowledged(output) for output in outputs[:2]]
    store = open_store(uri)
    check(store, acknowledged)
    assert store.count() == sum(len(one.added) - len(one.deleted) for one in acknowledged)
    assert sum(1 for batch in store.scan_files() for _ in range(batch.num_rows)) == 2 * 15 * 3


@pytest.fixture
def library(tmp_path: Path) -> Path:
    folder = tmp_path / "library"
    store = open_store(folder, stamp=STAMP, create=True)
    store.upsert(*make_rows(["/first.mp4"]))
    store.record_files(make_files(["/first.mp4"]))
    store.set_notes({"a": "1"})
    store.upsert(*make_rows(["/second.mp4"]))
    store.record_files(make_files(["/second.mp4"]))
    store.set_notes({"a": "2"})
    return folder


def newest_manifest(folder: Path, table: str) -> Path:
    return min((folder / f"{table}.lance" / "_versions").glob("*.manifest"))


@pytest.mark.parametrize("table", ["items", "frames", "files", "facts"])
@pytest.mark.parametrize("size", [0, 100])
def test_a_manifest_cut_short_is_set_aside_and_said(library: Path, table: str, size: int):
    manifest = newest_manifest(library, table)
    os.truncate(manifest, size)
    with pytest.raises(LibraryError, match="Open the library once for writing"):
        open_store(library, read_only=True)
    store = open_store(library, stamp=STAMP)
    assert len(store.repairs) == 1
    assert f"'{table}' was undone" in store.repairs[0]
    assert f"{size} bytes" in store.repairs[0]
    assert not manifest.exists()
    assert [kept.stat().st_size for kept in (library / lance_storage.SET_ASIDE).iterdir()] == [size]
    assert open_store(library).repairs == ()
    if table == "items":
        assert read_all(store)["path"].to_pylist() == ["/first.mp4"]
    elif table == "facts":
        assert store.get_notes() == {"a": "1"}
    store.upsert(*make_rows(["/second.mp4"]))
    assert sorted(read_all(store)["path"].to_pylist()) == ["/first.mp4", "/second.mp4"]


@pytest.mark.parametrize("content", [b"", bytes(500)])
def test_an_older_manifest_that_a_power_cut_spoilt_does_not_stop_the_upkeep(library: Path, content: bytes):
    """Two commits were not flushed, and the disk has the second one only."""
    _, older, *_ = sorted((library / "items.lance" / "_versions").glob("*.manifest"))
    older.write_bytes(content)
    store: Any = open_store(library, stamp=STAMP)
    assert store.repairs == ()  # no row is lost
    store.version_age = timedelta(0)
    store.maintain()
    assert [kept.stat().st_size for kept in (library / lance_storage.SET_ASIDE).iterdir()] == [len(content)]
    assert sorted(read_all(store)["path"].to_pylist()) == ["/first.mp4", "/second.mp4"]
    store.check()


def test_a_file_that_is_gone_is_damage_and_says_so(library: Path):
    for manifest in (library / "items.lance" / "_versions").glob("*.manifest"):
        manifest.write_bytes(b"not a manifest, but it ends like one LANC")
    with pytest.raises(LibraryError, match=r"is damaged.*gare check --repair"):
        open_store(library)


def test_everything_is_flushed_before_it_is_acknowledged(library: Path, monkeypatch: pytest.MonkeyPatch):
    """The order of a commit: data, then manifest; each file and the folder that names it."""
    flushed: list[str] = []
    real = lance_storage.flush
    monkeypatch.setattr(lance_storage, "flush", lambda path: (flushed.append(str(path)), real(path))[1])
    before = {str(path) for path in library.rglob("*")}
    store = open_store(library)
    store.upsert(*make_rows(["/third.mp4"]))
    new = {str(path) for path in library.rglob("*") if path.is_file()} - before
    new -= {str(library / ".write-lock")}
    assert new <= set(flushed)
    assert {str(Path(path).parent) for path in new} <= set(flushed)
    for table in ("items", "frames"):
        manifest = flushed.index(str(newest_manifest(library, table)))
        data = [place for place, path in enumerate(flushed) if path in new and f"{table}.lance/data" in path]
        assert max(data) < manifest


def test_what_a_clean_up_takes_meanwhile_is_no_error(library: Path, monkeypatch: pytest.MonkeyPatch):
    """Another process removes old files after their folder was listed, before one looks at them."""
    folder = library / "items.lance" / "_indices" / "old"
    folder.mkdir(parents=True)
    store: Any = open_store(library)
    is_taken, stat, files = False, os.stat, lance_storage.Flusher._files

    def take() -> None:
        nonlocal is_taken
        is_taken = True
        shutil.rmtree(folder)

    def listed(self: Any) -> Any:
        for path, entry in files(self):
            if folder.exists() and path == str(folder / "index"):
                take()
            yield path, entry

    def looked_at(path: Any, **options: Any) -> Any:
        if os.fspath(path) == str(folder / "index"):
            take()
        return stat(path, **options)

    (folder / "index").write_bytes(b"x" * 10**6)
    with monkeypatch.context() as patch:
        patch.setattr(lance_storage.Flusher, "_files", listed)
        store.upsert(*make_rows(["/third.mp4"]))
    assert is_taken
    is_taken = False
    folder.mkdir()
    (folder / "index").write_bytes(b"x" * 10**6)
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", looked_at)
        assert 0 < store.num_bytes() < 10**6
    assert is_taken


def small_disk(folder: Path, size: str, script: str) -> tuple[str, ...]:
    """Run something with a real file system of its own mounted at `folder`."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("mounting a file system of one's own is not allowed here")
    mount = f"mount -t tmpfs -o size={size} tmpfs {folder}"
    return ("unshare", "-rm", "sh", "-c", f'{mount} && {script} && "$@"', "sh")


def test_a_full_disk_is_said_and_does_no_damage(tmp_path: Path):
    """Written until the disk is full, then copied out of the mount and looked at."""
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    wrapper = small_disk(disk, "6m", "true")
    inner = f'"$@"; cp -r {disk}/library {copy}'
    process = start("fill", disk / "library", wrapper=(*wrapper, "sh", "-c", inner, "sh"))
    output, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, errors.decode()
    *_, last = output.decode().splitlines()
    assert last.startswith("refused library")
    assert "the disk is full" in last
    acknowledged = Acknowledged(output)
    assert len(acknowledged.added) >= 50
    store = open_store(copy, stamp=STAMP)
    check(store, [acknowledged])
    store.upsert(*make_rows(["/more.mp4"]))  # there is space again
    store.maintain()
    check(store, [acknowledged])


def test_a_read_only_disk_is_said_and_can_be_read(library: Path, tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    wrapper = small_disk(disk, "20m", f"cp -r {library} {disk}/library && mount -o remount,ro {disk}")
    process = start("fill", disk / "library", wrapper=wrapper)
    output, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, errors.decode()
    opened, refused = output.decode().splitlines()
    assert opened == "open"
    assert "it cannot be written" in refused
    reading = start("read", disk / "library", tmp_path, wrapper=wrapper)
    output, errors = reading.communicate(timeout=HANG_S)
    assert reading.returncode == 0, errors.decode()
    assert output.splitlines()[-1].startswith(b"searches")


def test_a_second_maintainer_leaves_it_to_the_first(library: Path):
    store = open_store(library)
    with FileLock(library / ".upkeep-lock"):
        assert "another process is at it" in store.maintain().actions[0]
    assert not any("another process" in action for action in store.maintain().actions)


def test_maintain_keeps_frames_and_joins_what_is_small(library: Path, monkeypatch: pytest.MonkeyPatch):
    """Bounded: a fragment that is large enough is never rewritten."""
    monkeypatch.setattr(lance_upkeep, "_FRAME_ROWS_PER_FRAGMENT", 20)
    store: Any = open_store(library)
    for number in range(30):
        store.upsert(*make_rows([f"/{number}/a.mp4", f"/{number}/b.mp4"]))
    before = read_all(store)
    first = store.maintain()
    assert any("fragments of frames" in action for action in first.actions)
    sizes = [fragment.count_rows() for fragment in store._frames.snapshot().dataset.get_fragments()]
    assert len(sizes) <= 5
    files = {path.name for path in (library / "frames.lance" / "data").iterdir()}
    store.upsert(*make_rows(["/x.mp4", "/y.mp4"]))
    store.maintain()
    fragments = store._frames.snapshot().dataset.get_fragments()
    kept = {file.path for fragment in fragments for file in fragment.metadata.files}
    assert len(kept & files) >= 2
    assert read_all(store).num_rows == before.num_rows + 2
    ids = before["id"].to_pylist()
    assert store.fetch(ids, ["id", "vectors"]).num_rows == len(ids)
