"""Score cards: what an interaction computes once for each video and may keep.

An interaction that prepares nothing keeps the frames themselves (`FrameCards`). Others add fields; the
functions here take rows of a card, move it, and fill it block by block, whatever its fields are.

Shapes: O owners (videos, or texts), V videos, F frames, D embedding.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Self, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor

from gare.settings import Settings
from gare.types import Rows, VideoFeatures, block_slices

if TYPE_CHECKING:
    from gare.interaction.interaction import InteractionConfig

OWNER_NUMBERS = {"cpu": 2**23, "cuda": 2**28}
"""How many numbers one tensor of a block's cards may hold while they are made: 32 MB on a CPU."""

Card = TypeVar("Card")


@dataclass(frozen=True)
class ScoreCards(ABC):
    """Videos made ready for any text; valid as long as the weights and the videos stay the same."""

    config: InteractionConfig
    """The interaction that made them, and that alone can read them."""

    @property
    @abstractmethod
    def video(self) -> VideoFeatures:
        """The frames behind the cards."""

    def __len__(self) -> int:
        return len(self.video)

    def __getitem__(self, rows: Rows) -> Self:
        return map_tensors(self, lambda tensor: tensor[rows], owners_only=True)

    def to(self, device: torch.device | str) -> Self:
        """The same cards on another device."""
        return map_tensors(self, lambda tensor: tensor.to(device))


@dataclass(frozen=True)
class FrameCards(ScoreCards):
    """The frames as they are: for interactions that prepare nothing."""

    frames_VFD: Tensor
    mask_VF: Tensor
    patches_VFPD: Tensor | None = None

    @property
    def video(self) -> VideoFeatures:
        return VideoFeatures(self.frames_VFD, self.mask_VF, self.patches_VFPD)


def features_of(video: VideoFeatures | ScoreCards) -> VideoFeatures:
    """The frames of videos, whether they are made ready or not."""
    return video.video if isinstance(video, ScoreCards) else video


def map_tensors(card: Card, function: Callable[[Tensor], Tensor], *, owners_only: bool = False) -> Card:
    """The same card with every tensor changed; `owners_only` leaves alone what all owners share."""
    changes: dict[str, Any] = {}
    for field in fields(card):  # type: ignore[arg-type]
        value = getattr(card, field.name)
        if isinstance(value, Tensor) and (is_per_owner(field.name) or not owners_only):
            changes[field.name] = function(value)
        elif is_dataclass(value) and not isinstance(value, Settings):
            changes[field.name] = map_tensors(value, function, owners_only=owners_only)
    return replace(card, **changes)  # type: ignore[type-var]


def cards_in_blocks(make: Callable[[VideoFeatures], ScoreCards], video: VideoFeatures, size: int) -> Any:
    """`make` of all videos, `size` at a time, so that no more than the cards themselves is ever held."""
    if len(video) <= size or torch.is_grad_enabled():
        return make(video)
    whole: ScoreCards | None = None
    for rows in block_slices(len(video), size):
        part = make(video[rows])
        if whole is None:
            whole = map_tensors(
                part, lambda tensor: tensor.new_empty(len(video), *tensor.shape[1:]), owners_only=True
            )
        _copy_owners(part, whole, rows.start)
    return whole


def owners_per_block(num_atoms: int, dim: int, device: torch.device) -> int:
    """How many owners' cards are made at a time: their tensors hold num_atoms × dim numbers an owner."""
    budget = OWNER_NUMBERS.get(device.type, OWNER_NUMBERS["cpu"])
    return max(1, budget // (num_atoms * max(dim, num_atoms)))


def is_per_owner(name: str) -> bool:
    """Whether a tensor has a row for each owner: its shape suffix begins with V or O.

    >>> is_per_owner("gram_VFF"), is_per_owner("scaled_D")
    (True, False)
    """
    return re.search(r"_[VO][A-Z]*$", name) is not None


def _copy_owners(part: Any, whole: Any, start: int) -> None:
    """Put the rows of a block's cards into their place."""
    for field in fields(part):
        ours, theirs = getattr(part, field.name), getattr(whole, field.name)
        if isinstance(ours, Tensor) and is_per_owner(field.name):
            theirs[start : start + len(ours)] = ours
        elif is_dataclass(ours) and not isinstance(ours, Settings):
            _copy_owners(ours, theirs, start)


# --- any dataclass of tensors -------------------------------------------------------------------------------


def flat_tensors(cards: Any, prefix: str = "") -> dict[str, Tensor]:
    """Every tensor of a dataclass of tensors and of other such dataclasses, by a name with dots."""
    tensors: dict[str, Tensor] = {}
    for field in fields(cards):
        value = getattr(cards, field.name)
        if isinstance(value, Tensor):
            tensors[prefix + field.name] = value
        elif is_dataclass(value):
            tensors |= flat_tensors(value, f"{prefix}{field.name}.")
    return tensors


def from_flat(kind: type[Card], tensors: Mapping[str, Tensor], prefix: str = "") -> Card:
    """The dataclass whose `flat_tensors` these are; what is optional and not there is None."""
    values: dict[str, Any] = {}
    for name, hint in get_type_hints(kind).items():
        kinds = [part for part in get_args(hint) or (hint,) if part is not type(None)]
        if len(get_args(hint)) > 1 and not any(key.startswith(prefix + name) for key in tensors):
            values[name] = None
        elif kinds[0] is Tensor:
            values[name] = tensors[prefix + name]
        else:
            values[name] = from_flat(kinds[0], tensors, f"{prefix}{name}.")
    return kind(**values)


def cat_cards(parts: Sequence[Card]) -> Card:
    """The cards of all parts one after the other; all have the same number of frames."""
    if len(parts) == 1:
        return parts[0]
    flat = [flat_tensors(part) for part in parts]
    return from_flat(type(parts[0]), {name: torch.cat([part[name] for part in flat]) for name in flat[0]})


def num_bytes(cards: Any) -> int:
    """How much memory cards take."""
    return sum(tensor.nbytes for tensor in flat_tensors(cards).values())
