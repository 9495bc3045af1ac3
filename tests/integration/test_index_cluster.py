"""Three machines of a Ray cluster index together; whatever is killed, the library is as if nothing had been.

Ray, SeaweedFS and PostgreSQL are real; the machines are Ray nodes on this one.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
import torch

from clips import steady, write_video
from cluster_scene import DRIVER, LEASE_S, NUM_VIDEOS, Scene, check_report
from gare import GARE, GareConfig, Library
from gare.cluster.index_cluster import Supervisor
from gare.cluster.ray_link import NAMESPACE, connected, end_actor, find_actor
from gare.cluster.run_status import RunStatus
from gare.errors import ClusterError
from gare.library.index.object_files import SCRATCH_VARIABLE
from gare.version import __version__
from library_state import State, read_state
from ray_machines import DoomedMachines, Machines
from servers import (
    HANG_S,
    PRIMARY,
    Postgres,
    SeaweedFS,
    address_of_all,
    free_port,
    kill_hard,
    replicated,
    wait_until,
)
from warm import run_gare

# Ray leaves the log of its port for others open.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file .*ray_client_server:ResourceWarning")


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


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the machines put the objects they fetch."""
    return tmp_path_factory.mktemp("scratch")


@pytest.fixture(scope="module")
def client_port() -> int:
    """Where the cluster answers to machines that are not part of it."""
    return free_port()


@pytest.fixture(scope="module")
def machines(seaweedfs: SeaweedFS, scratch: Path, client_port: int) -> Iterator[Machines]:
    """They know the storage, as every machine must that works on a library there."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in seaweedfs.environment.items():
            patch.setenv(name, value)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv(SCRATCH_VARIABLE, str(scratch))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(DRIVER.parent), os.environ.get("PYTHONPATH", "")]))
        machines = Machines(client_port=client_port)
        with connected(machines.address, user="a test"):
            yield machines
        machines.cluster.shutdown()


@pytest.fixture(autouse=True)
def rested(machines: Machines) -> Iterator[None]:
    """What a test leaves at work ends with it: a worker would wait ten minutes for a database that is gone,
    and keep its machine from the next test."""
    from ray.util import list_named_actors

    yield
    while left := [found["name"] for found in list_named_actors(True) if found["namespace"] == NAMESPACE]:
        for name in sorted(left):  # supervisors before workers, which they would start again
            if actor := find_actor(name):
                end_actor(actor)


@pytest.fixture(autouse=True)
def attentive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who watches a run looks ten times a second, so that a test goes on as soon as it can."""
    monkeypatch.setattr("gare.cluster.index_cluster._LOOK_S", 0.1)


@pytest.fixture
def scene(
    request: pytest.FixtureRequest, place: Path, new_library: Callable[[str], str], tmp_path: Path
) -> Scene:
    return Scene(place, new_library(getattr(request, "param", "folder")), tmp_path / "signs")


def test_it_makes_what_one_machine_makes_and_does_nothing_the_second_time(
    machines: Machines, scene: Scene, reference: State
) -> None:
    lines: list[str] = []
    check_report(scene.index(on_status=lambda status: lines.append(status.line())))
    assert f"{NUM_VIDEOS + 1} of {NUM_VIDEOS + 1} files, 6 of 6 shards, 1 failed" in lines[-1]
    scene.check(reference)
    again = scene.index()
    assert (again.new, again.unchanged, again.failed_before) == (0, NUM_VIDEOS, 1)


def test_workers_die_before_a_commit_in_the_middle_of_one_and_after_one(
    machines: Machines, scene: Scene, reference: State
) -> None:
    moments = ("before", "between", "after")
    report = scene.index(dies=moments)
    assert all(scene.has(f"died-{moment}") for moment in moments)
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
    driver = scene.start_driver(machines.address)
    wait_until(lambda: bool(scene.begun()), "a shard that is begun")
    driver.kill()
    driver.wait(HANG_S)
    scene.go()
    wait_until(lambda: _is_finished(scene), "the end of the run")
    scene.check(reference)
    again = scene.index()
    assert (again.new, again.unchanged) == (0, NUM_VIDEOS)


def _is_finished(scene: Scene) -> bool:
    time.sleep(0.2)
    status = scene.status()
    return status is not None and status.run.state == "finished"


