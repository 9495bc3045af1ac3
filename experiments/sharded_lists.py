"""Exact search on shards beside one process: are the lists the same, and what is said when a shard is gone?

    python experiments/sharded_lists.py [QUERIES]        default: 1,000

A synthetic library of 3,000 items (D = 64, six frames, weights three times as large), two shards on a Ray of
our own. Both ways answer every query, in turns. Then a shard is killed, and one query is asked until it
is back. Times are those of this machine at this moment; how many lists are the same does not depend on it.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gare.bench.search_bench import encoded_vector
from gare.bench.synthetic_library import make_library
from gare.bench.synthetic_vectors import clustered_vectors, synthetic_model
from gare.cluster.ray_link import connected
from gare.cluster.sharded_search import sharded
from gare.library.library import Library
from gare.library.search.query_vectors import EncodedQuery
from gare.library.search.search_request import SearchRequest

ITEMS, DIM, FRAMES, SHARDS, TOP = 3_000, 64, 6, 2, 10
LONGEST_S = 300.0


def main(num_queries: int) -> None:
    """Print how many lists are the same, how many are proven, and what a lost shard does."""
    model = synthetic_model(DIM, FRAMES, scale=3.0)
    vectors = clustered_vectors(np.random.default_rng(1), num_queries, DIM)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "library"
        make_library(place, model, ITEMS, lambda line: None)
        with (
            Library.open(place, model=model, read_only=True) as one,
            connected("local", user="this measurement", num_cpus=SHARDS),
            Library.open(place, model=model, read_only=True) as many,
            sharded(many, SHARDS, seconds=LONGEST_S),
        ):
            compare(one, many, [encoded_vector(vector) for vector in vectors])
            lose_one(one, many, encoded_vector(vectors[0]))


def compare(one: Library, many: Library, queries: Sequence[EncodedQuery]) -> None:
    """Both lists of every query."""
    ask_until(many, queries[0], lambda hits: not hits.partial)  # cards are made at first
    num_same = num_proven = 0
    times: dict[Library, list[float]] = {one: [], many: []}
    for query in queries:
        lists = []
        for library in (one, many):
            started = time.perf_counter()
            hits = ask(library, query)
            times[library].append(1e3 * (time.perf_counter() - started))
            lists.append([(hit.id, hit.score) for hit in hits])
        num_same += lists[0] == lists[1]
        num_proven += hits.certificate is not None and not hits.partial
    print(f"{num_same:,} of {len(queries):,} lists are the same, {num_proven:,} are proven")
    print(
        f"median ms: one process {statistics.median(times[one]):.0f}, {SHARDS} shards "
        f"{statistics.median(times[many]):.0f}"
    )


def lose_one(one: Library, many: Library, query: EncodedQuery) -> None:
    """Kill a shard, and ask until it is back."""
    import ray

    lost = many.searcher.proven.shards[1]
    ray.kill(lost.actor, no_restart=False)
    hits = ask_until(many, query, lambda hits: hits.partial)
    print(
        f"a shard is killed: partial {hits.partial}, missing {', '.join(hits.missing)}, "
        f"certificate {hits.certificate}"
    )
    started = time.monotonic()
    hits = ask_until(many, query, lambda hits: not hits.partial)
    same = [(hit.id, hit.score) for hit in hits] == [(hit.id, hit.score) for hit in ask(one, query)]
    print(f"it is back after {time.monotonic() - started:.0f} s; the list is the same: {same}")


def ask(library: Library, query: EncodedQuery) -> Any:
    """The hits of an exact search."""
    request = SearchRequest(words="a vector instead of words", exact=True, top=TOP)
    return library.searcher.show([library.searcher.find(request, query=query)])[0]


def ask_until(library: Library, query: EncodedQuery, is_reached: Callable[[Any], bool]) -> Any:
    """Ask until the hits are as wanted."""
    deadline = time.monotonic() + LONGEST_S
    while not is_reached(hits := ask(library, query)):
        if time.monotonic() > deadline:
            raise TimeoutError("the shards did not come")
        time.sleep(0.1)
    return hits


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000)
