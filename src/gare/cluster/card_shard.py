"""One shard of exact search: an actor that holds the cards of a range of items, on its GPU or CPU.

Ranges are of item ids. Those are hashes, so that equal ranges hold about as many items each, whatever the
library holds and however it grows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from gare.cache_folder import cache_folder
from gare.errors import ClusterError
from gare.library.filters import Filter
from gare.library.library import Library
from gare.library.search.damaged_items import DamagedItems
from gare.library.search.exact_score import ExactScorer
from gare.library.search.proven_search import ProvenSearch
from gare.library.search.query_vectors import EncodedQuery
from gare.library.search.ranked_items import Ranking
from gare.library.search.resident_search import ResidentSearch
from gare.library.store import Store
from gare.library.store.read_deadline import Deadline
from gare.model import GARE

if TYPE_CHECKING:
    import pyarrow as pa

_ID_BITS = 32


@dataclass(frozen=True)
class IdRange:
    """Ids from `first` up to, and without, `last`; an empty `last` has no end.

    >>> [str(part) for part in IdRange.split(2)]
    ['00000000-80000000', '80000000-']
    """

    first: str
    last: str

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"

    @classmethod
    def split(cls, num_ranges: int) -> list[IdRange]:
        """All ids in ranges of the same size. Every id is in exactly one of them."""
        starts = [f"{number * 2**_ID_BITS // num_ranges:08x}" for number in range(num_ranges)]
        return [cls(first, last) for first, last in zip(starts, [*starts[1:], ""], strict=True)]

    def keep(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows whose id is in the range."""
        import pyarrow.compute as pc

        ids = batch["id"]
        kept = pc.greater_equal(ids, self.first)
        if self.last:
            kept = pc.and_(kept, pc.less(ids, self.last))
        return batch.filter(kept)


class StoreRange:
    """A store of which a scan sees the items of one range alone; everything else is the store's own."""

    def __init__(self, store: Store, ids: IdRange) -> None:
        self._store, self._ids = store, ids
        self.uri = f"{store.uri}#{ids}"  # under which this machine keeps the cards of the range

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def scan(
        self, *, where: Filter | None = None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Items of the range; `columns` has the id."""
        for batch in self._store.scan(where=where, columns=columns):
            yield self._ids.keep(batch)


@dataclass(frozen=True)
class ShardAnswer:
    """The best items of a range, and what could not be read there."""

    ranking: Ranking
    damaged: dict[str, str]
    """Why, by id."""


class CardShard:
    """Searches one range. It keeps nothing that it cannot make again: Ray may start it anew at any time.

    The model comes with `open` and not when it is made: what an actor was made with may be gone by the time
    that it is started anew (ray#53727).

    Args:
        address: of the library.
        ids: the range.
        on_gpu: hold the cards on the GPU that Ray gave to this process.
    """

    def __init__(self, address: str, ids: IdRange, on_gpu: bool) -> None:
        self._address, self._ids = address, ids
        self._device = torch.device("cuda" if on_gpu else "cpu")
        self._opening = threading.Lock()
        self._proven: ProvenSearch | None = None

    def open(self, model: GARE) -> bool:
        """Be ready to search the vectors of this model; nothing is done by a shard that is."""
        with self._opening:
            if self._proven is None:
                model = model.to(self._device).eval()
                library = Library.open(self._address, model=model, device=self._device, read_only=True)
                store = cast(Store, StoreRange(library.store, self._ids))
                self._damaged, folder = DamagedItems(store), cache_folder() / "bounds"
                self._proven = self._search_of(store, model, folder)
                self._proven.warm_up()
        return True

    def _search_of(self, store: Store, model: GARE, folder: Path) -> ProvenSearch:
        scorer = ExactScorer(model)
        if self._device.type == "cuda":
            return ResidentSearch(store, model, scorer, self._damaged, folder, [self._device])
        return ProvenSearch(store, model, scorer, self._damaged, folder)

    def find(self, asked: tuple[EncodedQuery, int, Filter | None], seconds: float) -> ShardAnswer:
        """The best items of the range with their proof; no longer than so many seconds are spent on it.

        Cards that are missing are made first. What was made when time is up is kept.

        Raises:
            ClusterError: it was started anew, and is not open yet.
        """
        if self._proven is None:
            raise ClusterError(f"shard {self._ids} is not open")
        query, wanted, where = asked
        with Deadline(seconds).active():
            ranking = self._proven.find(query.to(self._device), wanted, where)
        ranking = replace(ranking, frames=ranking.video.to("cpu"), rows=list(range(len(ranking))))
        return ShardAnswer(ranking, self._damaged.found)
