"""How much of what exact scoring ranks first stage 1 finds, on this library. Shapes: T queries, V items."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gare.atomic import write_text
from gare.errors import LibraryError
from gare.extras import is_installed
from gare.library.search.item_frames import SCORE_COLUMNS
from gare.library.search.query_language import Term
from gare.library.search.search_request import SearchRequest
from gare.library.search.searcher import Searcher
from gare.library.search.stage1 import AUDIT_NOTE, AUDIT_SENTENCES, plain_vectors, stage1_queries
from gare.library.store.row_checksums import CHECKSUM_COLUMN, damaged_item_columns, vector_bytes
from gare.library.store.stored_frames import intact_rows, own_frames, unpack_frames
from gare.types import TextFeatures

if TYPE_CHECKING:
    import pyarrow as pa

TOP = 10
GOAL = 0.99
LEAST_CANDIDATES = 64
_TIMED_QUERIES = 12
_SAME_SCORE = 1e-6

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Audit:
    """Coverage@k: the share of the exact top 10 that lies within the first k of stage 1."""

    library: str
    model: str
    num_items: int
    num_queries: int
    queries: str
    ks: tuple[int, ...]
    coverage: tuple[float, ...]
    """Coverage with the stage-1 vectors of this library, which carry the average increment."""
    plain_coverage: tuple[float, ...]
    """Coverage with the mean of the frames alone, as in a dual encoder."""
    candidates: int
    """The smallest k that reaches the goal."""
    goal: float
    index_coverage: float
    """Coverage at that k through the store's own index: what a search really finds."""
    two_stage_ms: float
    exhaustive_ms: float
    proven_share: float = 0.0
    """The share of two-stage lists that are proven to be the true ones, at no cost."""


