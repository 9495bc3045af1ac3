"""The keys of items, on this machine: the second rung of bounds, made for what the first one leaves.

About 17 KB an item at F = 12, D = 512, its two vectors included. Items are kept in chunks, each with a file
of its own that is written once. The folder is a cache: it can be deleted. No more is made than a quarter of
the machine's memory holds; what is left then is scored.

Shapes: V items.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gare.interaction.increment_keys import KeyCards
from gare.interaction.score_bounds import BoundCards
from gare.interaction.score_cards import cat_cards, map_tensors, num_bytes
from gare.library.search.bound_table import BoundTable, Progress, table_name
from gare.library.search.card_file import load_cards, save_cards
from gare.library.search.damaged_items import DamagedItems
from gare.library.search.item_frames import card_keys
from gare.library.store import Store
from gare.library.store.read_deadline import check_deadline
from gare.library.store.stored_frames import unpack_frames
from gare.model import GARE
from gare.types import Rows, block_slices

_ITEMS_AT_ONCE = 256  # in float64 their vectors are 12 MB at D = 512, six times
_PARTS_A_CHUNK = 16
_ITEMS_A_CHUNK = _PARTS_A_CHUNK * _ITEMS_AT_ONCE
_DTYPE = torch.int16  # with a scale for each key five times as near as float16


@dataclass(frozen=True)
class RefinedCards:
    """Both rungs of the same items: keys are made beside the two vectors as they are stored."""

    balls: BoundCards
    keys: KeyCards

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, rows: Rows) -> RefinedCards:
        return map_tensors(self, lambda tensor: tensor[rows])


class KeyTable:
    """The keys of a library's items.

    Args:
        store, model: of the library.
        damaged: reads items, and leaves out what cannot be trusted.
        folder: where chunks are kept between processes; None keeps them in memory only.
    """

    def __init__(self, store: Store, model: GARE, damaged: DamagedItems, folder: Path | None) -> None:
        self._model, self._damaged = model, damaged
        self._chunks: list[RefinedCards] = []
        self._starts: list[int] = []
        self._rows: dict[str, int] = {}
        self._bytes = 0
        self._most_bytes = _memory() // 4
        self._folder = None if folder is None else folder / f"{table_name(store)}-keys"
        if self._folder is not None:
            for file in sorted(self._folder.glob("*.safetensors")):
                found = load_cards(file, RefinedCards)
                if found is not None and not any(key in self._rows for key in found[0]):
                    self._hold(*found)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def chunk_sizes(self) -> list[int]:
        """How many items each chunk has in memory."""
        return list(map(len, self._chunks))

    def num_held(self, names: Sequence[str]) -> int:
        """How many of these are here."""
        return sum(map(self._rows.__contains__, names))

    def make(self, missing: Mapping[str, str], table: BoundTable, on_progress: Progress) -> None:
        """Add the keys of these items, ids by card key, as far as memory allows; `table` has the balls."""
        wanted = {key: item for key, item in missing.items() if key not in self._rows}
        keys, parts, new = list(wanted), list[RefinedCards](), list[str]()
        try:
            for block in block_slices(len(keys), _ITEMS_AT_ONCE):
                if self._bytes + sum(map(num_bytes, parts)) > self._most_bytes:
                    return
                check_deadline()
                found, part = self._make_part([wanted[key] for key in keys[block]], table)
                if part is None:
                    continue
                if len(parts) == _PARTS_A_CHUNK or (parts and not _fits(parts[0], part)):
                    self._add(new, parts)
                    parts, new = [], []
                parts.append(part)
                new += found
                on_progress(block.stop, len(keys))
        finally:  # also when time is up: the next search goes on from here
            if parts:
                self._add(new, parts)

    def blocks(self, names: Sequence[str]) -> Iterator[tuple[RefinedCards, Tensor, Tensor]]:
        """Cards that hold these items, as far as they are there; for each block which of its rows are wanted,
        and to which of the items they belong."""
        row_V = torch.tensor([self._rows.get(key, -1) for key in names], dtype=torch.long)
        row_V, place_V = row_V.sort()
        starts = torch.tensor([*self._starts, len(self._rows)])
        few: list[tuple[RefinedCards, Tensor]] = []
        for chunk, (first, last) in enumerate(torch.searchsorted(row_V, starts).unfold(0, 2, 1).tolist()):
            rows, cards = row_V[first:last] - self._starts[chunk], self._chunks[chunk]
            if not len(rows):
                continue
            if 2 * len(rows) >= len(cards):  # where most are wanted, bounds of all cost less than a copy
                yield cards, rows, place_V[first:last]
                continue
            part = cards[rows.to(self._model.device)]
            if few and not (_fits(few[0][0], part) and sum(len(one) for one, _ in few) < _ITEMS_A_CHUNK):
                yield _join(few)
                few = []
            few.append((part, place_V[first:last]))
        if few:
            yield _join(few)

    def _make_part(self, ids: Sequence[str], table: BoundTable) -> tuple[list[str], RefinedCards | None]:
        rows = self._damaged.read_vectors(ids)
        keys = card_keys(rows) if len(rows) else []
        if not keys or not all(key in table for key in keys):
            return [], None
        video = unpack_frames(rows["vectors"], self._model.dim, self._model.device)
        balls = table.rows(keys)
        found = self._model.interaction.key_cards(video, balls, _DTYPE)
        return (keys, RefinedCards(balls, found)) if found is not None else ([], None)

    def _add(self, keys: Sequence[str], parts: Sequence[RefinedCards]) -> None:
        cards = cat_cards(parts)
        self._hold(keys, cards)
        if self._folder is not None:
            name = hashlib.blake2b("\n".join(keys).encode(), digest_size=12).hexdigest()
            with suppress(OSError):  # a disk that is full or read-only costs time at the next start
                save_cards(self._folder / f"{name}.safetensors", keys, cards)

    def _hold(self, keys: Sequence[str], cards: RefinedCards) -> None:
        start = len(self._rows)
        self._rows |= {key: row for row, key in enumerate(keys, start=start)}
        self._bytes += num_bytes(cards)
        cards = map_tensors(cards, lambda tensor: tensor.to(self._model.device))
        # Every search may bring a few. Chunks are joined as the digits of a binary number are carried.
        while self._chunks and len(self._chunks[-1]) < 2 * len(cards) and _fits(self._chunks[-1], cards):
            if len(self._chunks[-1]) + len(cards) > _ITEMS_A_CHUNK:
                break
            cards, start = cat_cards([self._chunks.pop(), cards]), self._starts.pop()
        self._chunks.append(cards)
        self._starts.append(start)


def _join(parts: Sequence[tuple[RefinedCards, Tensor]]) -> tuple[RefinedCards, Tensor, Tensor]:
    """Some cards of several chunks as a block of its own."""
    cards = cat_cards([part for part, _ in parts])
    return cards, torch.arange(len(cards)), torch.cat([places for _, places in parts])


def _fits(one: RefinedCards, other: RefinedCards) -> bool:
    """Whether two parts can be one chunk: videos of as many frames."""
    ours, theirs = one.keys.frames, other.keys.frames
    return ours is None or theirs is None or ours.bias_OA.shape[1] == theirs.bias_OA.shape[1]


def _memory() -> int:
    """Bytes of main memory; 8 GB where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 8 * 10**9
