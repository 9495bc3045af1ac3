"""What a searcher asks for lists with a proof: in this process (`proven_search.py`), or elsewhere.

A small file of its own, so that `cluster/` can give another one without this package knowing of it.
"""

from __future__ import annotations

from typing import Protocol

from gare.library.filters import Filter
from gare.library.search.bound_table import Progress
from gare.library.search.query_vectors import EncodedQuery
from gare.library.search.ranked_items import Ranking
from gare.library.search.search_hit import Certificate


class ExactSearch(Protocol):
    """Finds the best items for certain."""

    on_progress: Progress

    def find(self, query: EncodedQuery, wanted: int, where: Filter | None) -> Ranking:
        """The best `wanted` items, with the proof that no other belongs among them."""

    def can_certify(self) -> bool:
        """Whether `certify` may find a proof at all."""

    def certify(
        self, query: EncodedQuery, ranking: Ranking, wanted: int, where: Filter | None
    ) -> Certificate | None:
        """The proof of what an ordinary search found, where it comes at no cost."""

    def warm_up(self) -> None:
        """Make ahead what is kept in memory only, as long as it takes; a server does it when it starts."""

    def prepare(self) -> None:
        """Make what `certify` needs, in a small library."""
