"""A real server under load: more and more clients, and what batching gains."""

from __future__ import annotations

import asyncio
import os
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from gare.bench.server_load import LoadStep, Seen, load, started_server
from gare.bench.synthetic_library import Say, make_library
from gare.bench.synthetic_vectors import synthetic_model

_TURNS = 4


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
            stack.enter_context(started_server(place, scratch / "model", size)) for size in (batch, 1)
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


async def _climb(
    url: str, unbatched_url: str, clients: int, seconds: float, say: Say
) -> tuple[list[LoadStep], LoadStep]:
    for address in (url, unbatched_url):
        await load([address], clients, min(5.0, seconds), Seen())  # warm
    steps = []
    for number in [number for number in (1, 2, 4, 8, 16, 32) if number < clients]:
        say(f"{number} clients")
        steps.append(await load([url], number, seconds / 6, Seen()))
    seen, seen_unbatched = Seen(), Seen()
    for turn in range(_TURNS):  # in turns, so that a machine that slows down is as slow for both
        say(f"{clients} clients, together and each by itself ({turn + 1} of {_TURNS})")
        most = await load([url], clients, seconds / _TURNS, seen)
        unbatched = await load([unbatched_url], clients, seconds / _TURNS, seen_unbatched)
    return [*steps, most], unbatched
