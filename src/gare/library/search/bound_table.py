"""What the bounds of every item's score need, on this machine: made once from the stored frames, then kept.

Two vectors an item in half precision, 2 KB at D = 512. A search reads them instead of the frames (12 KB) and
of the products that a score costs. The file is a cache: it can be deleted, and is brought up to date before
each exact search.

Shapes: V items, D embedding.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gare.atomic import replacing
from gare.interaction.score_bounds import Balls, BoundCards
from gare.library.search.damaged_items import DamagedItems
from gare.library.store import Store
from gare.library.store.read_deadline import check_deadline
from gare.library.store.row_checksums import vectors_sum
from gare.library.store.stored_frames import unpack_frames
from gare.model import GARE
from gare.types import block_slices

_ITEMS_AT_ONCE = 512
_SAVE_S = 60.0  # what is made of the table is kept, should the process be stopped
_DTYPE = torch.float16

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
        self._file = None
        if folder is not None:
            name = hashlib.blake2b(f"{store.uri}\n{store.stamp.fingerprint}".encode(), digest_size=12)
            self._file = folder / f"{name.hexdigest()}.safetensors"
            self._load(self._file)

    def __len__(self) -> int:
        return len(self._rows)

    def cards(
        self, ids: Sequence[str], frames_keys: Sequence[str], on_progress: Progress = lambda done, total: None
    ) -> tuple[BoundCards, Tensor] | None:
        """The cards of these items, and which items they belong to; what is missing is made.

        Damaged items have none. None: no bounds are known for this interaction.
        """
        missing = {key: item for key, item in zip(frames_keys, ids, strict=True) if key not in self._rows}
        if missing and not self._make(missing, on_progress):
            return None
        if self._cards is None:
            return None
        places = [place for place, key in enumerate(frames_keys) if key in self._rows]
        rows = torch.tensor([self._rows[frames_keys[place]] for place in places], dtype=torch.long)
        if len(rows) == len(self._cards) and torch.equal(rows, torch.arange(len(rows))):
            return self._cards, torch.tensor(places)
        return self._cards[rows.to(self._cards.pooled.radius_O.device)], torch.tensor(places)

    @torch.no_grad()
    def _make(self, missing: dict[str, str], on_progress: Progress) -> bool:
        """Add the cards of these items, ids by frames key; False where the interaction has no bounds."""
        keys, parts, new = list(missing), list[BoundCards](), list[str]()
        saved = time.monotonic()
        try:
            for block in block_slices(len(keys), _ITEMS_AT_ONCE):
                check_deadline()
                ids = [missing[key] for key in keys[block]]
                table = self._damaged.read_vectors(ids)
                if not len(table):
                    continue
                found = table["frames_key"].to_pylist()
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
        self._cards = _cat([*([] if self._cards is None else [self._cards]), *parts])
        self._rows |= {key: row for row, key in enumerate(keys, start=len(self._rows))}
        if self._file is not None:
            with suppress(OSError):  # a disk that is full or read-only costs time at the next start
                self._save(self._file)

    # --- the file -------------------------------------------------------------------------------------------

    def _save(self, file: Path) -> None:
        assert self._cards is not None
        tensors = {name: tensor.contiguous() for name, tensor in _flat(self._cards).items()}
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as place:
            save_file(
                tensors, place, {"keys": json.dumps(list(self._rows)), "sums": json.dumps(_sums(tensors))}
            )

    def _load(self, file: Path) -> None:
        """Take what the file has; one that cannot be read is made anew."""
        try:
            with safe_open(file, "pt") as opened:
                keys = json.loads(opened.metadata()["keys"])
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
                sums = json.loads(opened.metadata()["sums"])
            cards = _from_flat(tensors)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError):
            return
        if len(cards) == len(keys) and sums == _sums(tensors):
            self._cards = cards.to(self._model.device)
            self._rows = {key: row for row, key in enumerate(keys)}


def _sums(tensors: dict[str, Tensor]) -> dict[str, int]:
    """A bit that flips in the file must not make a proof wrong."""
    return {name: vectors_sum(tensor.cpu().numpy().tobytes()) for name, tensor in tensors.items()}


def _cat(parts: Sequence[BoundCards]) -> BoundCards:
    flat = [_flat(part) for part in parts]
    return _from_flat({name: torch.cat([part[name] for part in flat]) for name in flat[0]})


def _flat(cards: BoundCards) -> dict[str, Tensor]:
    tensors = {f"pooled.{name}": value for name, value in vars(cards.pooled).items()}
    if cards.increment is not None:
        tensors |= {f"increment.{name}": value for name, value in vars(cards.increment).items()}
    return tensors


def _from_flat(tensors: dict[str, Tensor]) -> BoundCards:
    balls = {
        part: Balls(*(tensors[f"{part}.{name}"] for name in ("centre_OD", "radius_O", "length_O")))
        for part in ("pooled", "increment")
        if f"{part}.centre_OD" in tensors
    }
    return BoundCards.join(balls["pooled"], balls.get("increment"))
