"""One Ray on this machine: it connects, says what it has, and gives up waiting instead of hanging."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from gare.cluster.ray_link import alive_nodes, connected, end_actor, find_actor, get, unfit_nodes
from gare.errors import ClusterError, SlowClusterError
from gare.version import __version__
from ray_machines import DoomedMachines
from servers import HANG_S, free_port

RAY_GIVES_UP_S = 360.0
"""How long Ray itself tries a cluster that wants another token."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with connected("local", user="a test", num_cpus=1):
        yield


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    """The address of a cluster that wants a token."""
    machines = DoomedMachines(1, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="a" * 32)
    yield machines.address
    machines.kill()


def make_actor(name: str):
    import ray

    @ray.remote(num_cpus=0, max_restarts=0)
    class Speaker:
        def say(self, word: str) -> str:
            return word

        def sleep(self) -> None:
            time.sleep(600)

        def die(self) -> None:
            os._exit(1)

        def fail(self) -> None:
            raise ValueError("it is wrong")

    return Speaker.options(name=name).remote()


def test_no_cluster_is_an_error_that_says_so():
    import ray

    if ray.is_initialized():
        pytest.fail("the tests of this file come first")
    with (
        pytest.raises(ClusterError, match=r"no Ray cluster at 127\.0\.0\.1:1:.*--ray local"),
        connected("127.0.0.1:1", user="a test"),
    ):
        pass


def test_whoever_listens_and_is_no_ray_is_an_error_within_seconds(monkeypatch):
    monkeypatch.setattr("gare.cluster.ray_link._HEAD_S", 1.0)
    with socket.create_server(("127.0.0.1", free_port())) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with (
            pytest.raises(ClusterError, match=f"no Ray cluster at {address}: something listens there"),
            connected(address, user="a test"),
        ):
            pass


@pytest.mark.parametrize("token", [None, "b" * 32])
def test_a_cluster_that_wants_a_token_says_how_to_give_it_before_ray_would_give_up(guarded, tmp_path, token):
    variables = dict(os.environ)
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        variables.pop(name, None)
    variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} if token else {}
    command = [sys.executable, "-m", "gare", "index", str(tmp_path), "--library", str(tmp_path / "library")]
    done = subprocess.run(
        [*command, "--ray", guarded, "--model", "gare-mini"],
        env=variables, capture_output=True, text=True, timeout=RAY_GIVES_UP_S - 60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "RAY_AUTH_TOKEN" in done.stderr
    assert guarded in done.stderr
    assert "Traceback" not in done.stderr


def test_a_machine_that_is_not_part_of_the_cluster_is_told_the_port_for_others(guarded, monkeypatch):
    """Ray finds no node of this machine then, and says no more than that it cannot connect."""
    import ray

    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a" * 32)
    monkeypatch.setattr(ray, "init", refuse("Failed to connect to Ray cluster."))
    host = guarded.partition(":")[0]
    with (
        pytest.raises(ClusterError, match=f"cannot join in: Failed to connect .*--ray ray://{host}:10001"),
        connected(guarded, user="a test"),
    ):
        pass


def refuse(words: str, *, times: int = 99):
    """Instead of `ray.init`: an error of the kind that has no name, so many times."""
    left = [Exception(words)] * times

    def init(*arguments: object, **named: object) -> None:
        if left:
            raise left.pop()

    return init


def test_a_ray_of_our_own_that_does_not_start_is_tried_again_and_then_an_error(monkeypatch):
    import ray

    monkeypatch.setattr(ray, "init", refuse("The current node timed out during startup.", times=2))
    with connected("local", user="a test"):
        pass
    monkeypatch.setattr(ray, "init", refuse("The current node timed out during startup."))
    with (
        pytest.raises(ClusterError, match="does not start on this machine: The current node timed out"),
        connected("local", user="a test"),
    ):
        pass


def test_a_ray_of_our_own_leaves_no_token_in_the_users_home(tmp_path):
    variables = {name: text for name, text in os.environ.items() if not name.startswith("RAY_AUTH")}
    program = (
        "from gare.cluster.ray_link import connected\nwith connected('local', user='a test'): print('up')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=variables | {"HOME": str(tmp_path)}, capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.stdout == "up\n", done.stderr
    assert not (tmp_path / ".ray").exists()


def test_a_connection_is_used_again(cluster):
    import ray

    with connected("somewhere:1", user="a test"):
        pass
    assert ray.is_initialized()


def test_the_nodes_say_what_they_have(cluster):
    (node,) = alive_nodes()
    assert (node.num_cpus, node.is_head) == (1, True)


def test_a_machine_with_another_version_is_named(cluster, monkeypatch):
    monkeypatch.setattr("gare.cluster.ray_link._VERSION_S", HANG_S)
    nodes = alive_nodes()
    assert unfit_nodes(nodes) == {}
    monkeypatch.setattr("gare.cluster.ray_link.__version__", "9.9.9")
    assert unfit_nodes(nodes) == {nodes[0].name: f"gare {__version__}"}


def test_answers_come_and_errors_keep_their_kind(cluster):
    actor = make_actor("speaker")
    assert get(actor.say.remote("hello"), "a word", seconds=HANG_S) == "hello"
    assert get([actor.say.remote("a"), actor.say.remote("b")], "two words", seconds=HANG_S) == ["a", "b"]
    with pytest.raises(ValueError, match="it is wrong"):
        get(actor.fail.remote(), "a word", seconds=HANG_S)
    found = find_actor("speaker")
    assert get(found.say.remote("again"), "a word", seconds=HANG_S) == "again"
    end_actor(actor)


def test_a_wait_ends(cluster):
    actor = make_actor("sleeper")
    get(actor.say.remote("up"), "a word", seconds=HANG_S)
    with pytest.raises(SlowClusterError, match=r"a dream did not come within 0\.2 s"):
        get(actor.sleep.remote(), "a dream", seconds=0.2)
    end_actor(actor)


def test_an_actor_that_could_not_be_made_says_why(cluster):
    import ray

    @ray.remote(num_cpus=0, max_restarts=0)
    class Unmade:
        def __init__(self) -> None:
            raise OSError("the disk is full")

        def say(self) -> str:
            return ""

    with pytest.raises(ClusterError, match=r"a word did not come: .*the disk is full"):
        get(Unmade.remote().say.remote(), "a word", seconds=HANG_S)


def test_a_dead_actor_is_an_error(cluster):
    actor = make_actor("mortal")
    with pytest.raises(ClusterError, match="the last word did not come"):
        get(actor.die.remote(), "the last word", seconds=HANG_S)
    assert find_actor("nobody") is None
