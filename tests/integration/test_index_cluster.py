"""Three machines of a Ray cluster index together; whatever is killed, the library is as if nothing had been.

Ray, SeaweedFS and PostgreSQL are real; the machines are Ray nodes on this one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clips import steady, write_video
from cluster_workers import WatchedWorker
from gare import GARE, GareConfig, Library
from gare.cluster.index_cluster import index_on_cluster
from gare.cluster.ray_link import connected
from gare.cluster.run_status import RunStatus
from gare.cluster.shard_ledger import ShardLedger
from gare.library.index.index_report import IndexReport
from gare.library.index.index_run import IndexOptions
from gare.library.store import open_store
from library_state import State, assert_same, read_state
from servers import HANG_S, SeaweedFS, kill_hard, wait_until
from warm import run_gare

DRIVER = Path(__file__).resolve().parents[1] / "cluster_driver.py"
NUM_VIDEOS = 10
LEASE_S = 10.0
OPTIONS = IndexOptions(commit_seconds=0.05)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Videos, a file that is none, and a model."""
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "tree").mkdir()
    for number in range(NUM_VIDEOS):
        write_video(folder / "tree" / f"clip {number:02}.mp4", steady(1 + number / 5))
    (folder / "tree" / "broken.mp4").write_text("no video")
    torch.manual_seed(0)
    config = GareConfig.load({"encoder": {"name": "tiny"}, "temporal": {"num_layers": 1}})
    GARE(config).eval().save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def reference(place: Path) -> State:
    """What one machine makes of it."""
    with Library.open(place / "reference", model=place / "model") as library:
        library.index(place / "tree")
        return read_state(library.store)


class Machines:
    """Three Ray nodes; one that was killed is replaced when it is next asked for."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        small = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
        self._small = small
        head = {**small, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = [self.cluster.add_node(**small) for _ in range(2)]
        self.address = self.cluster.address

    def add(self) -> None:
        self.nodes.append(self.cluster.add_node(**self._small))

    def kill_one(self) -> None:
        """As if its power was cut."""
        self.cluster.remove_node(self.nodes.pop(), allow_graceful=False)


@pytest.fixture(scope="module")
def machines(seaweedfs: SeaweedFS) -> Iterator[Machines]:
    """They know the storage, as every machine must that works on a library there."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in seaweedfs.environment.items():
            patch.setenv(name, value)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(DRIVER.parent), os.environ.get("PYTHONPATH", "")]))
        machines = Machines()
        with connected(machines.address, user="a test"):
            yield machines
        machines.cluster.shutdown()


class Scene:
    """A library, a run over it that a test holds and lets go, and what the workers leave behind."""

    def __init__(self, place: Path, library: str, signs: Path) -> None:
        self.place, self.uri, self.signs = place, library, signs
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

    def index(self, *, dies: Sequence[str] = (), **more: Any) -> IndexReport:
        with Library.open(self.uri) as library:
            return index_on_cluster(
                library,
                [str(self.place / "tree")],
                options=OPTIONS,
                files_per_shard=2,
                lease_s=LEASE_S,
                worker_type=partial(WatchedWorker, signs=self.signs, dies=dies),
                **more,
            )

    def status(self) -> RunStatus | None:
        store = open_store(self.uri)
        try:
            return RunStatus.read(ShardLedger(store.records()))
        finally:
            store.close()

    def check(self, reference: State) -> None:
        """Every file is in exactly once, as one machine makes it; nothing is left over after `maintain`."""
        from datetime import timedelta

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


@pytest.fixture
def scene(
    request: pytest.FixtureRequest, place: Path, new_library: Callable[[str], str], tmp_path: Path
) -> Scene:
    return Scene(place, new_library(getattr(request, "param", "folder")), tmp_path / "signs")


def test_it_makes_what_one_machine_makes_and_does_nothing_the_second_time(
    machines: Machines, scene: Scene, reference: State
) -> None:
    lines: list[str] = []
    report = scene.index(on_status=lambda status: lines.append(status.line()))
    assert (report.new, report.failed, report.interrupted) == (NUM_VIDEOS, 1, False)
    assert f"{NUM_VIDEOS + 1} of {NUM_VIDEOS + 1} files, 6 of 6 shards, 1 failed" in lines[-1]
    scene.check(reference)
    again = scene.index()
    assert (again.new, again.unchanged, again.failed_before) == (0, NUM_VIDEOS, 1)