def audit(
    searcher: Searcher, queries: Sequence[str] = (), *, on_progress: Progress = lambda done, total: None
) -> Audit:
    """Compare two-stage search with exhaustive GARE, and note the number of candidates that is enough.

    Args:
        queries: sentences; default: everyday ones, none of which the stage-1 vectors were made with.
    """
    sentences = list(dict.fromkeys(queries)) or list(AUDIT_SENTENCES)
    store, model = searcher.store, searcher.model
    num_items = store.count()
    if not num_items:
        raise LibraryError(f"{store.uri} is empty; index a folder first")
    text = model.encode_text(sentences)
    exact_TV, stage1_TV, plain_TV, ids = _score_all(searcher, text, num_items, on_progress)
    top = min(TOP, len(ids))
    wanted_TV = _wanted(exact_TV, top)
    ks = _grid(len(ids), top)
    coverage = _coverage(stage1_TV, wanted_TV, top, ks)
    plain_coverage = _coverage(plain_TV, wanted_TV, top, ks)
    enough = next((k for k, share in zip(ks, coverage, strict=True) if share >= GOAL), len(ids))
    candidates = max(enough, min(LEAST_CANDIDATES, len(ids)))
    result = Audit(
        library=store.uri,
        model=store.stamp.name,
        num_items=len(ids),
        num_queries=len(sentences),
        queries="given" if queries else "everyday sentences",
        ks=tuple(ks),
        coverage=tuple(coverage),
        plain_coverage=tuple(plain_coverage),
        candidates=candidates,
        goal=GOAL,
        index_coverage=_index_coverage(searcher, text, wanted_TV, top, ids, candidates),
        two_stage_ms=_search_ms(searcher, sentences, candidates),
        exhaustive_ms=_search_ms(searcher, sentences[:3], None),
        proven_share=_proven_share(searcher, sentences, candidates),
    )
    try:
        store.set_notes({AUDIT_NOTE: json.dumps(asdict(result))})
    except LibraryError as error:  # it may be read-only; what was measured is worth having all the same
        warnings.warn(
            f"searches go on with as many candidates as before, as the audit cannot be noted: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
    return result


@torch.no_grad()
def _score_all(
    searcher: Searcher, text: TextFeatures, num_items: int, on_progress: Progress
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[str]]:
    """Exact, stage-1 and plain scores of every pair, in one pass over the library; and the ids."""
    model, parts, ids = searcher.model, [], []
    for stored_rows in searcher.store.scan(columns=[*SCORE_COLUMNS, "vector", CHECKSUM_COLUMN]):
        if not stored_rows.num_rows:
            continue
        _check_intact(searcher, stored_rows)
        batch = own_frames(stored_rows, searcher.store.stamp.num_frames)
        video = unpack_frames(batch.column("vectors"), model.dim, model.device)
        stored = np.stack(batch.column("vector").to_numpy(zero_copy_only=False))
        stored_VE = torch.from_numpy(stored).to(model.device)
        query_TE = stage1_queries(text.text_TD)
        scores = (model.score(text, video), query_TE @ stored_VE.mT, query_TE @ plain_vectors(video).mT)
        parts.append([part.float().cpu().numpy() for part in scores])
        ids += batch.column("id").to_pylist()
        on_progress(len(ids), num_items)
    exact_TV, stage1_TV, plain_TV = (np.concatenate(column, axis=1) for column in zip(*parts, strict=True))
    return exact_TV, stage1_TV, plain_TV, ids


def _check_intact(searcher: Searcher, batch: pa.RecordBatch) -> None:
    """An audit of damaged vectors would recommend a wrong number of candidates."""
    good = intact_rows(batch)
    columns = (batch[name].to_pylist() for name in ("id", CHECKSUM_COLUMN))
    for item, checksum, vector, is_good in zip(*columns, vector_bytes(batch["vector"]), good, strict=True):
        if not is_good or damaged_item_columns({CHECKSUM_COLUMN: checksum}, vector):
            raise searcher.damaged.error(item)


def _grid(num_items: int, top: int) -> list[int]:
    """1, 2, 5, 10, … from the size of the answer up to the whole library.

    >>> _grid(130, 10)
    [10, 20, 50, 100, 130]
    """
    steps = [digit * 10**power for power in range(9) for digit in (1, 2, 5)]
    return [k for k in steps if top <= k < num_items] + [num_items]


def _wanted(exact_TV: np.ndarray, top: int) -> np.ndarray:
    """Items as good as the exact top: of copies, which score the same, one is as good as another."""
    last_T1 = np.partition(exact_TV, -top, axis=1)[:, -top, None]
    return exact_TV >= last_T1 - _SAME_SCORE


def _coverage(scores_TV: np.ndarray, wanted_TV: np.ndarray, top: int, ks: Sequence[int]) -> list[float]:
    shares = []
    for scores_V, wanted_V in zip(scores_TV, wanted_TV, strict=True):
        found_V = wanted_V[np.argsort(-scores_V, kind="stable")].cumsum()
        shares.append([min(int(found_V[k - 1]), top) / top for k in ks])
    return [float(share) for share in np.mean(shares, axis=0)]


def _index_coverage(
    searcher: Searcher,
    text: TextFeatures,
    wanted_TV: np.ndarray,
    top: int,
    ids: Sequence[str],
    candidates: int,
) -> float:
    places = {item: place for place, item in enumerate(ids)}
    found = searcher.store.search(stage1_queries(text.text_TD).float().cpu().numpy(), candidates)
    shares = []
    for wanted_V, hits in zip(wanted_TV, found, strict=True):
        held = [places[item] for item in hits.ids if item in places]  # not what was added meanwhile
        shares.append(min(int(wanted_V[held].sum()), top) / top)
    return float(np.mean(shares))


def _search_ms(searcher: Searcher, sentences: Sequence[str], candidates: int | None) -> float:
    """Median time of a search, the text already encoded; the first one warms up."""
    times = []
    for sentence in [sentences[0], *sentences[:_TIMED_QUERIES]]:
        request = SearchRequest(
            terms=(Term(sentence),), top=TOP, candidates=candidates, exhaustive=candidates is None
        )
        query = searcher.encoder.encode(request)
        started = time.perf_counter()
        searcher.show([searcher.find(request, query=query)])
        times.append(1000 * (time.perf_counter() - started))
    return median(times[1:])


def _proven_share(searcher: Searcher, sentences: Sequence[str], candidates: int) -> float:
    """How many searches give a certificate though nobody asked for one."""
    searcher.proven.prepare()
    requests = [
        SearchRequest(terms=(Term(sentence),), top=TOP, candidates=candidates) for sentence in sentences
    ]
    return float(np.mean([searcher.find(request).certificate is not None for request in requests]))


def save_audit(result: Audit, folder: Path) -> None:
    """Write audit.json, audit.md and, where matplotlib is installed, audit.png."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "audit.json", json.dumps(asdict(result), indent=2) + "\n")
    write_text(folder / "audit.md", audit_markdown(result))
    if is_installed("analysis"):
        _draw(result, folder / "audit.png")


def audit_markdown(result: Audit) -> str:
    """The audit as a Markdown page."""
    rows = [
        f"| {k:,} | {100 * share:.1f} | {100 * plain:.1f} |"
        for k, share, plain in zip(result.ks, result.coverage, result.plain_coverage, strict=True)
    ]
    faster = result.exhaustive_ms / result.two_stage_ms
    lines = [
        f"# Audit of {result.library}",
        "",
        f"{result.num_items:,} items, {result.num_queries} queries ({result.queries}), model {result.model}.",
        "",
        f"**{result.candidates:,} candidates** cover {100 * result.goal:.0f} % of what exhaustive search "
        f"puts into its top {TOP}; through the index, {100 * result.index_coverage:.1f} %. A search "
        f"takes {result.two_stage_ms:.1f} ms instead of {result.exhaustive_ms:.1f} ms ({faster:.1f}×). "
        f"{100 * result.proven_share:.0f} % of the lists are proven to be the true ones, at no cost.",
        "",
        "Coverage@k in per cent:",
        "",
        "| k | stage 1 with the average increment | mean of the frames alone |",
        "| ---: | ---: | ---: |",
        *rows,
    ]
    return "\n".join(lines) + "\n"


def _draw(result: Audit, path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    lines: list[tuple[tuple[float, ...], str, dict[str, Any]]] = [
        (result.coverage, "with the average increment", {"color": "#0072b2", "marker": "o"}),
        (result.plain_coverage, "mean of the frames", {"color": "#e69f00", "marker": "s", "linestyle": "--"}),
    ]
    for shares, label, style in lines:
        axes.plot(result.ks, [100 * share for share in shares], label=label, **style)
    axes.axvline(result.candidates, color="0.5", linewidth=1)
    axes.annotate(
        f"{result.candidates:,} candidates",
        (result.candidates, 3),
        xytext=(4, 0),
        textcoords="offset points",
        color="0.35",
    )
    axes.set(
        xscale="log",
        ylim=(0, 102),
        xlabel="candidates k",
        ylabel=f"% of the exact top {TOP} among them",
        title=f"Stage 1 on {result.num_items:,} items, {result.num_queries} queries",
    )
    axes.legend(loc="center right", frameon=False)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=160)
    pyplot.close(figure)
