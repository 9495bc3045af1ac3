"""A library that the machines of a cluster index while something dies."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from subprocess import Popen
from typing import Any

import numpy as np

from cluster_workers import WatchedWorker
from gare.cluster.index_cluster import index_on_cluster
from gare.cluster.run_status import RunStatus
from gare.cluster.shard_ledger import ShardLedger
from gare.library.index.index_report import IndexReport
from gare.library.index.index_run import IndexOptions
from gare.library.library import Library
from gare.library.store import open_store
from library_state import State, assert_same, read_state

DRIVER = Path(__file__).with_name("cluster_driver.py")
NUM_VIDEOS = 10
LEASE_S = 10.0
OPTIONS = IndexOptions(commit_seconds=0.05)


class Scene:
    """A library, a run over it that a test holds and lets go, and what the workers leave behind.

    Args:
        place: has the model, and the videos unless `source` says where they are.
        library: the address of a library that is not there yet.
        signs: a folder for what the workers leave behind.
    """

    def __init__(self, place: Path, library: str, signs: Path, source: str | None = None) -> None:
        self.uri, self.signs = library, signs
        self.source = source or str(place / "tree")
        signs.mkdir()
        Library.open(library, model=place / "model").close()

    def hold(self) -> None:
        (self.signs / "hold").touch()

    def go(self) -> None:
        (self.signs / "hold").unlink()

    def begun(self) -> list[tuple[int, int]]:
        """Shard and process, for all that was begun."""
        names = [path.name.split("-") for path in self.signs.glob("shard-*")]
        return [(int(shard), int(process)) for _, shard, _, process in names]

    def has(self, sign: str) -> bool:
        """Whether a worker has left this sign: `died-between`, `refused` …"""
        return (self.signs / sign).exists()

    def index(self, *, dies: Sequence[str] = (), lease_s: float = LEASE_S, **more: Any) -> IndexReport:
        with Library.open(self.uri) as library:
            return index_on_cluster(
                library,
                [self.source],
                options=OPTIONS,
                files_per_shard=2,
                lease_s=lease_s,
                worker_type=partial(WatchedWorker, signs=self.signs, dies=dies),
                **more,
            )

    def start_driver(self, address: str) -> Popen[bytes]:
        """The same from a process of its own."""
        arguments = [address, self.uri, self.source, self.signs, LEASE_S]
        return Popen([sys.executable, str(DRIVER), *map(str, arguments)])

    def status(self) -> RunStatus | None:
        store = open_store(self.uri)
        try:
            return RunStatus.read(ShardLedger(store.records()))
        finally:
            store.close()

    def check(self, reference: State) -> None:
        """Every file is in exactly once, as one machine makes it; nothing is left over after `maintain`."""
        store: Any = open_store(self.uri)
        store.orphan_age = timedelta(0)
        store.maintain()
        state = read_state(store)
        assert_same(state, reference)
        for key, row in state.items.items():
            right = reference.items[key]
            np.testing.assert_allclose(row["vector"], right["vector"], atol=1e-5)
            frames = [np.frombuffer(each["vectors"], "<f2").astype(np.float32) for each in (row, right)]
            np.testing.assert_allclose(*frames, atol=4e-3)
        assert set(state.frames_keys) == {row["frames_key"] for row in state.items.values()}
        store.close()


def check_report(report: IndexReport) -> None:
    """Everything was done. What somebody committed before dying without a word is found unchanged."""
    assert (report.new + report.unchanged, report.failed, report.interrupted) == (NUM_VIDEOS, 1, False)
