"""Exact search of a library that a GPU holds.

The first pass bounds every item at the speed of the GPU's memory; what can still be a hit is scored as
`proven_search.py` does it. A pass costs the same for one text as for sixteen, so searches that come while one
is under way share the next. Where the GPU cannot hold the library, search goes on without the table, and a
warning says why.

Shapes: K terms, V items.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gare.cache_folder import cache_folder
from gare.errors import TimeLimitError
from gare.interaction.resident_table import can_reside
from gare.interaction.score_bounds import ScoreBounds
from gare.library.filters import Filter
from gare.library.search.bound_table import Progress
from gare.library.search.damaged_items import DamagedItems
from gare.library.search.exact_score import ExactScorer
from gare.library.search.exact_search import ExactSearch
from gare.library.search.proven_search import ProvenSearch, SearchState, weighted
from gare.library.search.query_vectors import EncodedQuery
from gare.library.search.resident_items import MOST_TEXTS, CannotHoldError, HeldItems, ResidentItems
from gare.library.store import Store
from gare.library.store.read_deadline import check_deadline
from gare.model import GARE
from gare.types import TextFeatures

if TYPE_CHECKING:
    from gare.library.search.searcher import Searcher

_log = logging.getLogger("gare.library")
_LOOK_S = 0.1  # how often a search that waits for its turn looks at its deadline


@dataclass(eq=False)
class _Asked:
    """A search that waits for its bounds."""

    text_KD: Tensor
    is_done: bool = False
    found: _FirstPass | None = None
    """None: there is no table."""


@dataclass(frozen=True)
class _FirstPass:
    """Bounds of every row of the table, as it was when `items` were its items."""

    items: HeldItems
    bounds: ScoreBounds


class ResidentSearch(ProvenSearch):
    """Finds the best items of a store for certain, from cards on one or several devices.

    Args:
        devices: where the cards are; scores are computed where the model is.
    """

    def __init__(
        self,
        store: Store,
        model: GARE,
        scorer: ExactScorer,
        damaged: DamagedItems,
        folder: Path | None,
        devices: Sequence[torch.device],
    ) -> None:
        super().__init__(store, model, scorer, damaged, folder)
        self._resident: ResidentItems | None = ResidentItems(store, model, damaged, devices)
        self._turn = threading.Lock()
        self._mutex = threading.Lock()
        self._waiting: list[_Asked] = []
        self._filling = Filling()
        if not can_reside(model.interaction):
            self._give_up("no bounds are known for it that a kernel computes (docs/proof.md)")
        elif find_spec("triton") is None:
            self._give_up("Triton is not installed; install it with 'pip install triton'")

    @property
    def is_resident(self) -> bool:
        """Whether exact searches use the table. It is filled by the first of them, or by `warm_up`."""
        return self._resident is not None

    @property
    def num_bytes(self) -> int:
        """Memory that the table takes."""
        return 0 if self._resident is None else self._resident.num_bytes

    def warm_up(self) -> None:
        """Fill the table now; searches wait for it."""
        with self._turn:
            if self._resident is not None:
                try:
                    self._resident.follow(self._filling.watched(self.on_progress))
                except CannotHoldError as error:
                    self._give_up(str(error))

    def _begin(
        self, query: EncodedQuery, wanted: int, where: Filter | None
    ) -> tuple[Sequence[str], SearchState]:
        found = None if query.text is None else self._first_pass(query.text.text_TD)
        if found is None:
            return super()._begin(query, wanted, where)
        ids, row_V = found.items.ids, found.items.rows_V
        if where is not None:
            ids, keys = self._items(where)
            row_V = found.items.rows(keys)
        place_V = (row_V >= 0).nonzero()[:, 0]
        rows = row_V[place_V]
        lower_KV, upper_KV = found.bounds.lower_TV[:, rows], found.bounds.upper_TV[:, rows]
        upper_V = weighted(query, ScoreBounds(lower_KV, upper_KV))
        lower_V = -weighted(query, ScoreBounds(-upper_KV, -lower_KV))
        state = SearchState.unbounded(len(ids), wanted, row_V.device)
        state.refine(place_V, upper_V, lower_V)
        return ids, state

    # --- whose turn it is -----------------------------------------------------------------------------------

    def _first_pass(self, text_KD: Tensor) -> _FirstPass | None:
        """Bounds of these terms, in one pass with those of whoever else waits; None without a table."""
        asked = _Asked(text_KD)
        with self._mutex:
            self._waiting.append(asked)
        try:
            while not asked.is_done:
                if not self._turn.acquire(timeout=_LOOK_S):
                    self._filling.check_deadline()
                    continue
                try:
                    if not asked.is_done:
                        self._lead()
                finally:
                    self._turn.release()
        finally:
            with self._mutex, suppress(ValueError):
                self._waiting.remove(asked)
        return asked.found

    def _lead(self) -> None:
        """One pass for those who wait. An error of the store ends the search that leads, and no other."""
        batch: list[_Asked] = []
        try:
            if self._resident is not None:
                items = self._resident.follow(self._filling.watched(self.on_progress))
                batch = self._take()
                text = TextFeatures.from_vectors(torch.cat([asked.text_KD for asked in batch]))
                bounds = [
                    bound_TR.split([len(asked.text_KD) for asked in batch])
                    for bound_TR in self._resident.bounds(text)
                ]
                for asked, lower_KR, upper_KR in zip(batch, *bounds, strict=True):
                    asked.found = _FirstPass(items, ScoreBounds(lower_KR, upper_KR))
        except CannotHoldError as error:
            self._give_up(str(error))
        for asked in batch or self._take():
            asked.is_done = True

    def _take(self) -> list[_Asked]:
        """Those who wait, as many as one pass takes; at least one."""
        with self._mutex:
            count, num_texts = 0, 0
            for asked in self._waiting:
                num_texts += len(asked.text_KD)
                if count and num_texts > MOST_TEXTS:
                    break
                count += 1
            batch, self._waiting[:] = self._waiting[:count], self._waiting[count:]
            return batch

    def _give_up(self, reason: str) -> None:
        """From now on without the table; its memory is free again."""
        self._resident = None
        # A server's log keeps the fields, and of a warning only where it is from.
        _log.warning("the GPU does not hold this library", extra={"fields": {"reason": reason}})
        warnings.warn(
            f"the GPU does not hold this library, so exact searches take longer: {reason}",
            RuntimeWarning,
            stacklevel=2,
        )


class Filling:
    """How far a table is filled, for whoever waits for it."""

    def __init__(self) -> None:
        self._done = self._total = 0
        self._started = 0.0

    def watched(self, on_progress: Progress) -> Progress:
        """The same progress, which this object then knows of."""
        self._started, self._done, self._total = time.monotonic(), 0, 0

        def tell(done: int, total: int) -> None:
            self._done, self._total = done, total
            on_progress(done, total)

        return tell

    @property
    def seconds_left(self) -> float | None:
        """None where nothing is known yet."""
        if not self._done:
            return None
        return (time.monotonic() - self._started) / self._done * (self._total - self._done)

    def check_deadline(self) -> None:
        """As `check_deadline`; where a table is being filled, the message says how long that takes."""
        try:
            check_deadline()
        except TimeLimitError:
            if self.seconds_left is None or self._done == self._total:
                raise
            raise TimeLimitError(
                f"the library is on its way to the GPU: {self._done:,} of {self._total:,} items; try again "
                f"in about {self.seconds_left + 1:.0f} seconds"
            ) from None


def search_with_files(searcher: Searcher) -> ExactSearch:
    """Exact search without a table: its bounds are in files, which the next process finds again."""
    folder = cache_folder() / "bounds"
    return ProvenSearch(searcher.store, searcher.model, searcher.scorer, searcher.damaged, folder)


def exact_search_on(device: torch.device) -> Callable[[Searcher], ExactSearch] | None:
    """What finds lists with a proof where a library is on this device; None: what a searcher takes by itself.

    `cuda` without a number stands for all GPUs that this process sees.
    """
    if device.type != "cuda":
        return None
    devices = [device]
    if str(device) == "cuda":
        devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]

    def make(searcher: Searcher) -> ExactSearch:
        folder, model = cache_folder() / "bounds", searcher.model
        ordered = sorted(
            devices, key=lambda one: one != model.device
        )  # bounds come together where scores are
        return ResidentSearch(searcher.store, model, searcher.scorer, searcher.damaged, folder, ordered)

    return make
