"""`gare serve --ray local --shards 2` as a command: exact search over HTTP, also while a shard is lost."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ray_machines import is_alive
from serve_library import Served
from serve_process import ServeProcess
from servers import HANG_S, wait_until
from warm import run_gare

RANGES = ["00000000-80000000", "80000000-"]
EXACT = "/api/v1/search?q=a+red+thing&limit=50&exact=true"


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """Where Ray keeps its files; sockets are among them, whose names must be short."""
    with tempfile.TemporaryDirectory(prefix="gare-") as folder:
        yield Path(folder)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_lost_shard_is_named_and_comes_back_and_the_end_leaves_nothing_behind(
    served: Served, tmp_path: Path, ray_folder: Path, end: signal.Signals
) -> None:
    variables = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "RAY_TMPDIR": str(ray_folder)}
    with ServeProcess(
        served.library, "--ray", "local", "--shards", "2", log_folder=tmp_path, **variables
    ) as server:
        whole = _search_until(server, lambda found: found["certificate"] is not None)
        assert (whole["partial"], whole["missing"]) == (False, [])
        assert whole["certificate"]["num_items"] == server.get("/api/v1/info").json()["num_items"]
        rays = psutil.Process(server.process.pid).children(recursive=True)
        shards = [process for process in rays if _is_shard(process)]
        assert len(shards) == len(RANGES)
        shards[0].kill()
        found = _search_until(server, lambda found: found["partial"])
        assert found["certificate"] is None
        assert len(found["missing"]) == 1
        assert found["missing"][0] in RANGES
        found = _search_until(server, lambda found: not found["partial"])
        assert [hit["id"] for hit in found["hits"]] == [hit["id"] for hit in whole["hits"]]
        assert found["certificate"] is not None
        rays = psutil.Process(server.process.pid).children(recursive=True)
        server.process.send_signal(end)
        server.process.wait(HANG_S)
        wait_until(lambda: not any(map(is_alive, rays)), "the end of Ray")
        wait_until(
            lambda: not any(_is_of(process, ray_folder) for process in psutil.process_iter()),
            "the end of what Ray has started meanwhile",
        )


def test_shards_without_a_cluster_are_refused(served: Served) -> None:
    refused = run_gare("serve", "--library", served.library, "--shards", "2")
    assert refused.returncode == 2
    assert "goes with --ray" in refused.stderr


def _search_until(server: ServeProcess, is_reached: Callable[[Any], bool]) -> Any:
    found: list[Any] = []

    def search() -> bool:
        answer = server.get(EXACT)
        found[:] = [answer.json()]
        if answer.status == 503:  # the machine is busy: it asks to come back
            return False
        assert answer.status == 200, found
        return is_reached(found[0])

    wait_until(search, "the shards")
    return found[0]


def _is_shard(process: psutil.Process) -> bool:
    try:
        return process.name().startswith("ray::CardShard")
    except psutil.NoSuchProcess:  # one of Ray's others has ended meanwhile
        return False


def _is_of(process: psutil.Process, folder: Path) -> bool:
    """Whether a process belongs to the Ray that keeps its files in a folder."""
    try:
        return any(str(folder) in word for word in process.cmdline())
    except psutil.Error:
        return False
