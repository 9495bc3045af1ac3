"""The true best items with a proof: bounds rule out most items, the rest are scored exactly.

Items are scored in the order of their upper bounds. Once the next bound lies below the last score that is
wanted, no item that is left can be a hit. Scores are computed in float64, so the list is that of exhaustive
scoring in float64.

Bounds are a ladder. The first rung needs two products an item. Where it leaves many, those get the second,
which needs their keys (`key_table.py`).

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
    ScoreBounds,
    angle_of,
    cosine_bounds,
    length_of,
    product_interval,
    square_of,
)
from gare.library.filters import Filter
from gare.library.search.bound_table import BoundTable, Progress, card_rows, kept_bytes
from gare.library.search.damaged_items import DamagedItems
from gare.library.search.exact_score import ExactScorer
from gare.library.search.item_frames import ItemFrames, list_items
from gare.library.search.key_table import KeyTable
from gare.library.search.query_vectors import EncodedQuery
from gare.library.search.ranked_items import Ranking
from gare.library.search.search_hit import Certificate
from gare.library.store import Store
from gare.library.store.read_deadline import check_deadline
from gare.model import GARE
from gare.types import block_slices

FLOAT32_ERROR = 1e-5
"""What a score of an ordinary search may be off: a proof of its list leaves room for that."""
_FIRST = 64
_MOST_AT_ONCE = 2048
_ITEMS_A_BLOCK = 8192  # of bounds: their vectors in float32 are 16 MB at D = 512
_ROUNDING = 1e-12  # of scores in float64
_FEW = 512  # items that are scored sooner than their keys are looked up
_TRIAL = 4096  # items after which keys that rule out next to nothing are given up
_LEAST_GAIN = 0.1
_MOST_AT_NO_COST = 4096  # items whose first bounds an ordinary search computes: a few milliseconds
_SMALL_FILE = 64 * 2**20  # bytes of bounds that it reads for that, once


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
        self._keys: KeyTable | None = None
        self._starts_with_keys = False
        self._listed: tuple[int, list[str], list[str]] | None = None
        self._lock = threading.Lock()
        self.on_progress: Progress = lambda done, total: None
        """Called while the bounds of new items are made."""

    @torch.no_grad()
    def find(self, query: EncodedQuery, wanted: int, where: Filter | None) -> Ranking:
        """The best `wanted` items, with the proof that no other belongs among them."""
        ids, state = self._begin(query, wanted, where)
        if not ids:
            return replace(Ranking.nothing(), certificate=Certificate(0, 0))
        size = _first_size(wanted)
        self._score(query, ids, state, state.likely(size))
        while self._score_next(query, ids, state, size):
            size = min(2 * size, _MOST_AT_ONCE)
        # What the score of a damaged item was, nobody knows.
        certificate = None if len(self._damaged) else state.certificate()
        return replace(state.best, certificate=certificate)

    def _begin(
        self, query: EncodedQuery, wanted: int, where: Filter | None
    ) -> tuple[Sequence[str], SearchState]:
        """The ids of all items that may be hits, and the search with their first bounds."""
        ids, keys = self._items(where)
        if ids and query.text is not None and self._can_start_with_keys(ids, keys):
            state = SearchState.unbounded(len(ids), wanted, torch.device("cpu"))
            state.refine(*self._key_bounds(query, ids, keys, range(len(ids))))
        elif ids:
            state = SearchState(self._upper_bounds(query, ids, keys), wanted)
            self._score_next(query, ids, state, _first_size(wanted))
            self._refine(query, ids, keys, state)
        else:
            state = SearchState.unbounded(0, wanted, torch.device("cpu"))
        return ids, state

    def can_certify(self) -> bool:
        """Whether bounds are there by which `certify` may find a proof."""
        return self._small_table() is not None

    @torch.no_grad()
    def certify(
        self, query: EncodedQuery, ranking: Ranking, wanted: int, where: Filter | None
    ) -> Certificate | None:
        """The proof of what an ordinary search found, where bounds that are there already give it at once."""
        table = self._small_table()
        if table is None or len(ranking) < wanted:
            return None
        ids, keys = self._items(where)
        if not ids or not all(key in table for key in keys):
            return None
        upper_V = self._upper_bounds(query, ids, keys)
        scored = set(ranking.ids)
        upper_V[[place for place, item in enumerate(ids) if item in scored]] = -torch.inf
        last, bound = ranking.scores[wanted - 1], float(upper_V.max())
        if bound >= last - FLOAT32_ERROR or len(self._damaged):
            return None
        if bound == -float("inf"):
            return Certificate(len(ids), len(ids))
        return Certificate(len(ids), len(ranking), last, bound)

    def warm_up(self) -> None:
        """Nothing: bounds are made by the searches that need them, and kept in files."""

    def prepare(self) -> None:
        """Make the first bounds of a small library, so that `certify` has them."""
        ids, keys = self._items(None)
        if 0 < len(ids) <= _MOST_AT_NO_COST:
            with self._lock:
                self._open_table().fill(ids, keys, self.on_progress)

    def _open_table(self) -> BoundTable:
        if self._table is None:
            self._table = BoundTable(self._store, self._model, self._damaged, self._folder)
        return self._table

    def _small_table(self) -> BoundTable | None:
        """The first bounds of a small library, where they were made before; nothing is made for them."""
        if self._table is None and kept_bytes(self._store, self._folder) in range(1, _SMALL_FILE):
            with self._lock:
                self._open_table()
        return self._table if self._table is not None and 0 < len(self._table) <= _MOST_AT_NO_COST else None

    def _score_next(self, query: EncodedQuery, ids: Sequence[str], state: SearchState, size: int) -> bool:
        """Score the items with the highest bounds; False where none can be a hit."""
        return self._score(query, ids, state, state.left(size))

    def _score(
        self, query: EncodedQuery, ids: Sequence[str], state: SearchState, batch: Sequence[int]
    ) -> bool:
        if batch:
            check_deadline()
            state.add(batch, self._ranking(query, [ids[place] for place in batch]))
        return bool(batch)

    def _refine(
        self, query: EncodedQuery, ids: Sequence[str], keys: Sequence[str], state: SearchState
    ) -> None:
        """The second rung for what the first one leaves, as long as it rules out something."""
        left = state.left()
        if len(left) <= _FEW or query.text is None or not self._model.interaction.has_keys:
            return
        num_left = len(left)
        for block in (left[:_TRIAL], left[_TRIAL:]):
            state.refine(*self._key_bounds(query, ids, keys, block))
            still = len(state.left())
            if num_left - still < _LEAST_GAIN * len(block):
                return
            num_left = still
        # A first rung that rules out next to nothing for this model is not asked again.
        self._starts_with_keys = len(left) > (1 - _LEAST_GAIN) * len(ids)

    def _key_bounds(
        self, query: EncodedQuery, ids: Sequence[str], keys: Sequence[str], places: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Which of `places` have keys, the most that they can score by them, and the least."""
        place_V = torch.tensor(places, dtype=torch.long)
        with self._lock:
            if self._keys is None:
                self._keys = KeyTable(self._store, self._model, self._damaged, self._folder)
            assert self._table is not None
            names = [keys[place] for place in places]
            if self._keys.num_held(names) < len(names):
                missing = dict(zip(names, (ids[place] for place in places), strict=True))
                self._keys.make(missing, self._table, self.on_progress)
            blocks = list(self._keys.blocks(names))
        found, none = [place_V[:0]], torch.zeros(0, dtype=torch.float64)
        upper, lower = [none], [none]
        assert query.text is not None
        for cards, rows, items in blocks:
            check_deadline()
            bounds = self._model.interaction.key_bounds(query.text, cards.balls, cards.keys)
            upper.append(weighted(query, bounds).cpu()[rows])
            lower.append(-weighted(query, ScoreBounds(-bounds.upper_TV, -bounds.lower_TV)).cpu()[rows])
            found.append(place_V[items])
        return torch.cat(found), torch.cat(upper), torch.cat(lower)

    def _can_start_with_keys(self, ids: Sequence[str], keys: Sequence[str]) -> bool:
        """Whether the first rung was of no use before, and nearly all items have their second."""
        if not self._starts_with_keys or self._table is None or self._keys is None:
            return False
        with self._lock:
            self._table.fill(ids, keys, self.on_progress)
        return self._keys.num_held(keys) > (1 - _LEAST_GAIN) * len(keys)

    def _items(self, where: Filter | None) -> tuple[list[str], list[str]]:
        """Ids and names; those of all items are listed once for each version of the store."""
        version = self._store.version() if where is None else None
        if version is None:
            return list_items(self._store, where)
        known = self._listed
        if known is None or known[0] != version:  # the version first: a list that is newer is made again
            known = self._listed = (version, *list_items(self._store, None))
        return known[1:]

    def _upper_bounds(self, query: EncodedQuery, ids: Sequence[str], keys: Sequence[str]) -> Tensor:
        """The most that each item can score, [V]; infinite where no bound is known."""
        with self._lock:
            found = self._open_table().find(ids, keys, self.on_progress)
        upper_V = torch.full((len(ids),), torch.inf, dtype=torch.float64)
        if found is not None:
            cards, rows, places = found
            for block in block_slices(len(rows), _ITEMS_A_BLOCK):
                check_deadline()
                upper_V[places[block]] = self._bound(query, card_rows(cards, rows[block])).cpu()
        return upper_V

    def _bound(self, query: EncodedQuery, cards: BoundCards) -> Tensor:
        if query.text is None:
            assert query.like_D is not None
            return _likeness_bound(query.like_D, cards)
        return weighted(query, self._model.interaction.bounds(query.text, cards))

    def _ranking(self, query: EncodedQuery, ids: Sequence[str]) -> Ranking:
        table = self._damaged.read_vectors(ids)
        if not len(table):
            return Ranking.nothing()  # deleted while we searched
        items = ItemFrames.of(table, self._model)
        return Ranking.by_score(items, self._scorer.score_double(query, items.video))


