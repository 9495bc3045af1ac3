"""A search in a large synthetic library, stage by stage, beside a plain dual encoder and dense re-scoring.

Shapes: V items, F frames, D embedding.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gare.bench.bench_timing import held_memory, peak_memory_gb
from gare.bench.synthetic_library import Say, make_library
from gare.bench.synthetic_vectors import clustered_vectors, synthetic_model
from gare.interaction.interaction import score_in_blocks
from gare.library.library import Library
from gare.library.search.query_language import Term
from gare.library.search.query_vectors import EncodedQuery
from gare.library.search.search_hit import HIT_COLUMNS
from gare.library.search.search_request import SearchRequest
from gare.library.search.searcher import Searcher
from gare.library.search.stage1 import AUDIT_SENTENCES, stage1_queries
from gare.library.store.stored_frames import unpack_frames
from gare.model import GARE
from gare.types import TextFeatures


@dataclass(frozen=True)
class Spread:
    """Median and 95th percentile."""

    p50: float
    p95: float


@dataclass(frozen=True)
class SearchBenchmark:
    """Milliseconds; `search` is all of it, from words to hits."""

    num_items: int
    dim: int
    frames: int
    candidates: int
    threads: int
    search: Spread
    encode: Spread
    stage1: Spread
    fetch: Spread
    unpack: Spread
    score: Spread
    hits: Spread
    plain_search: Spread
    """A dual encoder: words to hits with stage 1 alone."""
    dense_score: Spread
    """The same candidates, with every increment formed."""
    dense_over_factored: float
    recall: float
    """The share of the candidates of an exact scan that stage 1 finds."""
    open_and_first_ms: float
    peak_memory_gb: float
    num_bytes: int = 0
    """Bytes that the library takes where it is stored."""
    process_memory: int = 0
    """Bytes of memory before the library was opened."""
    search_memory: int = 0
    """Bytes more, once every search was made."""
    hours: int = 0
    """Hours of film with dense frames that were added, for `with_films`."""
    num_with_films: int = 0
    with_films: Spread | None = None
    """`search` with the films beside the items."""
    without_films: Spread | None = None
    """The same without them, in turns: whatever else runs slows both alike."""

    @property
    def constants(self) -> dict[str, float]:
        """What `gare plan` uses of it."""
        found: dict[str, float] = {
            "item_bytes": self.num_bytes / self.num_items - 2 * self.dim * self.frames,
            "search_items": self.num_items,
            "search_ms": self.search.p50,
            "stage1_ms": self.stage1.p50,
            "search_memory": self.search_memory / self.num_items,
            "process_memory": self.process_memory,
        }
        if self.hours:
            found["items_an_hour"] = (self.num_with_films - self.num_items) / self.hours
        return found


def benchmark_search(
    *,
    num_items: int,
    dim: int,
    frames: int,
    candidates: int,
    queries: int,
    folder: Path | None,
    say: Say,
    hours: int = 0,
) -> SearchBenchmark:
    """Build the library (or take the one in `folder`) and search it.

    Args:
        hours: measure it once more with so many hours of film beside the items, in the same run.
    """
    model = synthetic_model(dim, frames)
    with ExitStack() as stack:
        place = folder or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "library"
        make_library(place, model, num_items, say)
        result = _measure_at(place, model, candidates, queries, frames, say)
        if not hours:
            return result
        beside = place.with_name(f"{place.name}-films")  # so that both can be used again
        make_library(beside, model, num_items, say, hours=hours)
        say("searching both in turns")
        with Library.open(place, model=model) as short, Library.open(beside, model=model) as films:
            without, with_films = _measure_in_turns([short, films], candidates, queries)
            return replace(
                result,
                hours=hours,
                with_films=with_films,
                without_films=without,
                num_with_films=len(films),
            )


@torch.no_grad()
def _measure_in_turns(libraries: Sequence[Library], candidates: int, queries: int) -> list[Spread]:
    """The time from words to hits in each library; the first search of each is not counted."""
    texts = _query_vectors(libraries[0].model.dim, queries)
    times: list[list[float]] = [[] for _ in libraries]
    for is_warm in (False, True):
        for number, vector in enumerate(texts):
            sentence = f"{AUDIT_SENTENCES[number % len(AUDIT_SENTENCES)]} {number}"
            for library, own in zip(libraries, times, strict=True):
                started = time.perf_counter()
                _words_to_hits(library.searcher, f"{sentence} {is_warm}", encoded_vector(vector), candidates)
                if is_warm:
                    own.append(1000 * (time.perf_counter() - started))
    return [Spread(*np.percentile(own, [50, 95]).tolist()) for own in times]


def _words_to_hits(searcher: Searcher, sentence: str, query: EncodedQuery, candidates: int) -> None:
    searcher.encoder.encode_terms([Term(sentence)])  # not near these videos, so `query` is used instead
    _search(searcher, query, candidates)


def _measure_at(
    place: Path, model: GARE, candidates: int, queries: int, frames: int, say: Say
) -> SearchBenchmark:
    memory, started = held_memory(), time.perf_counter()
    with Library.open(place, model=model) as library:
        texts = _query_vectors(model.dim, queries + 1)
        _search(library.searcher, encoded_vector(texts[-1]), candidates)
        first = 1000 * (time.perf_counter() - started)
        say("searching")
        measured = _measure(library, texts[:queries], candidates, first, frames)
        grown = max(0, measured.search_memory - memory)
        num_bytes = library.store.num_bytes() or 0
        return replace(measured, process_memory=memory, search_memory=grown, num_bytes=num_bytes)


@torch.no_grad()
def _measure(
    library: Library, texts: Sequence[np.ndarray], candidates: int, first: float, frames: int
) -> SearchBenchmark:
    model, store, searcher = library.model, library.store, library.searcher
    interaction = model.interaction.for_search()
    times: dict[str, list[float]] = {}

    def timed(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        started = time.perf_counter()
        result = function(*arguments)
        times.setdefault(name, []).append(1000 * (time.perf_counter() - started))
        return result

    for vector in texts:  # what they read is then in the system's memory: these are times of a warm library
        _search(searcher, encoded_vector(vector), candidates)
    peak_gb, held = peak_memory_gb(), held_memory()  # before the references, which need more
    shares = []
    for number, vector in enumerate(texts):  # before all else: a scan of the library would empty the caches
        sentence, query = f"{AUDIT_SENTENCES[number % len(AUDIT_SENTENCES)]} {number}", encoded_vector(vector)
        timed("search", _words_to_hits, searcher, sentence, query, candidates)
        timed("plain_search", _words_to_hits, searcher, f"{sentence} once more", query, 10)
    for number, vector in enumerate(texts):
        sentence, query = f"{AUDIT_SENTENCES[number % len(AUDIT_SENTENCES)]} {number}", encoded_vector(vector)
        timed("encode", model.encode_text, [sentence])
        found = timed("stage1", store.search, query.stage1_E[None], candidates)[0]
        table = timed("fetch", searcher.damaged.read_vectors, found.ids)
        video = timed("unpack", unpack_frames, table["vectors"], model.dim, model.device)
        timed("score", interaction.score, query.text, video)
        timed("dense_score", score_in_blocks, interaction.score_pairs, query.text, video)
        timed("hits", searcher.damaged.read_facts, found.ids[:10], HIT_COLUMNS)
        if number < 10:
            exact = store.search(query.stage1_E[None], candidates, exact=True)[0]
            shares.append(len(set(exact.ids) & set(found.ids)) / len(exact.ids))
    spreads: dict[str, Any] = {
        name: Spread(*np.percentile(values, [50, 95]).tolist()) for name, values in times.items()
    }
    return SearchBenchmark(
        num_items=len(library),
        dim=model.dim,
        frames=frames,
        candidates=candidates,
        threads=torch.get_num_threads(),
        dense_over_factored=statistics.median(times["dense_score"]) / statistics.median(times["score"]),
        recall=statistics.mean(shares),
        open_and_first_ms=first,
        peak_memory_gb=peak_gb,
        search_memory=held,
        **spreads,
    )


def _search(searcher: Searcher, query: EncodedQuery, candidates: int) -> None:
    request = SearchRequest(words="a vector instead of words", candidates=candidates)
    searcher.show([searcher.find(request, query=query)])


def encoded_vector(vector: np.ndarray) -> EncodedQuery:
    """A query whose text has this vector."""
    text = TextFeatures.from_vectors(torch.from_numpy(vector)[None])
    return EncodedQuery(stage1_queries(text.text_TD)[0].numpy(), text, torch.ones(1))


def _query_vectors(dim: int, count: int) -> list[np.ndarray]:
    """Texts near the videos' clusters, as those of a trained model are."""
    return list(clustered_vectors(np.random.default_rng(1), count, dim))
