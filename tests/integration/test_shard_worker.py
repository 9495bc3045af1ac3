"""One worker of a run, in this process and without Ray: it stops well, and never stands still for ever."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from clips import steady, write_video
from gare import GARE, GareConfig, Library
from gare.cli.index_command import _end
from gare.cluster import shard_worker
from gare.cluster.index_cluster import _plan
from gare.cluster.run_status import RunStatus
from gare.cluster.shard_ledger import MOST_ATTEMPTS, Run, Shard, ShardFiles, ShardLedger, cut_into_shards
from gare.cluster.shard_worker import ShardWorker, check_sources, options_to_plain
from gare.data.workers import Limits
from gare.errors import ClusterError
from gare.library.index.content_hash import HashQueue
from gare.library.index.index_report import IndexReport
from gare.library.index.index_run import IndexOptions, plan_folders
from gare.library.index.scan import FoundFile
from servers import HANG_S, free_port, wait_until

NUM_VIDEOS = 6
OPTIONS = IndexOptions(commit_seconds=0.0)


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Library]:
    (tmp_path / "tree").mkdir()
    for number in range(NUM_VIDEOS):
        write_video(tmp_path / "tree" / f"{number}.mp4", steady(1 + number / 5))
    torch.manual_seed(0)
    model = GARE(GareConfig.load({"encoder": {"name": "tiny"}, "temporal": {"num_layers": 1}})).eval()
    model.save_pretrained(tmp_path / "model")
    with Library.open(tmp_path / "library", model=tmp_path / "model") as opened:
        yield opened


def begin(library: Library, ledger: ShardLedger, tree: Path, lease_s: float) -> Run:
    """A run of one shard."""
    planned = plan_folders(library.store, library.model, [tree], options=OPTIONS)
    run = ledger.begin([str(tree)], options_to_plain(OPTIONS), lease_s=lease_s)
    shards = cut_into_shards(planned.plan.new, planned.plan.changed)
    roots = tuple(planned.roots)
    return ledger.start(
        run, shards, planned.plan.gone, segmentation=planned.segmentation, roots=roots, read_roots=roots
    )


def make_worker(library: Library, kind: type[ShardWorker] = ShardWorker) -> ShardWorker:
    return kind(library.home.uri, node="here", device="cpu", num_processes=1, on_stuck=pytest.fail)


class StopsItsRun(ShardWorker):
    """After the first commit its run is stopped, as another process may at any time."""

    def index_shard(self, run: Run, shard: Shard, files: ShardFiles, options: Any, heart: Any) -> IndexReport:
        store: Any = self._library.store
        replace_files = store.replace_files

        def replace_and_stop(*rows: Any) -> None:
            replace_files(*rows)
            self._ledger.set_state("stopping")
            wait_until(heart.is_over, "word that the run was stopped")

        store.replace_files = replace_and_stop
        return super().index_shard(run, shard, files, options, heart)


def test_what_was_committed_before_a_run_was_stopped_is_not_read_again(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = ShardLedger(library.home.records())
    run = begin(library, ledger, tmp_path / "tree", lease_s=0.3)
    make_worker(library, StopsItsRun).run()
    (shard, _) = ledger.shards(run)
    num_done = library.store.count()
    assert 0 < num_done < NUM_VIDEOS
    assert (shard.state, shard.attempt) == ("waiting", 0)

    read: list[str] = []
    init = HashQueue.__init__

    def note(queue: HashQueue, files: Any, *rest: Any) -> None:
        read.extend(file.path for file in files)
        init(queue, files, *rest)

    monkeypatch.setattr(HashQueue, "__init__", note)
    ledger.take_up(ledger.run() or run)
    make_worker(library).run()
    assert len(read) == NUM_VIDEOS - num_done
    status = RunStatus.read(ledger)
    assert status is not None
    assert (status.run.state, status.num_done) == ("finished", NUM_VIDEOS)
    assert (status.report().new, status.report().duplicate) == (NUM_VIDEOS, 0)


def test_a_worker_that_stands_still_for_longer_than_its_largest_file_may_take_ends_itself(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_worker, "_STUCK_MARGIN_S", 0.1)
    ledger = ShardLedger(library.home.records())
    run = begin(library, ledger, tmp_path / "tree", lease_s=0.3)
    shard = ledger.lease(run, "owner", "here")
    assert shard is not None
    is_stuck = threading.Event()
    files = ShardFiles((FoundFile("/large.mp4", 1_000, 1),), ())
    with shard_worker._Heart(ledger, run, shard, is_stuck.set) as heart:
        heart.move_on("/large.mp4")
        heart.allow(Limits(file_seconds=0.1, bytes_per_second=10_000.0), files)
        assert is_stuck.wait(HANG_S)
    (shard, _) = ledger.shards(run)
    assert shard.path == "/large.mp4"
    assert shard.still_s >= 0.3


@pytest.mark.parametrize("away", ["gone", "empty"])
def test_a_machine_without_the_videos_leases_nothing_and_says_so(
    library: Library, tmp_path: Path, away: str
) -> None:
    tree, elsewhere = tmp_path / "tree", tmp_path / "elsewhere"
    ledger = ShardLedger(library.home.records())
    run = begin(library, ledger, tree, lease_s=60.0)
    tree.rename(elsewhere)
    if away == "empty":  # nothing is mounted there
        tree.mkdir()
    with pytest.raises(ClusterError, match=f"{tree} cannot be read on this machine"):
        make_worker(library).run()
    assert [(shard.state, shard.attempt) for shard in ledger.shards(run)] == [("waiting", 0)] * 2
    if away == "empty":
        tree.rmdir()
    elsewhere.rename(tree)
    make_worker(library).run()
    status = RunStatus.read(ledger)
    assert status is not None
    assert (status.run.state, status.report().new, status.report().failed) == ("finished", NUM_VIDEOS, 0)


def test_a_folder_that_is_to_be_emptied_keeps_no_machine_from_work(library: Library, tmp_path: Path) -> None:
    tree, old = tmp_path / "tree", tmp_path / "old"
    old.mkdir()
    write_video(old / "old.mp4", steady(3.0))
    library.index(old)
    (old / "old.mp4").unlink()
    ledger = ShardLedger(library.home.records())
    options = replace(OPTIONS, prune=True)
    run = _plan(library, ledger, [str(tree), str(old)], options, files_per_shard=9, lease_s=60.0)
    assert (run.roots, run.read_roots) == ((str(tree), str(old)), (str(tree),))
    make_worker(library).run()
    status = RunStatus.read(ledger)
    assert status is not None
    report = status.report()
    assert (status.run.state, report.new, report.deleted) == ("finished", NUM_VIDEOS, 1)


def test_object_storage_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "any")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ClusterError, match="s3://bucket/videos cannot be read on this machine"):
        check_sources(["s3://bucket/videos"])


class Breaks(ShardWorker):
    """A machine with a broken device: every shard fails there."""

    def index_shard(self, *_: Any) -> IndexReport:
        raise RuntimeError("the device is broken")


def test_a_worker_that_only_fails_ends_and_a_shard_that_always_fails_is_given_up(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shard_worker, "_LONGEST_REST_S", 0.01)
    ledger = ShardLedger(library.home.records())
    run = begin(library, ledger, tmp_path / "tree", lease_s=60.0)
    with pytest.raises(RuntimeError, match="the device is broken"):
        make_worker(library, Breaks).run()
    assert ledger.shards(run)[0].attempt == shard_worker._MOST_FAILURES < MOST_ATTEMPTS
    make_worker(library, Breaks).run()
    status = RunStatus.read(ledger)
    assert status is not None
    assert (status.run.state, status.shards[0].state) == ("finished", "failed")
    with pytest.raises(typer.Exit) as ended:  # what is missing is no success
        _end(library, [str(tmp_path / "tree")], status.report(), as_json=False)
    assert ended.value.exit_code == 1
    assert "its 6 files were given up: RuntimeError: the device is broken" in capsys.readouterr().err
