"""A real server under load: more and more clients, each asking again as soon as it is answered."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from urllib.parse import quote_plus, urlsplit

import numpy as np

from gare.bench.synthetic_library import Say, make_library
from gare.bench.synthetic_vectors import synthetic_model
from gare.errors import ServeError
from gare.library.search.stage1 import AUDIT_SENTENCES

_START_S = 120.0
_BUSY = (429, 503)
_TURNS = 4
_numbers = count()


@dataclass(frozen=True)
class LoadStep:
    """What a number of clients measured at once."""

    clients: int
    searches_per_second: float
    p50_ms: float
    p95_ms: float
    num_busy: int
    """Answers 429 and 503: not now, come back."""
    num_errors: int


@dataclass(frozen=True)
class ServeBenchmark:
    """What the load on a server showed."""

    num_items: int
    steps: tuple[LoadStep, ...]
    """The load steps with batching, by number of clients."""
    unbatched: LoadStep
    """The load of the last step with every search answered by itself."""
    batching_gain: float
    saturation: float
    """Clients that keep it busy if none ever waits: best throughput times the time of one client's search."""
    p95_over_single: float
    """The slowest p95 up to there (the next number that was tried), over that of one client."""
    peak_memory_gb: float
    """The peak memory of the server."""

    @property
    def constants(self) -> dict[str, float]:
        """What `gare plan` uses of it."""
        best = max(step.searches_per_second for step in self.steps)
        return {"replica_searches": best, "replica_cores": os.cpu_count() or 1}


def benchmark_serve(
    *,
    num_items: int,
    dim: int,
    frames: int,
    clients: int,
    seconds: float,
    batch: int,
    folder: Path | None,
    say: Say,
) -> ServeBenchmark:
    """Serve a synthetic library (or the one in `folder`) and ask it; `seconds` for the most clients."""
    model = synthetic_model(dim, frames)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        place = folder or scratch / "library"
        make_library(place, model, num_items, say)
        model.save_pretrained(scratch / "model")
        batching, single = (
            stack.enter_context(_server(place, scratch / "model", size)) for size in (batch, 1)
        )
        steps, unbatched = asyncio.run(_climb(batching.url, single.url, clients, seconds, say))
        memory_gb = batching.peak_memory_gb()
    best = max(step.searches_per_second for step in steps)
    saturation = best * steps[0].p50_ms / 1000
    reached = next((step.clients for step in steps if step.clients >= saturation), clients)
    slowest = max(step.p95_ms for step in steps if step.clients <= reached)
    return ServeBenchmark(
        num_items=num_items,
        steps=tuple(steps),
        unbatched=unbatched,
        batching_gain=steps[-1].searches_per_second / unbatched.searches_per_second,
        saturation=saturation,
        p95_over_single=slowest / steps[0].p95_ms,
        peak_memory_gb=memory_gb,
    )


@dataclass(frozen=True)
class ReplicaBenchmark:
    """One server beside several on the same library, in turns, under the same clients."""

    num_items: int
    num_replicas: int
    single: LoadStep
    replicas: LoadStep


def benchmark_replicas(
    address: str,
    *,
    num_items: int,
    dim: int,
    frames: int,
    num_replicas: int,
    clients: int,
    seconds: float,
    batch: int,
    say: Say,
) -> ReplicaBenchmark:
    """Serve the library at an address by one server, and by several: clients are spread over them.

    The synthetic items are made where the address has fewer of them.
    """
    model = synthetic_model(dim, frames)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make_library(address, model, num_items, say)
        model.save_pretrained(scratch / "model")
        servers = [
            stack.enter_context(_server(address, scratch / "model", batch, "--replica", "--drain", "0"))
            for _ in range(num_replicas)
        ]
        urls = [server.url for server in servers]
        single, replicas = asyncio.run(_take_turns(urls, clients, seconds, say))
    return ReplicaBenchmark(num_items, num_replicas, single, replicas)


