"""A table of videos in the memory of a GPU, or of several, that finds the best of them for certain.

Cards are made once and stay (`resident_cards.py`). Videos come and go: the row of one that is gone is taken
by the next. A search bounds every score, takes the k-th best lower bound for a threshold, and scores in
float64 what can still reach it. The frames behind that are asked for by their rows: they may be on the GPU,
in main memory or in a store.

Imports Triton when it searches. Shapes: T texts, V videos, F frames, P pairs, K numbers of a card.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from gare.interaction.resident_cards import ResidentCards, TextPlanes, make_resident
from gare.types import TextFeatures, VideoFeatures, block_slices

if TYPE_CHECKING:
    from gare.interaction.gap_aware import GapAware
    from gare.interaction.gap_aware_bounds import GapAwareBounds

CHUNK = 2**16
"""Videos whose cards are allocated together, at most."""
MOST_ATOMS = 124
"""Frames × heads of a video whose products fit into a tile of the kernel."""
_SMALLEST_CHUNK = 1024
_MADE_AT_ONCE = 1024  # their atoms in float64 are 50 MB, several times over
_PAIRS_AT_ONCE = 4096
_MOST_LEFT = 2**16  # pairs: where bounds leave more, the likeliest are scored first
_GROUP = 32
_ROUNDING = 1e-6  # of a threshold in float32

Fetch = Callable[[Tensor], VideoFeatures]


@dataclass(frozen=True)
class ProvenList:
    """The best videos of one text, and why no other belongs among them."""

    rows: list[int]
    scores: list[float]
    """In float64, best first; equal ones by row."""
    num_scored: int
    next_bound: float
    """The most that any video can score that was not scored; −1 where all were."""


class ResidentTable:
    """The cards of videos on one or several devices.

    Args:
        interaction: GARE with frames as context and the gap as query, on any device.
        devices: where chunks are put, in turns.
        wide_keys: two bytes for a number of a key. One byte halves the table, and bounds leave more.
    """

    def __init__(
        self, interaction: GapAware, devices: Sequence[torch.device], *, wide_keys: bool = True
    ) -> None:
        if not can_reside(interaction):
            raise ValueError("only GARE with frames as context and the gap as query has resident bounds")
        self._interaction, self._devices, self.wide_keys = interaction, list(devices), wide_keys
        self._double = copy.deepcopy(interaction).to(self._devices[0], torch.float64).for_search()
        self._chunks: list[_Chunk] = []

    def __len__(self) -> int:
        return sum(chunk.num_videos for chunk in self._chunks)

    @property
    def num_rows(self) -> int:
        """Rows of videos, of those that are gone, and of those that are to come."""
        return sum(chunk.capacity for chunk in self._chunks)

    def num_lacking(self, num_new: int) -> int:
        """Rows that will be allocated when so many videos come, at most, on all devices together."""
        lacking = num_new - (self.num_rows - len(self))
        return 0 if lacking <= 0 else max(lacking, self._least_growth) + len(self._devices) * _SMALLEST_CHUNK

    @property
    def _least_growth(self) -> int:
        """Chunks of a large table are large too: each of them costs a launch of the kernels."""
        return min(CHUNK * len(self._devices), self.num_rows // 8)

    @property
    def num_bytes(self) -> int:
        """Memory that chunks take, filled or not."""
        return sum(chunk.num_bytes for chunk in self._chunks)

    @torch.no_grad()
    def add(self, video: VideoFeatures, *, more: int = 0) -> list[int]:
        """Make the cards of these videos; their rows.

        Args:
            more: how many are to come after these, so that chunks are made for all of them.
        """
        rows: list[int] = []
        for part in video.blocks(_MADE_AT_ONCE):
            done = 0
            while done < len(part):
                chunk = self._open_chunk(part.frames_VFD.shape[1], len(video) - len(rows) + more)
                some = part[done : done + chunk.room].to(chunk.device)
                cards = make_resident(self._bounds_on(chunk.device), some, wide_keys=self.wide_keys)
                rows += [chunk.first + place for place in chunk.put(cards)]
                done += len(some)
        return rows

    def remove(self, rows: Sequence[int]) -> None:
        """Leave these videos out from now on; their rows are given to others."""
        for chunk in self._chunks:
            chunk.free([row - chunk.first for row in rows if row - chunk.first in range(chunk.capacity)])

    @torch.no_grad()
    def find(self, text: TextFeatures, top: int, fetch: Fetch) -> list[ProvenList]:
        """The best `top` videos of each text; `fetch` gives the features behind rows."""
        lower_TV, upper_TV = self.bounds(text)
        least_T = _threshold(lower_TV, top)
        search = _Pairs(upper_TV, top)
        while True:
            pair_P2, is_all = search.left(least_T)
            if len(pair_P2):
                scores = [
                    self._score(text, pair_P2[rows], fetch)
                    for rows in block_slices(len(pair_P2), _PAIRS_AT_ONCE)
                ]
                search.add(pair_P2, torch.cat(scores))
                least_T = torch.maximum(least_T, search.last())
            if is_all or not len(pair_P2):
                return search.lists()

    @torch.no_grad()
    def bounds(self, text: TextFeatures) -> tuple[Tensor, Tensor]:
        """Lower and upper bounds of all scores, each [T, V]; −∞ for videos that are gone."""
        home = self._devices[0]
        lower_TV = torch.full((len(text), self.num_rows), -torch.inf, device=home)
        upper_TV = torch.full_like(lower_TV, -torch.inf)
        chunks = [chunk for chunk in self._chunks if chunk.num_videos]
        planes = {chunk.device: TextPlanes.round(text.text_TD.to(chunk.device)) for chunk in chunks}
        # Kernels of several devices run at the same time; results come together afterwards.
        parts = [self._chunk_bounds(chunk, planes[chunk.device]) for chunk in chunks]
        for chunk, (lower, upper) in zip(chunks, parts, strict=True):
            rows = slice(chunk.first, chunk.first + chunk.used)
            lower_TV[:, rows] = lower[:, : chunk.used].to(home)
            upper_TV[:, rows] = upper[:, : chunk.used].to(home)
            if chunk.gone:
                gone = torch.tensor(sorted(chunk.gone), device=home) + chunk.first
                lower_TV.index_fill_(1, gone, -torch.inf)
                upper_TV.index_fill_(1, gone, -torch.inf)
        return lower_TV, upper_TV

    def _chunk_bounds(self, chunk: _Chunk, planes: TextPlanes) -> tuple[Tensor, Tensor]:
        from gare.interaction import bounds_cuda

        config = self._interaction.config
        # Triton launches where torch is.
        with torch.cuda.device(chunk.device) if chunk.device.type == "cuda" else nullcontext():
            return bounds_cuda.bounds_of(
                planes,
                chunk.filled(),
                corrects_text=config.corrected_side == "text",
                sign=self._interaction.bound_rules.sign,
                temperature=None if config.pooling == "mean" else config.pooling_temperature,
            )

    def _score(self, text: TextFeatures, pair_P2: Tensor, fetch: Fetch) -> Tensor:
        """Exact scores of pairs, [P], on the first device."""
        home = self._devices[0]
        video = fetch(pair_P2[:, 1]).to(home).to(torch.float64)
        texts = text[pair_P2[:, 0].to(text.text_TD.device)].to(home).to(torch.float64)
        return self._double.score_each(texts, video)

    def _bounds_on(self, device: torch.device) -> GapAwareBounds:
        rules = self._interaction.bound_rules
        return replace(rules, net=rules.net.to(device))

    def _open_chunk(self, num_frames: int, to_come: int) -> _Chunk:
        """One with room for videos of so many frames, on the device that has the fewest rows if it is new."""
        for chunk in self._chunks:
            if chunk.num_frames == num_frames and chunk.room:
                return chunk
        rows = {device: 0 for device in self._devices}
        for chunk in self._chunks:
            rows[chunk.device] += chunk.capacity
        share = -(-max(to_come, self._least_growth) // len(self._devices))
        capacity = _whole_lines(min(CHUNK, max(_SMALLEST_CHUNK, share)))
        self._chunks.append(_Chunk(min(rows, key=rows.__getitem__), num_frames, capacity, self.num_rows))
        return self._chunks[-1]


def can_reside(interaction: object) -> TypeGuard[GapAware]:
    """Whether the bounds of an interaction can be computed by the kernels."""
    config: Any = getattr(interaction, "config", None)
    return (
        getattr(config, "name", None) == "gare"
        and config.query == "gap"
        and config.context == "frames"
        and not config.normalise
    )


class _Chunk:
    """Cards in memory that was allocated for `capacity` videos; `first` is the row of the first one."""

    def __init__(self, device: torch.device, num_frames: int, capacity: int, first: int) -> None:
        self.device, self.num_frames, self.capacity, self.first = device, num_frames, capacity, first
        self.gone: set[int] = set()
        self.used = 0
        self._cards: ResidentCards | None = None

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
        return places

    def free(self, places: Sequence[int]) -> None:
        """What is there now may be overwritten."""
        self.gone.update(place for place in places if place < self.used)

    def filled(self) -> ResidentCards:
        """Cards up to the last one, and a few that mean nothing: kernels are compiled for whole lines."""
        assert self._cards is not None
        return self._cards[: _whole_lines(self.used)]

    def _allocate(self, part: ResidentCards) -> ResidentCards:
        def room(rows: Tensor) -> Tensor:
            return rows.new_empty(self.capacity, *rows.shape[1:])

        return replace(
            part,
            high_VSD=room(part.high_VSD),
            low_VAD=None if part.low_VAD is None else room(part.low_VAD),
            # Kept with its videos side by side, as the kernel reads it.
            numbers_VK=part.numbers_VK.new_zeros(part.numbers_VK.shape[1], self.capacity).mT,
        )


class _Pairs:
    """Which pairs were scored, and the best of them."""

    def __init__(self, upper_TV: Tensor, top: int) -> None:
        self._upper_TV, self._top = upper_TV, top
        num_texts = len(upper_TV)
        self._score_TN = torch.full((num_texts, 0), -torch.inf, dtype=torch.float64, device=upper_TV.device)
        self._row_TN = torch.zeros(num_texts, 0, dtype=torch.long, device=upper_TV.device)
        self._scored_T = torch.zeros(num_texts, dtype=torch.long, device=upper_TV.device)

    def left(self, least_T: Tensor) -> tuple[Tensor, bool]:
        """Pairs that can still be hits, [P, 2] by text and row, and whether these are all."""
        least_T1 = (least_T - _ROUNDING).clamp_min(-2)[:, None].float()  # what is gone or scored has −∞
        pair_P2 = (self._upper_TV >= least_T1).nonzero()
        if len(pair_P2) <= _MOST_LEFT:
            return pair_P2, True
        num_texts, num_videos = self._upper_TV.shape
        size = min(num_videos, max(2 * self._top, _MOST_LEFT // num_texts))
        value_TN, row_TN = self._upper_TV.topk(size, dim=1)
        text_TN = torch.arange(num_texts, device=row_TN.device)[:, None].expand_as(row_TN)
        is_left_TN = value_TN >= least_T1
        return torch.stack([text_TN[is_left_TN], row_TN[is_left_TN]], dim=1), False

    def add(self, pair_P2: Tensor, score_P: Tensor) -> None:
        """These were scored."""
        text_P, row_P = pair_P2.unbind(dim=1)
        self._upper_TV[text_P, row_P] = -torch.inf
        count_T = torch.bincount(text_P, minlength=len(self._scored_T))
        self._scored_T += count_T
        place_P = torch.arange(len(text_P), device=text_P.device) - (count_T.cumsum(0) - count_T)[text_P]
        shape = (len(count_T), int(count_T.max()))
        score_TN = torch.full(shape, -torch.inf, dtype=torch.float64, device=score_P.device)
        row_TN = torch.zeros(shape, dtype=torch.long, device=score_P.device)
        score_TN[text_P, place_P] = score_P
        row_TN[text_P, place_P] = row_P
        score_TN, row_TN = (
            torch.cat([self._score_TN, score_TN], dim=1),
            torch.cat([self._row_TN, row_TN], dim=1),
        )
        # Equal scores by row.
        row_TN, order_TN = row_TN.sort(dim=1, stable=True)
        score_TN, by_score_TN = score_TN.gather(1, order_TN).sort(dim=1, descending=True, stable=True)
        self._score_TN = score_TN[:, : self._top]
        self._row_TN = row_TN.gather(1, by_score_TN)[:, : self._top]

    def last(self) -> Tensor:
        """The last score that is wanted of each text; −∞ while there are fewer."""
        if self._score_TN.shape[1] < self._top:
            return torch.full_like(self._score_TN[:, 0], -torch.inf)
        return self._score_TN[:, -1]

    def lists(self) -> list[ProvenList]:
        rest_T = self._upper_TV.amax(dim=1).clamp_min(-1).tolist()
        found = zip(
            self._row_TN.tolist(), self._score_TN.tolist(), self._scored_T.tolist(), rest_T, strict=True
        )
        lists = []
        for rows, scores, num_scored, rest in found:
            kept = sum(score > -torch.inf for score in scores)
            lists.append(ProvenList(rows[:kept], scores[:kept], num_scored, rest))
        return lists


def _whole_lines(num_videos: int) -> int:
    """So many videos, or up to 15 more."""
    return -(-num_videos // 16) * 16


def _threshold(lower_TV: Tensor, top: int) -> Tensor:
    """A score that `top` videos reach for certain, [T]; −∞ where there are fewer."""
    num_texts, num_videos = lower_TV.shape
    if num_videos < top:
        return torch.full((num_texts,), -torch.inf, dtype=torch.float64, device=lower_TV.device)
    if num_videos > 8 * _GROUP * top:  # the best of each group: different videos, and fewer to sort
        whole = num_videos // _GROUP * _GROUP
        lower_TV = lower_TV[:, :whole].unflatten(1, (-1, _GROUP)).amax(dim=2)
    return lower_TV.topk(top, dim=1).values[:, -1].double()
