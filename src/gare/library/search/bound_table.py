"""What the bounds of every item's score need, on this machine: made once from the stored frames, then kept.

Two vectors an item in half precision, 2 KB at D = 512. A search reads them instead of the frames (12 KB) and
of the products that a score costs. The file is a cache: it can be deleted, and is brought up to date before
each exact search.

Shapes: V items, D embedding.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from gare.interaction.score_bounds import BoundCards
from gare.interaction.score_cards import cat_cards
from gare.library.search.card_file import load_cards, save_cards
from gare.library.search.damaged_items import DamagedItems
from gare.library.search.item_frames import card_keys
from gare.library.store import Store
from gare.library.store.read_deadline import check_deadline
from gare.library.store.stored_frames import unpack_frames
from gare.model import GARE
from gare.types import block_slices

_ITEMS_AT_ONCE = 512
_SAVE_S = 60.0  # what is made of the table is kept, should the process be stopped
_DTYPE = torch.float16
_FORMAT = "slabs"  # of the cards: those of another are made anew

Progress = Callable[[int, int], None]


class BoundTable:
    """The bound cards of a library's items.

    Args:
        store, model: of the library.
        damaged: reads items, and leaves out what cannot be trusted.
        folder: where the cards are kept between processes; None keeps them in memory only.
    """

    def __init__(self, store: Store, model: GARE, damaged: DamagedItems, folder: Path | None) -> None:
        self._model, self._damaged = model, damaged
        self._rows: dict[str, int] = {}
        self._cards: BoundCards | None = None
        self._last: tuple[Sequence[str], tuple[BoundCards, Tensor, Tensor]] | None = None
        self._file = None
        if folder is not None:
            self._file = _file_of(store, folder)
            if found := load_cards(self._file, BoundCards):
                self._rows = {key: row for row, key in enumerate(found[0])}
                self._cards = found[1].to(model.device)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def rows(self, names: Sequence[str]) -> BoundCards:
        """The cards of items that are in the table."""
        assert self._cards is not None
        rows = torch.tensor([self._rows[key] for key in names], dtype=torch.long)
        return self._cards[rows.to(self._cards.pooled.radius_O.device)]

    def fill(self, ids: Sequence[str], names: Sequence[str], on_progress: Progress) -> bool:
        """Make what is missing; False where no bounds are known for this interaction."""
        missing = {key: item for key, item in zip(names, ids, strict=True) if key not in self._rows}
        return not missing or self._make(missing, on_progress)

    def find(
        self, ids: Sequence[str], names: Sequence[str], on_progress: Progress = lambda done, total: None
    ) -> tuple[BoundCards, Tensor, Tensor] | None:
        """All cards, which of them belong to these items, and which items those are; what is missing is made.

        Damaged items have none. None: no bounds are known for this interaction.
        """
        if self._last is not None and self._last[0] is names:  # the list of the search before
            return self._last[1]
        if not self.fill(ids, names, on_progress) or self._cards is None:
            return None
        row_V = torch.tensor([self._rows.get(key, -1) for key in names], dtype=torch.long)
        places = (row_V >= 0).nonzero()[:, 0]
        found = self._cards, row_V[places], places
        self._last = (names, found) if len(places) == len(names) else None
        return found

    @torch.no_grad()
    def _make(self, missing: dict[str, str], on_progress: Progress) -> bool:
        """Add the cards of these items, ids by name; False where the interaction has no bounds."""
        keys, parts, new = list(missing), list[BoundCards](), list[str]()
        saved = time.monotonic()
        try:
            for block in block_slices(len(keys), _ITEMS_AT_ONCE):
                check_deadline()
                ids = [missing[key] for key in keys[block]]
                table = self._damaged.read_vectors(ids)
                if not len(table):
                    continue
                found = card_keys(table)
                video = unpack_frames(table["vectors"], self._model.dim, self._model.device)
                part = self._model.interaction.bound_cards(video, _DTYPE)
                if part is None:
                    return False
                parts.append(part)
                new += found
                on_progress(block.stop, len(keys))
                if time.monotonic() - saved > _SAVE_S:
                    self._add(new, parts)
                    parts, new, saved = [], [], time.monotonic()
        finally:  # also when time is up: the next search goes on from here
            if parts:
                self._add(new, parts)
        return True

    def _add(self, keys: Sequence[str], parts: Sequence[BoundCards]) -> None:
        self._cards = cat_cards([*([] if self._cards is None else [self._cards]), *parts])
        self._rows |= {key: row for row, key in enumerate(keys, start=len(self._rows))}
        if self._file is not None:
            with suppress(OSError):  # a disk that is full or read-only costs time at the next start
                save_cards(self._file, list(self._rows), self._cards)


def card_rows(cards: BoundCards, rows: Tensor) -> BoundCards:
    """The cards of these rows; those that lie one after the other are not copied."""
    first = int(rows[0])
    if torch.equal(rows, torch.arange(first, first + len(rows))):
        return cards[first : first + len(rows)]
    return cards[rows.to(cards.pooled.radius_O.device)]


def table_name(store: Store) -> str:
    """The name under which this machine keeps what it made of a library, for this model."""
    name = hashlib.blake2b(f"{store.uri}\n{store.stamp.fingerprint}\n{_FORMAT}".encode(), digest_size=12)
    return name.hexdigest()


def kept_bytes(store: Store, folder: Path | None) -> int:
    """How large the table of a library is on this machine; 0 where there is none."""
    try:
        return 0 if folder is None else _file_of(store, folder).stat().st_size
    except OSError:
        return 0


def _file_of(store: Store, folder: Path) -> Path:
    return folder / f"{table_name(store)}.safetensors"
