"""The cards of some videos in memory that was allocated once: they come and go, their places stay.

Shapes: V videos, S rows of a card, A atoms, D embedding, K numbers of a card.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gare.interaction.resident_cards import ResidentCards


class Chunk:
    """Cards in memory that was allocated for `capacity` videos; `first` is the row of the first one."""

    def __init__(self, device: torch.device, num_frames: int, capacity: int, first: int) -> None:
        self.device, self.num_frames, self.capacity, self.first = device, num_frames, capacity, first
        self.gone: set[int] = set()
        self.used = 0
        self._cards: ResidentCards | None = None
        self._is_here_V = torch.zeros(capacity, dtype=torch.bool, device=device)

    @property
    def num_videos(self) -> int:
        return self.used - len(self.gone)

    @property
    def room(self) -> int:
        return self.capacity - self.num_videos

    @property
    def num_bytes(self) -> int:
        return 0 if self._cards is None else self._cards.num_bytes

    def put(self, part: ResidentCards) -> list[int]:
        """Keep these cards, no more than there is room for; their places."""
        if self._cards is None:
            self._cards = self._allocate(part)
        places = sorted(self.gone)[: len(part)]
        places += range(self.used, self.used + len(part) - len(places))
        index = torch.tensor(places, device=self.device)
        self._cards.high_VSD[index] = part.high_VSD
        self._cards.numbers_VK[index] = part.numbers_VK
        if part.low_VAD is not None:
            assert self._cards.low_VAD is not None
            self._cards.low_VAD[index] = part.low_VAD
        self.gone.difference_update(places)
        self.used = max(self.used, places[-1] + 1)
        self._is_here_V[index] = True
        return places

    def free(self, places: Sequence[int]) -> None:
        """What is there now may be overwritten."""
        places = [place for place in places if place < self.used]
        self.gone.update(places)
        self._is_here_V[torch.tensor(places, dtype=torch.long, device=self.device)] = False

    def is_here(self, count: int | None = None) -> Tensor:
        """Whether a place has a video, for the first `count`, or up to the last one that has."""
        return self._is_here_V[: self.used if count is None else count]

    @property
    def cards(self) -> ResidentCards:
        """All that there is room for."""
        assert self._cards is not None
        return self._cards

    def filled(self) -> ResidentCards:
        """Cards up to the last one, and a few that mean nothing: kernels are compiled for whole lines."""
        return self.cards[: whole_lines(self.used)]

    def _allocate(self, part: ResidentCards) -> ResidentCards:
        def room(rows: Tensor) -> Tensor:
            return rows.new_empty(self.capacity, *rows.shape[1:])

        return replace(
            part,
            high_VSD=room(part.high_VSD),
            low_VAD=None if part.low_VAD is None else room(part.low_VAD),
            numbers_VK=room(part.numbers_VK).zero_(),  # where no video is, kernels compute with them
        )


def whole_lines(num_videos: int) -> int:
    """So many videos, or up to 15 more."""
    return -(-num_videos // 16) * 16