@pytest.mark.parametrize("scene", ["s3"], indirect=True)
def test_the_whole_storage_is_gone_for_a_while_and_workers_wait_for_it(
    machines: Machines, scene: Scene, reference: State, seaweedfs: SeaweedFS
) -> None:
    """And one of them dies in the middle of a commit."""
    scene.hold()

    def interrupt() -> None:
        wait_until(lambda: bool(scene.begun()), "a shard that is begun")
        seaweedfs.stop()
        scene.go()
        wait_until(lambda: scene.has("refused"), "a shard that fails")
        seaweedfs.start_again()

    outage = threading.Thread(target=interrupt, daemon=True)
    outage.start()
    report = scene.index(dies=("between",))
    outage.join(HANG_S)
    assert scene.has("refused")
    assert scene.has("died-between")
    check_report(report)
    scene.check(reference)


def test_both_databases_then_the_replica_then_the_primary_are_lost(
    machines: Machines, place: Path, reference: State, tmp_path: Path
) -> None:
    """A commit waits while the replica is away: what one server alone has may still be lost."""
    with replicated(1) as servers:
        primary, replica = servers
        scene = Scene(place, address_of_all(servers), tmp_path / "signs")
        scene.hold()
        first: list[tuple[int, int]] = []

        def interrupt() -> None:
            wait_until(lambda: bool(scene.begun()), "a shard that is begun")
            first.extend(scene.begun())
            for server in (primary, replica):
                kill_hard(server.running)
            scene.go()
            primary.start(**PRIMARY)
            wait_until(lambda: _waits_for_the_replica(primary), "a commit that waits for the replica")
            scene.hold()
            replica.start()
            wait_until(lambda: len(scene.begun()) > len(first) + 2, "shards that are begun then")
            kill_hard(primary.running)
            replica.promote()
            scene.go()

        outage = threading.Thread(target=interrupt, daemon=True)
        outage.start()
        report = scene.index(dies=("between",))
        outage.join(HANG_S)
        assert scene.has("died-between")
        check_report(report)
        scene.check(reference)


def _waits_for_the_replica(primary: Postgres) -> bool:
    with psycopg.connect(primary.uri(), autocommit=True) as connection:
        statement = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        return connection.execute(statement).fetchone() != (0,)


def test_all_of_ray_is_killed_and_the_same_command_on_another_cluster_goes_on(
    machines: Machines, scene: Scene, reference: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "5")  # a command looks for Ray so long
    scene.hold()
    doomed = DoomedMachines(2)
    driver = scene.start_driver(doomed.address)
    wait_until(lambda: len({pid for _, pid in scene.begun()}) >= 2, "both machines at work")
    before = scene.status()
    doomed.kill()
    assert driver.wait(HANG_S) != 0
    scene.go()
    report = scene.index()
    after = scene.status()
    assert before is not None
    assert after is not None
    assert after.run.run_id == before.run.run_id  # it was joined, not planned again
    check_report(report)
    scene.check(reference)


def test_objects_are_fetched_by_every_machine_and_none_is_left_behind(
    machines: Machines, place: Path, tmp_path: Path, seaweedfs: SeaweedFS, scratch: Path
) -> None:
    """A worker that is killed leaves its scratch space to the one that takes its place."""
    source = f"s3://gare/videos-{uuid.uuid4().hex[:8]}"
    for path in (place / "tree").iterdir():
        seaweedfs.put(f"{source}/{path.name.replace(' ', '_')}", path.read_bytes())
    with Library.open(tmp_path / "one", model=place / "model") as library:
        library.index(source)
        reference = read_state(library.store)
    scene = Scene(place, str(tmp_path / "library"), tmp_path / "signs", source)
    scene.hold()

    def look(status: RunStatus) -> None:
        if scene.has("hold") and len({pid for _, pid in scene.begun()}) >= 3:  # every machine has a shard
            scene.go()

    report = scene.index(dies=("fetched",), on_status=look)
    assert (scene.signs / "died-fetched").read_text().startswith("gare-scratch-")
    check_report(report)
    scene.check(reference)
    assert os.listdir(scratch) == []


@pytest.mark.parametrize("by", ["Ctrl-C", "another process"])
def test_stopped_it_says_so_and_the_same_command_goes_on(
    machines: Machines, scene: Scene, reference: State, by: str
) -> None:
    scene.hold()
    stop = threading.Event()

    def look(status: RunStatus) -> None:
        if scene.begun() and not stop.is_set():
            if by == "another process":
                said = run_gare("index", "--stop", "--library", scene.uri).stdout
                assert said.startswith("its workers commit what they have")
            stop.set()
            scene.go()

    report = scene.index(on_status=look, is_interrupted=lambda: by == "Ctrl-C" and stop.is_set())
    assert report.interrupted
    status = scene.status()
    assert status is not None
    assert status.run.state == "stopping"
    report = scene.index()
    check_report(report)
    scene.check(reference)


