"""One worker of a run, in this process and without Ray: it stops well, and never stands still for ever."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from clips import steady, write_video
from gare import GARE, GareConfig, Library
from gare.cluster import shard_worker
from gare.cluster.run_status import RunStatus
from gare.cluster.shard_ledger import Run, Shard, ShardFiles, ShardLedger, cut_into_shards
from gare.cluster.shard_worker import ShardWorker, options_to_plain
from gare.data.workers import Limits
from gare.library.index.content_hash import HashQueue
from gare.library.index.index_report import IndexReport
from gare.library.index.index_run import IndexOptions, plan_folders
from gare.library.index.scan import FoundFile
from servers import HANG_S, wait_until

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
    return ledger.start(run, shards, [], segmentation=planned.segmentation, roots=tuple(planned.roots))


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
