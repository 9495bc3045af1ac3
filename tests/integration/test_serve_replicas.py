"""Several servers of one library on object storage: each only searches, and any of them may go."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from itertools import count

import pytest

from gare.library.library import Library
from serve_library import make_videos, save_tiny_model
from serve_process import ServeProcess
from servers import HANG_S, SeaweedFS, server_folder, wait_until
from warm import run_gare

TRY_AGAIN = (429, 502, 503)


@pytest.fixture(scope="module")
def storage():
    with server_folder() as folder:
        seaweed = SeaweedFS(folder, num_volumes=1, copies=1)
        try:
            yield seaweed
        finally:
            seaweed.stop()


@pytest.fixture(scope="module")
def shared(storage, tmp_path_factory):
    """An address on the storage that holds a small library, with the environment that opens it."""
    folder = tmp_path_factory.mktemp("replicas")
    model = save_tiny_model(folder / "model")
    videos = make_videos(folder / "videos")
    address = "s3://gare/replicas"
    before = {name: os.environ.get(name) for name in storage.environment}
    os.environ.update(storage.environment)
    try:
        with Library.open(address, model=model) as library:
            library.index(videos / "warm")
        yield address, videos, folder
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def start(shared, *, drain: float = 0) -> ServeProcess:
    address, _, folder = shared
    return ServeProcess(address, "--replica", "--drain", f"{drain:g}", log_folder=folder)


class Client(threading.Thread):
    """Asks one replica after the other; what fails is asked again elsewhere, as a load balancer does."""

    def __init__(self, urls: list[str], number: int) -> None:
        super().__init__()
        self.urls, self.number = urls, number
        self.num_answers = self.num_failed = self.num_retried = 0
        self.ending = threading.Event()

    def run(self) -> None:
        for turn in count():
            if self.ending.is_set():
                return
            if self._ask(f"/api/v1/search?q=a+red+thing+{self.number}+{turn}"):
                self.num_answers += 1
            else:
                self.num_failed += 1

    def _ask(self, path: str) -> bool:
        deadline = time.monotonic() + HANG_S  # a busy machine may ask to come back more than once
        attempt = 0
        while attempt < 2 * len(self.urls) or time.monotonic() < deadline:
            attempt += 1
            url = self.urls[(self.number + self.num_answers + attempt) % len(self.urls)]
            try:
                with urllib.request.urlopen(url + path, timeout=HANG_S) as answer:
                    assert len(json.load(answer)["hits"]) == 5
                    return True
            except urllib.error.HTTPError as error:
                if error.code not in TRY_AGAIN:
                    return False
            except OSError:
                pass
            self.num_retried += 1
        return False


def test_one_of_three_is_killed_under_load_and_no_request_fails(shared):
    with start(shared) as first, start(shared) as second, start(shared) as third:
        clients = [Client([first.url, second.url, third.url], number) for number in range(3)]
        for client in clients:
            client.start()
        wait_until(lambda: all(client.num_answers > 5 for client in clients), "the first answers")
        third.kill()
        before = [client.num_answers for client in clients]
        wait_until(
            lambda: all(client.num_answers > 6 + seen for client, seen in zip(clients, before, strict=True)),
            "answers after the kill",
        )
        for client in clients:
            client.ending.set()
        for client in clients:
            client.join(HANG_S)
        assert [client.num_failed for client in clients] == [0, 0, 0]
        assert sum(client.num_retried for client in clients) > 0  # the dead one was asked


def test_a_replica_sees_what_another_process_wrote_and_writes_nothing_itself(shared):
    address, videos, _ = shared
    with start(shared) as replica:
        assert replica.get("/api/v1/info").json()["num_items"] == 5
        refused = replica.post("/api/v1/jobs", {"kind": "index"})
        assert (refused.status, refused.json()["error"]["code"]) == (409, "replica")
        item = replica.get("/api/v1/search?q=red").json()["hits"][0]["id"]
        assert replica.ask("DELETE", f"/api/v1/items/{item}").status == 409
        assert run_gare("index", str(videos / "cold"), "--library", address).returncode == 0
        wait_until(lambda: replica.get("/api/v1/info").json()["num_items"] == 10, "what was indexed")
        paths = [hit["path"] for hit in replica.get("/api/v1/search?q=blue&limit=10").json()["hits"]]
        assert any("cold" in path for path in paths)
        with start(shared) as another:  # a new one has all of it, in the same order
            assert paths == [
                hit["path"] for hit in another.get("/api/v1/search?q=blue&limit=10").json()["hits"]
            ]


def test_sigterm_first_fails_readiness_while_requests_are_still_answered(shared):
    with start(shared, drain=HANG_S) as replica:
        slow = _Slow(replica.port)  # its request is half sent when the signal comes
        replica.process.send_signal(signal.SIGTERM)
        wait_until(lambda: replica.get("/api/v1/ready").status == 503, "readiness to fail")
        assert slow.finish().startswith(b"HTTP/1.1 200")  # soon: who says nothing for long is cut off
        assert replica.get("/api/v1/ready").json()["status"] == "draining"
        assert replica.get("/api/v1/health").status == 200
        numbers = replica.get("/metrics").content.decode()
        assert "gare_ready 0.0" in numbers
        assert "gare_draining 1.0" in numbers
        answer = replica.get("/api/v1/search?q=red")  # who asks all the same is answered
        assert answer.status == 200
        assert answer.headers["connection"] == "close"
        replica.process.send_signal(signal.SIGTERM)  # the second one ends it at once
        assert replica.process.wait(HANG_S / 2) == 0


def test_it_ends_by_itself_when_it_has_drained(shared):
    with start(shared, drain=0.5) as replica:
        assert replica.interrupt() == 0


class _Slow:
    """A request whose header ends late."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=HANG_S)
        self._socket.sendall(b"GET /api/v1/search?q=red HTTP/1.1\r\nHost: 127.0.0.1\r\n")

    def finish(self) -> bytes:
        self._socket.sendall(b"Connection: close\r\n\r\n")
        with self._socket:
            return b"".join(iter(lambda: self._socket.recv(65536), b""))