async def _take_turns(
    urls: Sequence[str], clients: int, seconds: float, say: Say
) -> tuple[LoadStep, LoadStep]:
    for url in urls:
        await _load([url], clients, min(5.0, seconds), _Seen())  # warm
    seen, seen_alone = _Seen(), _Seen()
    for turn in range(_TURNS):
        say(f"{clients} clients, one server and {len(urls)} ({turn + 1} of {_TURNS})")
        alone = await _load(urls[:1], clients, seconds / _TURNS, seen_alone)
        together = await _load(urls, clients, seconds / _TURNS, seen)
    return alone, together


async def _climb(
    url: str, unbatched_url: str, clients: int, seconds: float, say: Say
) -> tuple[list[LoadStep], LoadStep]:
    for address in (url, unbatched_url):
        await _load([address], clients, min(5.0, seconds), _Seen())  # warm
    steps = []
    for number in [number for number in (1, 2, 4, 8, 16, 32) if number < clients]:
        say(f"{number} clients")
        steps.append(await _load([url], number, seconds / 6, _Seen()))
    seen, seen_unbatched = _Seen(), _Seen()
    for turn in range(_TURNS):  # in turns, so that a machine that slows down is as slow for both
        say(f"{clients} clients, together and each by itself ({turn + 1} of {_TURNS})")
        most = await _load([url], clients, seconds / _TURNS, seen)
        unbatched = await _load([unbatched_url], clients, seconds / _TURNS, seen_unbatched)
    return [*steps, most], unbatched


@dataclass(frozen=True)
class _Server:
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
def _server(library: Path | str, model: Path, batch: int, *options: str) -> Iterator[_Server]:
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
        yield _Server(url, process)
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


@dataclass
class _Seen:
    seconds: float = 0.0
    times_ms: list[float] = field(default_factory=list)
    num_busy: int = 0
    num_errors: int = 0


async def _load(urls: Sequence[str], clients: int, seconds: float, seen: _Seen) -> LoadStep:
    """Ask for so long, each client its own server; what was seen before counts, too."""
    started = time.perf_counter()
    await asyncio.gather(
        *(_client(urls[number % len(urls)], number, started + seconds, seen) for number in range(clients))
    )
    seen.seconds += time.perf_counter() - started
    p50, p95 = np.percentile(seen.times_ms or [float("nan")], [50, 95]).tolist()
    rate = len(seen.times_ms) / seen.seconds
    return LoadStep(clients, rate, p50, p95, seen.num_busy, seen.num_errors)


async def _client(url: str, number: int, until: float, seen: _Seen) -> None:
    """Ask, take the answer, ask again. No two questions are the same, so none is remembered."""
    address = urlsplit(url)
    reader = writer = None
    for turn in count():
        begun = time.perf_counter()
        if begun >= until:
            break
        try:
            if writer is None:
                reader, writer = await asyncio.open_connection(address.hostname, address.port)
            assert reader is not None
            sentence = AUDIT_SENTENCES[(31 * number + turn) % len(AUDIT_SENTENCES)]
            words = quote_plus(f"{sentence} {next(_numbers)}")
            request = f"GET /api/v1/search?limit=10&q={words} HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n"
            writer.write(request.encode())
            status, retry_after = await _answer(reader)
        except (OSError, asyncio.IncompleteReadError):
            status, retry_after = 0, 0.0
        if status == 200:
            seen.times_ms.append(1000 * (time.perf_counter() - begun))
            continue
        seen.num_busy += status in _BUSY
        seen.num_errors += status not in _BUSY
        if writer is not None:
            writer.close()
        reader = writer = None
        await asyncio.sleep(retry_after or 0.1)
    if writer is not None:
        writer.close()


async def _answer(reader: asyncio.StreamReader) -> tuple[int, float]:
    """Status, and when to come back. Written here because every library costs more than our server."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    await reader.readexactly(int(headers["content-length"]))
    return int(first.split()[1]), float(headers.get("retry-after", 0))
