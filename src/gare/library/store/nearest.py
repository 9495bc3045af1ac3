"""The best of many rows that come in batches."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


class TopK:
    """Keeps the k best scores of each query, and which rows they belong to."""

    def __init__(self, num_queries: int, k: int) -> None:
        self.k = k
        self._scores = np.empty((num_queries, 0), np.float32)
        self._rows = np.empty((num_queries, 0), np.uint64)

    def add(self, scores: np.ndarray, rows: np.ndarray) -> None:
        """`scores` is [queries, rows of this batch]."""
        scores = np.concatenate([self._scores, scores], axis=1)
        rows = np.concatenate([self._rows, np.broadcast_to(rows, (len(scores), len(rows)))], axis=1)
        if scores.shape[1] > self.k:
            keep = np.argpartition(-scores, self.k - 1, axis=1)[:, : self.k]
            scores, rows = np.take_along_axis(scores, keep, 1), np.take_along_axis(rows, keep, 1)
        self._scores, self._rows = scores, rows

    def results(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Scores and rows of each query, best first."""
        order = np.argsort(-self._scores, axis=1, kind="stable")
        for scores, rows, places in zip(self._scores, self._rows, order, strict=True):
            yield scores[places], rows[places]
