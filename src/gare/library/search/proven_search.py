"""The true best items with a proof: bounds rule out most items, the rest are scored exactly.

Items are scored in the order of their upper bounds. Once the next bound lies below the last score that is
wanted, no item that is left can be a hit. Scores are computed in float64, so the list is that of exhaustive
scoring in float64.

Shapes: K terms, V items.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from gare.interaction.score_bounds import (
    BoundCards,
    angle_of,
    cosine_bounds,
    length_of,
    product_interval,
    square_of,
)
from gare.library.filters import Filter
from gare.library.search.bound_table import BoundTable, Progress
from gare.library.search.damaged_items import DamagedItems
from gare.library.search.exact_score import ExactScorer
from gare.library.search.query_vectors import EncodedQuery
from gare.library.search.ranked_items import Ranking
from gare.library.search.search_hit import Certificate
from gare.library.store import Store
from gare.library.store.read_deadline import check_deadline, checked
from gare.library.store.stored_frames import unpack_frames
from gare.model import GARE
from gare.types import block_slices

_FIRST = 64
_MOST_AT_ONCE = 2048
_ITEMS_A_BLOCK = 8192  # of bounds: their vectors in float32 are 16 MB at D = 512
_ROUNDING = 1e-12  # of scores in float64


class ProvenSearch:
    """Finds the best items of a store for certain.

    Args:
        folder: where bounds are kept between processes; None keeps them in memory only.
    """

    def __init__(
        self, store: Store, model: GARE, scorer: ExactScorer, damaged: DamagedItems, folder: Path | None
    ) -> None:
        self._store, self._model, self._scorer = store, model, scorer
        self._damaged, self._folder = damaged, folder
        self._table: BoundTable | None = None
        self._lock = threading.Lock()
        self.on_progress: Progress = lambda done, total: None
        """Called while the bounds of new items are made."""

    @torch.no_grad()
    def find(self, query: EncodedQuery, wanted: int, where: Filter | None) -> Ranking:
        """The best `wanted` items, with the proof that no other belongs among them."""
        ids, keys = self._items(where)
        if not ids:
            return replace(Ranking.nothing(), certificate=Certificate(0, 0))
        upper_V = self._upper_bounds(query, ids, keys)
        order = upper_V.argsort(descending=True).tolist()
        best, num_scored, size = Ranking.nothing(), 0, max(_FIRST, 2 * wanted)
        while num_scored < len(order):
            # While fewer than wanted are known, every bound is above "the last".
            last = best.scores[wanted - 1] if len(best) >= wanted else -float("inf")
            batch = [
                place for place in order[num_scored : num_scored + size] if upper_V[place] >= last - _ROUNDING
            ]
            if not batch:
                break
            check_deadline()
            best = best.merged(self._score(query, [ids[place] for place in batch]), wanted)
            num_scored += len(batch)
            size = min(2 * size, _MOST_AT_ONCE)
        is_cut = num_scored < len(order)
        certificate = Certificate(
            num_items=len(ids),
            num_scored=num_scored,
            last_score=best.scores[-1] if is_cut else None,
            next_bound=float(upper_V[order[num_scored]]) if is_cut else None,
        )
        # What the score of a damaged item was, nobody knows.
        return replace(best, certificate=None if len(self._damaged) else certificate)

    def _items(self, where: Filter | None) -> tuple[list[str], list[str]]:
        ids: list[str] = []
        keys: list[str] = []
        for batch in checked(self._store.scan(where=where, columns=["id", "frames_key"])):
            ids += batch.column("id").to_pylist()
            keys += batch.column("frames_key").to_pylist()
        return ids, keys

    def _upper_bounds(self, query: EncodedQuery, ids: Sequence[str], keys: Sequence[str]) -> Tensor:
        """The most that each item can score, [V]; infinite where no bound is known."""
        with self._lock:
            if self._table is None:
                self._table = BoundTable(self._store, self._model, self._damaged, self._folder)
            cards = self._table.cards(ids, keys, self.on_progress)
        upper_V = torch.full((len(ids),), torch.inf, dtype=torch.float64)
        if cards is not None:
            known, places = cards
            blocks = [known[rows] for rows in block_slices(len(known), _ITEMS_A_BLOCK)]
            upper_V[places] = torch.cat([self._bound(query, block) for block in blocks]).cpu()
        return upper_V

    def _bound(self, query: EncodedQuery, cards: BoundCards) -> Tensor:
        if query.text is None:
            assert query.like_D is not None
            return _likeness_bound(query.like_D, cards)
        bounds = self._model.interaction.bounds(query.text, cards)
        weights_K1 = query.weights_K.double()[:, None]
        return torch.where(weights_K1 > 0, weights_K1 * bounds.upper_TV, weights_K1 * bounds.lower_TV).sum(
            dim=0
        )

    def _score(self, query: EncodedQuery, ids: Sequence[str]) -> Ranking:
        table = self._damaged.read_vectors(ids)
        if not len(table):
            return Ranking.nothing()  # deleted while we searched
        found = table["id"].to_pylist()
        video = unpack_frames(table["vectors"], self._model.dim, self._model.device)
        return Ranking.by_score(found, self._scorer.score_double(query, video), video)


def _likeness_bound(like_D: Tensor, cards: BoundCards) -> Tensor:
    """The most that each item can resemble a picture or a clip, [V]."""
    pooled, like_1D = cards.pooled, like_D[None]
    pooled_sq = square_of(pooled.length_O)
    width = angle_of(pooled.radius_O, length_of(pooled_sq))
    bounds = cosine_bounds(
        product_interval(like_1D, pooled),
        square_of(like_1D.double().norm(dim=-1, keepdim=True)),
        pooled_sq,
        width,
    )
    # The query has length one up to rounding; a score is its product, not its cosine.
    return bounds.upper_TV[0] * max(1.0, float(like_1D.double().norm())) + 1e-6