def check_report(report: IndexReport) -> None:
    """Everything was done. What somebody committed before dying without a word is found unchanged."""
    assert (report.new + report.unchanged, report.failed, report.interrupted) == (NUM_VIDEOS, 1, False)


def test_workers_die_before_a_commit_in_the_middle_of_one_and_after_one(
    machines: Machines, scene: Scene, reference: State
) -> None:
    moments = ("before", "between", "after")
    report = scene.index(dies=moments)
    assert all((scene.signs / f"died-{moment}").exists() for moment in moments)
    check_report(report)
    scene.check(reference)


@pytest.mark.parametrize("scene", ["postgres"], indirect=True)
def test_a_worker_and_then_a_machine_are_killed_and_one_is_added(
    machines: Machines, scene: Scene, reference: State
) -> None:
    scene.hold()
    killed: list[int] = []

    def disturb(status: RunStatus) -> None:
        begun = scene.begun()
        if not killed and begun:
            killed.append(begun[0][1])
            os.kill(killed[0], signal.SIGKILL)
        elif len(killed) == 1 and len({process for _, process in begun}) > 2:
            killed.append(0)
            machines.kill_one()
            machines.add()
            scene.go()

    report = scene.index(on_status=disturb)
    assert len(killed) == 2
    check_report(report)
    scene.check(reference)


@pytest.mark.parametrize("scene", ["s3"], indirect=True)
def test_a_storage_server_is_killed_and_the_library_is_whole(
    machines: Machines, scene: Scene, reference: State, seaweedfs: SeaweedFS
) -> None:
    """The bucket keeps two copies of everything; one of them goes while workers write."""
    scene.hold()
    killed: list[str] = []

    def disturb(status: RunStatus) -> None:
        if not killed and scene.begun():
            killed.append(seaweedfs.volume_with_most())
            kill_hard(seaweedfs.processes[killed[0]])
            scene.go()

    report = scene.index(on_status=disturb)
    assert killed
    check_report(report)
    scene.check(reference)


def test_the_driver_is_killed_and_the_cluster_goes_on(
    machines: Machines, scene: Scene, reference: State
) -> None:
    scene.hold()
    arguments = [machines.address, scene.uri, scene.place / "tree", scene.signs, LEASE_S]
    driver = subprocess.Popen([sys.executable, str(DRIVER), *map(str, arguments)])
    wait_until(lambda: bool(scene.begun()), "a shard that is begun")
    driver.kill()
    driver.wait(HANG_S)
    scene.go()

    def is_finished() -> bool:
        time.sleep(1.0)
        status = scene.status()
        return status is not None and status.run.state == "finished"

    wait_until(is_finished, "the end of the run")
    scene.check(reference)
    again = scene.index()
    assert (again.new, again.unchanged) == (0, NUM_VIDEOS)


def test_stopped_it_says_so_and_the_same_command_goes_on(
    machines: Machines, scene: Scene, reference: State
) -> None:
    scene.hold()
    stop = threading.Event()

    def look(status: RunStatus) -> None:
        if scene.begun() and not stop.is_set():
            stop.set()
            scene.go()

    report = scene.index(on_status=look, is_interrupted=stop.is_set)
    assert report.interrupted
    status = scene.status()
    assert status is not None
    assert status.run.state == "stopping"
    report = scene.index()
    check_report(report)
    scene.check(reference)


def test_the_commands_say_what_they_do(machines: Machines, scene: Scene, reference: State) -> None:
    tree, library = scene.place / "tree", ["--library", scene.uri]
    assert run_gare("index", "--status", *library).stdout == "no run on a cluster so far\n"
    done = run_gare("index", tree, *library, "--ray", machines.address, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["new"] == NUM_VIDEOS
    scene.check(reference)
    status = json.loads(run_gare("index", "--status", "--json", *library).stdout)
    assert (status["state"], status["num_done"], status["num_failed"]) == ("finished", NUM_VIDEOS + 1, 1)
    assert run_gare("index", "--status", *library).stdout.startswith(
        "finished: 11 of 11 files, 1 of 1 shards"
    )
    assert run_gare("index", "--stop", *library).stdout == "no run is under way\n"


def test_words_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    arguments = ["index", tmp_path, "--library", tmp_path / "library", "--ray", "local"]
    for more, message in {
        ("--watch", "3"): "does not go with --ray",
        ("--on-interrupt", "perhaps"): "is stop or detach",
        ("--on-interrupt", "detach"): "ends with this command",
    }.items():
        refused = run_gare(*arguments, *more)
        assert refused.returncode in (1, 2)
        assert message in refused.stderr
