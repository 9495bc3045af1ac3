"""Cards of items in a file on this machine, with checksums: a cache that cannot make a proof wrong.

A small file of its own: the tables of both rungs of bounds keep their cards with it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gare.atomic import replacing
from gare.interaction.score_cards import flat_tensors, from_flat
from gare.library.store.row_checksums import vectors_sum

Cards = TypeVar("Cards")


def save_cards(file: Path, keys: Sequence[str], cards: Any) -> None:
    """Write cards, one a key; `cards` is a dataclass of tensors and of other such dataclasses."""
    tensors = {name: tensor.cpu().contiguous() for name, tensor in flat_tensors(cards).items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as place:
        save_file(tensors, place, {"keys": json.dumps(list(keys)), "sums": json.dumps(_sums(tensors))})


def load_cards(file: Path, kind: type[Cards]) -> tuple[list[str], Cards] | None:
    """Keys and cards; None where there is no file, or one that cannot be read or trusted."""
    try:
        with safe_open(file, "pt") as opened:
            keys = json.loads(opened.metadata()["keys"])
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            sums = json.loads(opened.metadata()["sums"])
        cards = from_flat(kind, tensors)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None
    is_whole = {len(tensor) for tensor in tensors.values()} == {len(keys)}
    return (keys, cards) if is_whole and sums == _sums(tensors) else None


def _sums(tensors: dict[str, Tensor]) -> dict[str, int]:
    """A bit that flips in the file must not make a proof wrong."""
    return {name: vectors_sum(tensor.numpy().tobytes()) for name, tensor in tensors.items()}
