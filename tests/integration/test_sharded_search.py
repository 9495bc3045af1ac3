"""Exact search over shards on a real Ray: the list and the proof of one process; lost shards are named."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest

from gare.bench.search_bench import encoded_vector
from gare.bench.synthetic_library import make_library
from gare.bench.synthetic_vectors import clustered_vectors, synthetic_model
from gare.cluster.card_shard import IdRange
from gare.cluster.ray_link import connected
from gare.cluster.sharded_search import sharded
from gare.errors import ClusterError
from gare.library.library import Library
from gare.library.search.search_request import SearchRequest
from servers import HANG_S, wait_until

DIM, FRAMES, ITEMS, SHARDS = 16, 4, 700, 2


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("sharded") / "library"
    make_library(place, make_model(), ITEMS, lambda line: None)
    return place


@pytest.fixture(scope="module")
def library(place):
    """In this process."""
    with Library.open(place, model=make_model(), read_only=True) as opened:
        yield opened


@pytest.fixture(scope="module")
def shards(place):
    """The same library on a Ray of our own."""
    with (
        connected("local", user="a test", num_cpus=SHARDS),
        Library.open(place, model=make_model(), read_only=True) as opened,
        sharded(opened, SHARDS, seconds=HANG_S),
    ):
        yield opened


def make_model():
    return synthetic_model(DIM, FRAMES, scale=3.0)


def queries(count: int) -> list:
    return [encoded_vector(vector) for vector in clustered_vectors(np.random.default_rng(1), count, DIM)]


def find(library: Library, query, **settings):
    request = SearchRequest(words="a vector instead of words", exact=True, **settings)
    searcher = library.searcher
    return searcher.show([searcher.find(request, query=query)])[0]


def listed(hits) -> list[tuple[str, float]]:
    return [(hit.id, hit.score) for hit in hits]


def test_every_id_is_in_one_range():
    ids = [f"{number:020x}" for number in (0, 1, 16**20 // 3, 16**20 // 2, 16**20 - 1)] + ["zebra"]
    for count in (1, 2, 3, 7):
        ranges = IdRange.split(count)
        assert all(one.last == other.first for one, other in pairwise(ranges))
        for item in ids:
            assert sum(part.first <= item and (not part.last or item < part.last) for part in ranges) == 1


def test_lists_and_proofs_are_those_of_one_process(library, shards):
    filters = [None, "folder:0000", "name:7"]
    some_were_left_out = False
    for number, query in enumerate(queries(25)):
        one = find(library, query, top=7, where=filters[number % 3])
        many = find(shards, query, top=7, where=filters[number % 3])
        assert listed(one) == listed(many)
        assert not many.partial
        assert many.certificate is not None
        assert many.certificate.num_items == one.certificate.num_items
        if many.certificate.next_bound is not None:
            some_were_left_out = True
            assert many.certificate.next_bound <= many.certificate.last_score + 1e-9
    assert some_were_left_out


def test_a_shard_that_hangs_is_named_and_not_waited_for(library, shards, tmp_path):
    query, whole = queries(1)[0], find(library, queries(1)[0], top=50)
    assert listed(find(shards, query, top=50)) == listed(whole)
    search, may_go_on = shards.searcher.proven, tmp_path / "go-on"
    stuck = search.shards[0]

    def hang(_):
        while not may_go_on.exists():
            time.sleep(0.1)

    held = [stuck.actor.__ray_call__.remote(hang) for _ in "ab"]  # both of its threads
    search.seconds = 2.5
    hits = _search_until(shards, query, lambda hits: str(stuck.ids) in hits.missing)
    assert hits.certificate is None
    search.seconds = HANG_S  # whoever waited for the lost one would wait for ever
    hits = _search_until(shards, query, lambda hits: hits.missing == (str(stuck.ids),))
    kept = [pair for pair in listed(whole) if pair[0] >= stuck.ids.last]
    assert kept
    assert listed(hits)[: len(kept)] == kept
    may_go_on.touch()
    hits = _search_until(shards, query, lambda hits: not hits.partial)
    assert listed(hits) == listed(whole)
    del held


def test_a_shard_that_is_killed_comes_back(library, shards):
    import ray

    query, whole = queries(1)[0], find(library, queries(1)[0], top=50)
    lost = shards.searcher.proven.shards[1]
    ray.kill(lost.actor, no_restart=False)
    hits = _search_until(shards, query, lambda hits: hits.partial)
    assert hits.missing == (str(lost.ids),)
    hits = _search_until(shards, query, lambda hits: not hits.partial)
    assert listed(hits) == listed(whole)
    assert hits.certificate is not None


def test_numbers_that_cannot_be_are_refused(library, shards):
    for num_shards, seconds in ((0, 20.0), (2, 1.0)):
        refused = sharded(library, num_shards, seconds=seconds)
        with pytest.raises(ClusterError, match="at least one shard"), refused:
            pass


def _search_until(library, query, is_reached):
    found = []

    def search() -> bool:
        found[:] = [find(library, query, top=50)]
        return is_reached(found[0])

    wait_until(search, "shards")
    return found[0]
