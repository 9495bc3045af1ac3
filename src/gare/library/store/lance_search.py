"""The nearest items of a Lance table: through the index where it pays, otherwise by reading every vector."""

from __future__ import annotations

from typing import Any

import numpy as np

from gare.library.store.base import Hits
from gare.library.store.lance_table import Snapshot
from gare.library.store.nearest import TopK

VECTOR_INDEX = "vector_idx"
SCAN_MATCHES = 20_000
"""Under a filter that fewer rows pass, reading them all is faster than the index, and exact."""
_SCAN_ROWS = 8192
_MOST_PARTITIONS = 8


def search_items(
    snapshot: Snapshot, queries: np.ndarray, k: int, condition: str | None, *, exact: bool
) -> list[Hits]:
    dataset = snapshot.dataset
    indexed = not exact and dataset.has_index and VECTOR_INDEX in _index_names(dataset)
    num_matches = dataset.count_rows(condition) if indexed and condition else 0
    if not indexed or (condition and num_matches <= SCAN_MATCHES):
        return _read_all(snapshot, queries, k, condition)
    hits = [_ask_index(snapshot, query, k, condition) for query in queries]
    expected = min(k, num_matches if condition else dataset.count_rows())
    if any(len(hit.ids) < expected for hit in hits):  # a graph may end early among rows that do not pass
        return _read_all(snapshot, queries, k, condition)
    return hits


def _index_names(dataset: Any) -> set[str]:
    return {description.name for description in dataset.describe_indices()}


def _ask_index(snapshot: Snapshot, query: np.ndarray, k: int, condition: str | None) -> Hits:
    """Half as many more candidates than wanted: recall .996 of the best 256 among 100,000, in 4 ms.

    Three times as many give .998, in 7 ms.
    """
    nearest = {
        "column": "vector",
        "q": query,
        "k": k,
        "metric": "dot",
        "ef": max(3 * k // 2, 200),
        "nprobes": _MOST_PARTITIONS,
    }
    table = snapshot.dataset.to_table(
        columns=["_distance"], nearest=nearest, filter=condition, prefilter=True, with_row_id=True
    )
    scores = 1.0 - table["_distance"].to_numpy()  # Lance's distance is one minus the product
    ids = snapshot.rows.values_at("id", table["_rowid"].to_numpy())
    return Hits(ids, scores.astype(np.float32))


def _read_all(snapshot: Snapshot, queries: np.ndarray, k: int, condition: str | None) -> list[Hits]:
    best = TopK(len(queries), k)
    scanner = snapshot.dataset.scanner(
        columns=["vector"], filter=condition, with_row_id=True, batch_size=_SCAN_ROWS, scan_in_order=False
    )
    for batch in scanner.to_batches():
        vectors = batch["vector"].flatten().to_numpy(zero_copy_only=False).reshape(batch.num_rows, -1)
        best.add(queries @ vectors.T, batch["_rowid"].to_numpy())
    return [Hits(snapshot.rows.values_at("id", rows), scores) for scores, rows in best.results()]
