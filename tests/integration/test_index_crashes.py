"""Indexers that are killed, interrupted, run together or not allowed to read: nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clips import steady, write_video
from gare import GARE, GareConfig
from gare.library.store import open_store
from servers import HANG_S, wait_until
from video_tree import COPIES, GOOD, build_tree
from warm import WarmProcess, run_python

DRIVER = Path(__file__).resolve().parents[1] / "index_driver.py"
NUM_KILLS = 10


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree and a model."""
    folder = tmp_path_factory.mktemp("crashes")
    build_tree(folder / "tree")
    torch.manual_seed(0)
    config = GareConfig.load({"encoder": {"name": "tiny"}, "temporal": {"num_layers": 1}})
    GARE(config).eval().save_pretrained(folder / "model")
    return folder


State = tuple[dict[str, Any], dict[str, Any]]


def drive(task: str, place: Path, library: Path, number: int) -> list[Any]:
    command = [DRIVER, task, place / "tree", library, place / "model", number]
    result = run_python(list(map(str, command)), timeout=HANG_S)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture(scope="module")
def reference(place: Path) -> State:
    """What an indexer makes that nobody disturbed."""
    drive("together", place, place / "reference", 1)
    return state(place / "reference")


def state(library: Path) -> State:
    """Items with their frames, and the ledger, without dates and keys that differ from run to run."""
    store = open_store(library)
    assert not store.repairs
    ids = [row["id"] for batch in store.scan(columns=["id"]) for row in batch.to_pylist()]
    assert len(set(ids)) == len(ids)
    columns = ["id", "path", "content", "start", "end", "width", "height", "tags", "vector"]
    rows = store.fetch(ids, [*columns, "vectors", "times", "thumbnail", "strip"]).to_pylist()
    files = [row for batch in store.scan_files() for row in batch.to_pylist()]
    for row in files:
        del row["checked"]
    store.close()
    return {row["id"]: row for row in rows}, {row["path"]: row for row in files}


def assert_same(one: State, other: State) -> None:
    assert one[1] == other[1]
    assert one[0].keys() == other[0].keys()
    for key, row in one[0].items():
        twin = dict(other[0][key])
        row = dict(row)
        # Batch mates differ from run to run, and with them the last bit of a vector.
        np.testing.assert_allclose(row.pop("vector"), twin.pop("vector"), atol=1e-5)
        frames = [np.frombuffer(r.pop("vectors"), dtype="<f2").astype(np.float32) for r in (row, twin)]
        np.testing.assert_allclose(*frames, atol=4e-3)
        assert row == twin


def test_killed_again_and_again_it_ends_as_if_never_killed(place: Path, reference: State) -> None:
    *reports, summary = drive("kill", place, place / "killed", NUM_KILLS)
    assert summary["num_killed"] >= NUM_KILLS // 2
    # What was committed before a kill is not done again.
    assert reports[-1]["num_items_encoded"] < GOOD - COPIES
    assert_same(state(place / "killed"), reference)


def test_two_at_once_make_no_error_and_no_double(place: Path, reference: State) -> None:
    reports = drive("together", place, place / "together", 2)
    assert len(reports) == 2
    assert_same(state(place / "together"), reference)


def gare_index(*arguments: object, prefix: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    command = [*prefix, sys.executable, "-m", "gare", "index", "--json", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)


def test_files_and_folders_that_may_not_be_read(place: Path, tmp_path: Path) -> None:
    prefix: tuple[str, ...] = ()
    if os.getuid() == 0:  # root may read everything, unless told not to
        if not shutil.which("setpriv"):
            pytest.skip("runs as root, and setpriv is not here to take its privileges")
        prefix = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
    root = tmp_path / "private"
    (root / "closed").mkdir(parents=True)
    write_video(root / "open.mp4", steady(2))
    write_video(root / "closed" / "inside.mp4", steady(3))
    write_video(root / "locked.mp4", steady(4)).chmod(0)
    (root / "closed").chmod(0)
    arguments = (root, "--library", tmp_path / "library", "--model", place / "model")
    first = gare_index(*arguments, prefix=prefix)
    report = json.loads(first.stdout)
    assert "Traceback" not in first.stderr
    kinds = {os.path.relpath(failure["path"], root): failure["kind"] for failure in report["failures"]}
    assert kinds == {"closed": "no_permission", "locked.mp4": "no_permission"}
    assert report["new"] == 1
    (root / "closed").chmod(0o755)
    (root / "locked.mp4").chmod(0o644)
    report = json.loads(gare_index(*arguments, prefix=prefix).stdout)
    assert (report["new"], report["changed"], report["failed"], report["unchanged"]) == (1, 1, 0, 1)


# A commit is due after five seconds, and a fast machine might be done with all the videos by then.
EARLY_COMMITS = """
from gare.library.index import commit
commit._MAX_ITEMS = 1
from gare.cli.main import main
main()
"""


def test_ctrl_c_keeps_what_is_done(place: Path, tmp_path: Path) -> None:
    root, library = tmp_path / "many", tmp_path / "library"
    root.mkdir()
    content = write_video(root / "0.mp4", steady(20)).read_bytes()
    for number in range(1, 800):  # all different: each ends in a box of its own that players skip
        (root / f"{number}.mp4").write_bytes(content + b"\0\0\0\x0cfree" + number.to_bytes(4))
    arguments = ("index", "--json", root, "--library", library, "--model", place / "model", "--workers", 1)
    process = WarmProcess(
        ["-c", EARLY_COMMITS, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    wait_until(lambda: bool(list(library.glob("frames.lance/data/*"))), "the first videos")
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=HANG_S)
    assert "Traceback" not in errors
    report = json.loads(output)
    assert report["interrupted"]
    assert process.returncode == 130
    assert 0 < report["new"] < 800
    store = open_store(library)
    assert store.count() == report["new"]
    assert sum(batch.num_rows for batch in store.scan_files()) == report["new"]
