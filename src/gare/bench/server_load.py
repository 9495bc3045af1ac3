"""Real servers in processes of their own, and clients that each ask again as soon as they are answered."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from urllib.parse import quote_plus, urlsplit

import numpy as np

from gare.errors import ServeError
from gare.library.search.stage1 import AUDIT_SENTENCES

_START_S = 120.0
_BUSY = (429, 503)
_GONE = 0  # no answer at all, instead of a status
_numbers = count()


@dataclass(frozen=True)
class LoadStep:
    """What a number of clients measured at once."""

    clients: int
    searches_per_second: float
    p50_ms: float
    p95_ms: float
    num_busy: int
    """Answers 429 and 503 that a client was left with: not now, come back."""
    num_errors: int
    """Searches that failed otherwise."""
    num_answers: int = 0
    num_retried: int = 0
    """Times that a search was asked again, of the next server."""
    longest_ms: float = 0.0


@dataclass
class Seen:
    """What clients have seen so far, over several turns."""

    seconds: float = 0.0
    times_ms: list[float] = field(default_factory=list)
    num_busy: int = 0
    num_errors: int = 0
    num_retried: int = 0

    def as_step(self, clients: int) -> LoadStep:
        """The same in numbers."""
        times_ms = self.times_ms or [float("nan")]
        p50, p95, longest = np.percentile(times_ms, [50, 95, 100]).tolist()
        num_answers = len(self.times_ms)
        return LoadStep(
            clients,
            num_answers / self.seconds,
            p50,
            p95,
            self.num_busy,
            self.num_errors,
            num_answers,
            self.num_retried,
            longest,
        )


def make_question(number: int, turn: int) -> str:
    """A sentence. No two are the same, so that none is remembered."""
    return f"{AUDIT_SENTENCES[(31 * number + turn) % len(AUDIT_SENTENCES)]} {next(_numbers)}"


# --- servers ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerProcess:
    """A server, by its address and its process."""

    url: str
    process: subprocess.Popen[str]

    def peak_memory_gb(self) -> float:
        """The peak memory of the server; not known where there is no /proc."""
        try:
            status = Path(f"/proc/{self.process.pid}/status").read_text()
        except OSError:
            return float("nan")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e9


@contextmanager
def started_server(library: Path | str, model: Path, batch: int, *options: str) -> Iterator[ServerProcess]:
    """`gare serve` in a process of its own, ready to search."""
    command = [sys.executable, "-m", "gare", "serve", "--library", str(library), "--model", str(model)]
    command += ["--port", "0", "--batch", str(batch), "--json", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise ServeError(f"the server did not start; try: {' '.join(command)}")
        url = json.loads(line)["url"]
        _wait_until_ready(url)
        yield ServerProcess(url, process)
    finally:
        process.terminate()
        process.wait(30)


def _wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/api/v1/ready", timeout=10):
                return
        except urllib.error.HTTPError:
            if time.monotonic() > deadline:
                raise ServeError(f"the server was not ready after {_START_S:g} s") from None
            time.sleep(0.1)


# --- clients ------------------------------------------------------------------------------------------


def search_path(number: int, turn: int) -> str:
    """Where a client asks for a search."""
    return f"/api/v1/search?limit=10&q={quote_plus(make_question(number, turn))}"


async def load(
    urls: Sequence[str],
    clients: int,
    seconds: float,
    seen: Seen,
    *,
    tries: int = 1,
    path: Callable[[int, int], str] = search_path,
) -> LoadStep:
    """Ask for so long, each client one server after the other, at least once; what was seen before counts.

    Args:
        tries: of how many servers a search is asked, until one answers it.
        path: what a client asks for, by its number and turn.
    """
    started = time.perf_counter()
    until = started + seconds
    await asyncio.gather(*(_client(urls, number, until, seen, tries, path) for number in range(clients)))
    seen.seconds += time.perf_counter() - started
    return seen.as_step(clients)


async def _client(
    urls: Sequence[str],
    number: int,
    until: float,
    seen: Seen,
    tries: int,
    path: Callable[[int, int], str],
) -> None:
    """Ask, take the answer, ask again."""
    connections = [_Connection(url) for url in urls]
    next_one = count(number)
    turn, begun = 0, time.perf_counter()
    while turn == 0 or begun < until:
        wanted = path(number, turn)
        for attempt in range(tries):
            seen.num_retried += attempt > 0
            status, retry_after = await connections[next(next_one) % len(urls)].ask(wanted)
            if status != _GONE and status not in _BUSY:
                break
        if status == 200:
            seen.times_ms.append(1000 * (time.perf_counter() - begun))
        else:
            seen.num_busy += status in _BUSY
            seen.num_errors += status not in _BUSY
            await asyncio.sleep(retry_after or 0.1)
        turn, begun = turn + 1, time.perf_counter()
    for connection in connections:
        connection.close()


class _Connection:
    """One client at one server. Written here because every library costs more than our server."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, path: str) -> tuple[int, float]:
        """The status of the answer, and in how many seconds to come back."""
        try:
            if self._streams is None:
                self._streams = await asyncio.open_connection(self._address.hostname, self._address.port)
            reader, writer = self._streams
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {self._address.netloc}\r\n\r\n".encode())
            status, retry_after, is_last = await _answer(reader)
        except (OSError, asyncio.IncompleteReadError):
            status, retry_after, is_last = _GONE, 0.0, True
        if status != 200 or is_last:
            self.close()
        return status, retry_after

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
        self._streams = None


async def _answer(reader: asyncio.StreamReader) -> tuple[int, float, bool]:
    """The status, in how many seconds to come back, and whether the server ends the connection."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    await reader.readexactly(int(headers["content-length"]))
    is_last = headers.get("connection", "").lower() == "close"
    return int(first.split()[1]), float(headers.get("retry-after", 0)), is_last
