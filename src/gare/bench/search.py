"""A search in a large synthetic library, stage by stage, beside a plain dual tower and dense re-scoring.

Shapes: V items, F frames, D embedding.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gare.bench.timing import peak_memory_gb
from gare.config import GareConfig
from gare.library.features import unpack_frames
from gare.library.library import Library
from gare.library.queries import AUDIT_SENTENCES
from gare.library.query import Term
from gare.library.schema import frame_schema, item_schema
from gare.library.search import Probe
from gare.library.stage1 import plain_vectors, stage1_queries
from gare.model import GARE
from gare.scoring import dense, factored
from gare.scoring.few import QueryFirst
from gare.types import TextFeatures, VideoFeatures

if TYPE_CHECKING:
    from gare.library.store import Store

_ROWS_AT_ONCE = 2_000
_CLUSTERS = 400
_WHEN = datetime(2026, 1, 1, tzinfo=UTC)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Spread:
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
    """A dual tower: words to hits with stage 1 alone."""
    dense_score: Spread
    """The same candidates, with every increment formed."""
    dense_over_factored: float
    recall: float
    """Of stage 1 against an exact scan."""
    open_and_first_ms: float
    peak_memory_gb: float


def benchmark_search(
    *, num_items: int, dim: int, frames: int, candidates: int, queries: int, folder: Path | None, say: Say
) -> SearchBenchmark:
    """Build the library (or take the one in `folder`) and search it."""
    torch.manual_seed(0)
    model = GARE(
        GareConfig.load(
            {
                "backbone": {"family": "mini", "dim": dim},
                "temporal": {"num_layers": 0},
                "interaction": {"pooling": "text_conditioned"},
                "num_frames": frames,
            }
        )
    ).eval()
    with ExitStack() as stack:
        place = folder or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "library"
        with Library.open(place, model=model) as library:
            if len(library) < num_items:
                say(f"making {num_items:,} items in {place}")
                _fill(library.store, num_items, dim, frames, say)
                say("building the index")
                library.maintain()
        started = time.perf_counter()
        library = stack.enter_context(Library.open(place, model=model))
        texts = _query_vectors(dim, queries + 1)
        library.searcher.search(_probe(texts[-1]), top=10, candidates=candidates)
        first = 1000 * (time.perf_counter() - started)
        say("searching")
        return _measure(library, texts[:queries], candidates, first, frames)


@torch.no_grad()
def _measure(
    library: Library, texts: Sequence[np.ndarray], candidates: int, first: float, frames: int
) -> SearchBenchmark:
    model, store, searcher = library.model, library.store, library.searcher
    interaction, psi = model.config.interaction, model.increment_net
    assert psi is not None
    few = QueryFirst.fold(psi.weights())
    times: dict[str, list[float]] = {}

    def timed(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        started = time.perf_counter()
        result = function(*arguments)
        times.setdefault(name, []).append(1000 * (time.perf_counter() - started))
        return result

    def words_to_hits(sentence: str, probe: Probe, candidates: int) -> None:
        searcher.text_probe([Term(sentence)])  # what it encodes is not near these videos, so `probe` is used
        searcher.search(probe, top=10, candidates=candidates)

    for vector in texts:  # what they read is then in the system's memory: these are times of a warm library
        searcher.search(_probe(vector), top=10, candidates=candidates)
    peak_gb = peak_memory_gb()  # before the references, which need more
    shares = []
    for number, vector in enumerate(texts):
        sentence, probe = f"{AUDIT_SENTENCES[number % len(AUDIT_SENTENCES)]} {number}", _probe(vector)
        timed("search", words_to_hits, sentence, probe, candidates)
        timed("plain_search", words_to_hits, f"{sentence} once more", probe, 10)
        timed("encode", model.encode_text, [sentence])
        found = timed("stage1", store.search, probe.coarse[None], candidates)[0]
        table = timed("fetch", store.fetch, found.ids, ["id", "vectors"])
        video = timed("unpack", unpack_frames, table["vectors"], model.dim, model.device)
        timed("score", factored.score, probe.text, video, few, interaction)
        timed("dense_score", dense.score, probe.text, video, psi, interaction)
        timed("hits", store.fetch, found.ids[:10], ["path", "times", "vectors"])
        if number < 10:
            exact = store.search(probe.coarse[None], candidates, exact=True)[0]
            shares.append(len(set(exact.ids) & set(found.ids)) / len(exact.ids))
    spreads = {name: Spread(*np.percentile(values, [50, 95]).tolist()) for name, values in times.items()}
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
        **spreads,
    )


def _probe(vector: np.ndarray) -> Probe:
    text = TextFeatures.from_vectors(torch.from_numpy(vector)[None])
    return Probe(stage1_queries(text.text_TD)[0].numpy(), text, torch.ones(1))


def _query_vectors(dim: int, count: int) -> list[np.ndarray]:
    """Texts near the videos' clusters, as those of a trained model are."""
    return list(_vectors(np.random.default_rng(1), count, dim))


def _vectors(generator: np.random.Generator, count: int, dim: int) -> np.ndarray:
    """Unit vectors in clusters with a decaying spectrum, as embeddings have; cluster centres are fixed."""
    scale = 1 / np.sqrt(1 + np.arange(dim) / 20)
    centres = np.random.default_rng(0).normal(size=(_CLUSTERS, dim)) * scale
    vectors = (
        centres[generator.integers(_CLUSTERS, size=count)] + 0.7 * generator.normal(size=(count, dim)) * scale
    )
    unit: np.ndarray = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit.astype(np.float32)


def _fill(store: Store, num_items: int, dim: int, frames: int, say: Say) -> None:
    import pyarrow as pa

    generator = np.random.default_rng(2)
    for start in range(store.count(), num_items, _ROWS_AT_ONCE):
        count = min(_ROWS_AT_ONCE, num_items - start)
        means_VD = _vectors(generator, count, dim)
        noise = generator.normal(size=(count, frames, dim)).astype(np.float32) * (0.3 / np.sqrt(dim))
        frames_VFD = (means_VD[:, None] + noise).astype("<f2")
        video = VideoFeatures(
            torch.from_numpy(frames_VFD).float(), torch.ones(count, frames, dtype=torch.bool)
        )
        ids = [f"{number:020x}" for number in range(start, start + count)]
        items = {
            "id": ids,
            "path": [f"/videos/{number // 1000:04d}/{number}.mp4" for number in range(start, start + count)],
            "content": ids,
            "start": [0.0] * count,
            "end": [12.0] * count,
            "file_duration": [12.0] * count,
            "width": [640] * count,
            "height": [360] * count,
            "modified": [_WHEN] * count,
            "added": [_WHEN] * count,
            "tags": [[]] * count,
            "frames_key": ids,
            "vector": list(plain_vectors(video).numpy()),
        }
        parts = {
            "frames_key": ids,
            "vectors": [row.tobytes() for row in frames_VFD],
            "times": [list(map(float, range(frames)))] * count,
            "thumbnail": [b""] * count,
            "strip": [b""] * count,
        }
        store.upsert(pa.table(items, schema=item_schema(dim + 1)), pa.table(parts, schema=frame_schema()))
        if (start // _ROWS_AT_ONCE) % 10 == 9:
            say(f"  {start + count:,}")
