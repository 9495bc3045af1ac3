"""The items of a library on a GPU: their cards are made from the store once, then follow what comes and goes.

Whoever calls takes turns: nothing here is made for two threads at once. Shapes: V items, T texts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gare.errors import DamagedLibraryError
from gare.interaction.resident_cards import EXTRA_ROWS, card_bytes
from gare.interaction.resident_table import BLOCK, MOST_ATOMS, ResidentTable, can_reside
from gare.library.search.bound_table import Progress
from gare.library.search.damaged_items import DamagedItems
from gare.library.search.item_frames import card_keys, list_items
from gare.library.store import Store
from gare.library.store.read_deadline import check_deadline
from gare.library.store.stored_frames import unpack_frames
from gare.model import GARE
from gare.types import TextFeatures, VideoFeatures, block_slices

if TYPE_CHECKING:
    import pyarrow as pa

MOST_TEXTS = 32
"""Texts that are bounded in one pass. Sixteen cost as much as one; what a pass needs grows with them."""
_ITEMS_AT_ONCE = 1024
_SPARE_BYTES = 2**29  # for the model, and for what is left to be scored


class CannotHoldError(Exception):
    """Why a GPU cannot hold the items, and what to do."""


@dataclass(frozen=True)
class HeldItems:
    """Which items there were at some time, and the row of each in the table."""

    version: int | None
    """The version of the store that was listed; None where a store has no versions."""
    ids: list[str]
    keys: list[str]
    row_of: Mapping[str, int]
    """By the name of the frames (`card_keys`). Copies share a row."""
    rows_V: Tensor
    """−1 for an item without a row: what is damaged has none."""

    def rows(self, keys: Sequence[str]) -> Tensor:
        """The rows of other items, or of some of these."""
        found = [self.row_of.get(key, -1) for key in keys]
        return torch.tensor(found, dtype=torch.long, device=self.rows_V.device)


class ResidentItems:
    """Keeps the cards of a store's items on one or several devices.

    Args:
        damaged: reads items, and leaves out what cannot be trusted.
        devices: over which the items are spread; results are on the first.
    """

    def __init__(
        self, store: Store, model: GARE, damaged: DamagedItems, devices: Sequence[torch.device]
    ) -> None:
        self._store, self._model, self._damaged = store, model, damaged
        self._devices = list(devices)
        self._table: ResidentTable | None = None
        self._row_of: dict[str, int] = {}
        self._now: HeldItems | None = None

    @property
    def num_bytes(self) -> int:
        """Memory that the cards take."""
        return 0 if self._table is None else self._table.num_bytes

    def follow(self, on_progress: Progress) -> HeldItems:
        """What the store has now. Cards of new items are made, rows of items that are gone become free.

        When the deadline is over, what was made is kept, and the next call goes on from there.

        Raises:
            CannotHoldError: the items do not fit.
        """
        version = self._store.version()
        if self._now is not None and version is not None and version == self._now.version:
            return self._now
        ids, keys = list_items(self._store, None)
        if self._now is not None and (ids, keys) == (self._now.ids, self._now.keys):
            self._now = replace(self._now, version=version)
            return self._now
        self._now = None
        wanted = dict(zip(keys, ids, strict=True))
        gone = [key for key in self._row_of if key not in wanted]
        if gone and self._table is not None:
            self._table.remove([self._row_of.pop(key) for key in gone])
        self._fill({key: item for key, item in wanted.items() if key not in self._row_of}, on_progress)
        home = torch.zeros(0, dtype=torch.long, device=self._devices[0])
        now = HeldItems(version, ids, keys, dict(self._row_of), home)
        self._now = replace(now, rows_V=now.rows(keys))
        return self._now

    def bounds(self, text: TextFeatures) -> tuple[Tensor, Tensor]:
        """Lower and upper bounds of every row, each [T, rows].

        Raises:
            CannotHoldError: a kernel failed.
        """
        if self._table is None:
            none = torch.zeros(len(text), 0, device=self._devices[0])
            return none, none
        try:
            return self._table.bounds(text)
        except Exception as error:  # of Triton, its compiler, the driver: each has errors of its own
            raise CannotHoldError(f"its kernel failed ({_in_a_line(error)})") from error

    def _fill(self, missing: Mapping[str, str], on_progress: Progress) -> None:
        """Add the cards of these items, ids by the name of their frames."""
        if not missing:
            return
        table, keys = self._open_table(len(missing)), list(missing)
        for block in block_slices(len(keys), _ITEMS_AT_ONCE):
            check_deadline()
            try:
                rows = self._damaged.read_vectors([missing[key] for key in keys[block]])
            except DamagedLibraryError:  # not one of them can be read; the others have their cards
                continue
            if not len(rows):
                continue
            try:
                names, video = self._with_rows(rows)
                added = table.add(video, more=len(keys) - block.stop)
            except RuntimeError as error:  # memory that others took meanwhile, or the driver
                raise CannotHoldError(f"making cards failed ({_in_a_line(error)})") from error
            self._row_of |= zip(names, added, strict=True)
            on_progress(min(block.stop, len(keys)), len(keys))

    def _with_rows(self, rows: pa.Table) -> tuple[list[str], VideoFeatures]:
        """Names and frames of what gets a row, as many frames each as the model takes."""
        video = unpack_frames(rows["vectors"], self._model.dim, self._devices[0])
        return card_keys(rows), video.pad(self._store.stamp.num_frames)

    @property
    def _num_heads(self) -> int:
        interaction = self._model.interaction
        return interaction.config.num_heads if can_reside(interaction) else 1

    def _open_table(self, num_new: int) -> ResidentTable:
        """The table, if it has room for so many more; keys of one byte where those of two do not fit."""
        num_items, num_devices = len(self._row_of) + num_new, len(self._devices)
        num_lacking = num_new if self._table is None else self._table.num_lacking(num_new)
        stamp = self._store.stamp
        num_atoms = stamp.num_frames * self._num_heads
        if num_atoms > MOST_ATOMS:
            raise CannotHoldError(
                f"{stamp.num_frames} frames × {self._num_heads} heads are more than the {MOST_ATOMS} that "
                "its kernel takes"
            )
        pass_numbers = MOST_TEXTS * ((num_atoms + EXTRA_ROWS) * min(BLOCK, num_items) + 4 * num_items)
        besides = 4 * pass_numbers + _SPARE_BYTES
        free = min(free_bytes(device) for device in self._devices) - besides
        choices = (True, False) if self._table is None else (self._table.wide_keys,)
        for wide_keys in choices:
            each = card_bytes(stamp.num_frames, self._num_heads, stamp.dim, wide_keys=wide_keys)
            needed = each * -(-num_lacking // num_devices)
            if needed <= free:
                break
        else:
            where = "each of the GPUs" if num_devices > 1 else "the GPU"
            needed, free = needed + besides, free + besides
            raise CannotHoldError(
                f"{num_items:,} items need {needed / 1e9:.1f} GB more on {where}, and {free / 1e9:.1f} GB "
                "are free. Use a larger GPU, several (device cuda takes all that it sees), or shards on a "
                "cluster (gare serve --ray)"
            )
        if self._table is None:
            interaction = self._model.interaction
            assert can_reside(interaction)
            self._table = ResidentTable(interaction, self._devices, wide_keys=wide_keys)
        return self._table


def free_bytes(device: torch.device) -> int:
    """Memory that can still be taken there, what torch keeps for itself included."""
    if device.type != "cuda":  # in tests: all of the main memory, whoever else is busy
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def _in_a_line(error: Exception) -> str:
    """What an error says first; a compiler says much more."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]