def test_detached_the_cluster_goes_on_alone(machines: Machines, scene: Scene, reference: State) -> None:
    """At once: what looks after the workers has begun by then, although nobody else would start it."""
    scene.hold()
    report = scene.index(is_interrupted=lambda: True, detach=True)
    assert report.interrupted
    scene.go()
    wait_until(lambda: _is_finished(scene), "the end of the run")
    scene.check(reference)


def test_the_commands_say_what_they_do(machines: Machines, scene: Scene, reference: State) -> None:
    library = ["--library", scene.uri]
    assert run_gare("index", "--status", *library).stdout == "no run on a cluster so far\n"
    done = run_gare("index", scene.source, *library, "--ray", machines.address, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["new"] == NUM_VIDEOS
    scene.check(reference)
    status = json.loads(run_gare("index", "--status", "--json", *library).stdout)
    assert (status["state"], status["num_done"], status["num_failed"]) == ("finished", NUM_VIDEOS + 1, 1)
    assert run_gare("index", "--status", *library).stdout.startswith(
        "finished: 11 of 11 files, 3 of 3 shards"
    )
    assert run_gare("index", "--stop", *library).stdout == "no run is under way\n"


def test_a_command_outside_of_the_cluster_comes_in_by_the_port_for_others(
    machines: Machines, client_port: int, scene: Scene, reference: State
) -> None:
    address = f"ray://127.0.0.1:{client_port}"
    command = ("index", scene.source, "--library", scene.uri, "--ray", address, "--json")
    said: list[str] = []

    def has_come_in() -> bool:
        """Ray gives the process that it starts for each client half a minute."""
        done = run_gare(*command)
        said[:] = [done.stdout]
        is_slow = f"no Ray cluster at {address}" in done.stderr
        assert done.returncode == 0 or is_slow, done.stderr
        return done.returncode == 0

    wait_until(has_come_in, "the port for others")
    assert json.loads(said[0])["new"] == NUM_VIDEOS
    scene.check(reference)


def test_machines_with_another_version_are_named_and_nothing_waits_for_them(
    machines: Machines, scene: Scene, reference: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gare.cluster.ray_link._VERSION_S", HANG_S)
    monkeypatch.setattr("gare.cluster.ray_link.__version__", "9.9.9")
    with pytest.raises(ClusterError, match=rf"needs gare .*: .* has gare {__version__}"):
        scene.index()
    status = scene.status()
    assert status is not None
    assert status.run.state == "stopping"
    assert "needs gare" in status.run.message
    monkeypatch.undo()
    check_report(scene.index())
    scene.check(reference)


def test_a_supervisor_that_cannot_start_is_an_error(
    machines: Machines, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Supervisor):
        def __init__(self, *arguments: object) -> None:
            raise RuntimeError("it is broken")

    monkeypatch.setattr("gare.cluster.index_cluster.Supervisor", Broken)
    monkeypatch.setattr("gare.cluster.index_cluster._TROUBLE_S", 1.0)
    with pytest.raises(ClusterError, match="cannot work on this library: "):
        scene.index(lease_s=1.0)  # for so long, trouble is forgiven; there is no worker to lose its lease


def test_a_supervisor_that_is_slow_to_answer_is_waited_for(
    machines: Machines, scene: Scene, reference: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent(Supervisor):
        def trouble(self) -> str:
            time.sleep(HANG_S)
            return ""

    monkeypatch.setattr("gare.cluster.index_cluster.Supervisor", Silent)
    monkeypatch.setattr("gare.cluster.index_cluster._ANSWER_S", 0.1)
    monkeypatch.setattr("gare.cluster.index_cluster._TROUBLE_S", 1.0)
    scene.hold()

    def look(status: RunStatus) -> None:
        if scene.has("hold") and status.seconds > LEASE_S + 3.0:  # so long, trouble would be forgiven
            scene.go()

    check_report(scene.index(on_status=look))
    scene.check(reference)


def test_a_plan_that_fails_is_told_by_the_status(tmp_path: Path, place: Path) -> None:
    library = ["--library", tmp_path / "library"]
    done = run_gare("index", tmp_path / "nowhere", *library, "--model", place / "model", "--ray", "local")
    assert (done.returncode, "does not exist" in done.stderr) == (1, True), done.stderr
    status = run_gare("index", "--status", *library)
    assert status.stdout.startswith("finished: 0 of 0 files")
    assert "could not be planned" in status.stdout


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


def test_videos_on_object_storage_need_a_library_by_name() -> None:
    refused = run_gare("index", "s3://bucket/videos")
    assert refused.returncode == 2
    assert "--library" in refused.stderr
    assert "s3://bucket/videos" in refused.stderr