class SearchState:
    """How far an exact search has come. Items are known by their places."""

    def __init__(self, upper_V: Tensor, wanted: int) -> None:
        self._upper_V, self._wanted = upper_V, wanted
        self._lower_V = torch.full_like(upper_V, -torch.inf)
        self._is_scored_V = torch.zeros_like(upper_V, dtype=torch.bool)
        self._is_refined_V = torch.zeros_like(upper_V, dtype=torch.bool)
        self.best = Ranking.nothing()

    @classmethod
    def unbounded(cls, num_items: int, wanted: int, device: torch.device) -> SearchState:
        """The beginning of a search that knows nothing of its items yet."""
        return cls(torch.full((num_items,), torch.inf, dtype=torch.float64, device=device), wanted)

    def left(self, most: int | None = None) -> list[int]:
        """The items that can still be hits, highest bound first; `most` of them, or all."""
        # While fewer than wanted are known, every bound is above "the last".
        last = self.best.scores[self._wanted - 1] if len(self.best) >= self._wanted else -float("inf")
        left = ((self._upper_V >= last - _ROUNDING) & ~self._is_scored_V).nonzero()[:, 0]
        upper = self._upper_V[left]
        order = upper.argsort(descending=True) if most is None else upper.topk(min(most, len(left))).indices
        places: list[int] = left[order].tolist()
        return places

    def add(self, places: Sequence[int], ranking: Ranking) -> None:
        """These were scored."""
        self._is_scored_V[list(places)] = True
        self.best = self.best.merged(ranking, self._wanted) if len(ranking) else self.best

    def likely(self, size: int) -> list[int]:
        """Items with the highest lower bounds: their scores rule out others that would be scored first."""
        place_V = (self._is_refined_V & ~self._is_scored_V).nonzero()[:, 0]
        best: list[int] = place_V[self._lower_V[place_V].topk(min(size, len(place_V))).indices].tolist()
        return best

    def refine(self, places: Tensor, upper: Tensor, lower: Tensor) -> None:
        """Narrower bounds of some items."""
        self._lower_V[places] = lower
        self._upper_V[places] = torch.minimum(self._upper_V[places], upper)
        self._is_refined_V[places] = True

    def certificate(self) -> Certificate:
        """The proof, once no item is left."""
        num_items, num_scored = len(self._upper_V), int(self._is_scored_V.sum())
        num_refined = int(self._is_refined_V.sum())
        if num_scored == num_items:
            return Certificate(num_items, num_scored, num_refined=num_refined)
        next_bound = float(self._upper_V[~self._is_scored_V].max())
        return Certificate(num_items, num_scored, self.best.scores[-1], next_bound, num_refined)


def _first_size(wanted: int) -> int:
    """How many items are scored at first."""
    return max(_FIRST, 2 * wanted)


def weighted(query: EncodedQuery, bounds: ScoreBounds) -> Tensor:
    """The most that all terms of a query can add up to, [V]."""
    weights_K1 = query.weights_K.double()[:, None]
    upper_KV = torch.where(weights_K1 > 0, weights_K1 * bounds.upper_TV, weights_K1 * bounds.lower_TV)
    return upper_KV.sum(dim=0)


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
