"""One library searched in this process, by one server and by several in turns; then one is killed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from gare.bench.server_load import LoadStep, Seen, ServerProcess, load, make_question, started_server
from gare.bench.synthetic_library import Say, make_library
from gare.bench.synthetic_vectors import synthetic_model
from gare.library.library import Library

_TURNS = 4
_WARM_S = 5.0
_FIRST_TRIES = 100


@dataclass(frozen=True)
class ReplicaBenchmark:
    """One process, one server and several servers beside each other on the same library."""

    num_items: int
    num_replicas: int
    in_process: LoadStep
    """One caller of `Library.search`, without a server."""
    one_client: LoadStep
    """One client of one server."""
    single: LoadStep
    """All clients at one server."""
    replicas: LoadStep
    """All clients, each search at the next server."""
    killed: LoadStep
    """The same, while one server is killed halfway; a search that it did not answer is asked of the next."""
    server_memory_gb: float
    """The peak memory of the largest server."""


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
    """Search the library at an address; `seconds` each way, and as long while a server is killed.

    The synthetic items are made where the address has fewer of them.
    """
    model = synthetic_model(dim, frames)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory()))
        make_library(address, model, num_items, say)
        model.save_pretrained(scratch / "model")
        servers = [
            stack.enter_context(
                started_server(address, scratch / "model", batch, "--replica", "--drain", "0")
            )
            for _ in range(num_replicas)
        ]
        library = stack.enter_context(Library.open(address, model=model, read_only=True))
        steps = asyncio.run(_take_turns(library, servers, clients, seconds, say))
        memory_gb = max(server.peak_memory_gb() for server in servers)
        say(f"{clients} clients, and one of {num_replicas} servers is killed")
        killed = asyncio.run(_kill_one(servers, clients, seconds))
    return ReplicaBenchmark(num_items, num_replicas, *steps, killed, memory_gb)


async def _take_turns(
    library: Library, servers: Sequence[ServerProcess], clients: int, seconds: float, say: Say
) -> tuple[LoadStep, LoadStep, LoadStep, LoadStep]:
    """In turns, so that a machine that slows down is as slow for all."""
    urls = [server.url for server in servers]
    say("the first searches")
    _search_here(library, min(_WARM_S, seconds), Seen())
    for url in urls:  # the first search reads where every row lies, for longer than a request may take
        await load([url], 1, 0.0, Seen(), tries=_FIRST_TRIES)
        await load([url], clients, min(_WARM_S, seconds), Seen())
    here, alone, crowded, spread = Seen(), Seen(), Seen(), Seen()
    for turn in range(_TURNS):
        say(f"{clients} clients, one server and {len(urls)} ({turn + 1} of {_TURNS})")
        _search_here(library, seconds / _TURNS, here)
        await load(urls[:1], 1, seconds / _TURNS, alone)
        await load(urls[:1], clients, seconds / _TURNS, crowded)
        await load(urls, clients, seconds / _TURNS, spread)
    return here.as_step(1), alone.as_step(1), crowded.as_step(clients), spread.as_step(clients)


def _search_here(library: Library, seconds: float, seen: Seen) -> None:
    """One search after the other, by the call that a program would make."""
    started = begun = time.perf_counter()
    turn = 0
    while begun < started + seconds:
        library.search(make_question(0, turn), top=10)
        ended = time.perf_counter()
        seen.times_ms.append(1000 * (ended - begun))
        begun, turn = ended, turn + 1
    seen.seconds += begun - started


async def _kill_one(servers: Sequence[ServerProcess], clients: int, seconds: float) -> LoadStep:
    """The dead server stays in the clients' list, so that each of them meets it again and again."""
    urls, seen = [server.url for server in servers], Seen()

    async def kill() -> None:
        await asyncio.sleep(seconds / 2)
        servers[-1].process.kill()

    tries = 2 * len(urls)
    await asyncio.gather(load(urls, clients, seconds, seen, tries=tries), kill())
    return await load(urls, clients, 0.0, seen, tries=tries)  # once more each, however slow the first were
