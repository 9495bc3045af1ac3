"""A table of videos in the memory of a GPU, or of several, that finds the best of them for certain.

Cards are made once and stay (`resident_cards.py`). Videos come and go: the row of one that is gone is taken
by the next. A search climbs a ladder (`docs/proof.md`):

1. ball and slabs give every video the most that it can score, from two vectors;
2. keys give the most promising of them a lower bound, the k-th best of which is a threshold;
3. keys bound what can still reach it;
4. what is left then is scored in float64.

The host waits for the device three times: for how many videos are left after each rung, and for the lists.
The frames of what is scored are asked for by their rows: they may be on the GPU, in main memory or in a
store.

Imports Triton when it searches. Shapes: T texts, V videos, U picked videos, G groups of videos, F frames,
P pairs, N of a list, K numbers of a card.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from gare.interaction.resident_cards import ResidentCards, TextPlanes, make_resident
from gare.types import TextFeatures, VideoFeatures, block_slices

if TYPE_CHECKING:
    from gare.interaction.bounds_cuda import Rules
    from gare.interaction.gap_aware import GapAware
    from gare.interaction.gap_aware_bounds import GapAwareBounds

CHUNK = 2**20
"""Videos whose cards are allocated together, at most."""
BLOCK = 2**16
"""Videos whose keys are multiplied at once: their products take 4 bytes a text and row of a card."""
MOST_ATOMS = 124
"""Frames × heads of a video whose products fit into a tile of the kernel."""
_SMALLEST_CHUNK = 1024
_MADE_AT_ONCE = 1024  # their atoms in float64 are 50 MB, several times over
_PAIRS_AT_ONCE = 4096
_MOST_LEFT = 2**16  # pairs: where bounds leave more, the likeliest are scored first
_TEXTS_AT_ONCE = 64  # the more texts, the more videos are left for one of them
_LEAST_SEEDS = 32
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
        lists: list[ProvenList] = []
        for part in block_slices(len(text), _TEXTS_AT_ONCE):
            lists += self._find(text[part], top, fetch)
        return lists

    def _find(self, text: TextFeatures, top: int, fetch: Fetch) -> list[ProvenList]:
        planes = self._planes(text)
        upper_TV, seed_TN, is_seed_TN = self._first_rung(planes, top)
        least_T = self._threshold(planes, seed_TN, is_seed_TN, top)
        rows_U = (upper_TV >= _reached(least_T)).any(dim=0).nonzero()[:, 0]
        lower_TU, upper_TU = self._bounds_at(planes, rows_U)
        # A text has its bounds from both rungs; the others are below the threshold.
        upper_TU = torch.minimum(upper_TU, upper_TV[:, rows_U])
        least_T = torch.maximum(least_T, _last_of(lower_TU, top))
        others_T = least_T if len(rows_U) < len(self) else torch.full_like(least_T, -torch.inf)
        search = _Pairs(upper_TU, rows_U, others_T, top)
        while True:
            pair_P2, is_all = search.left(least_T)
            if len(pair_P2):
                scores = [
                    self._score(text, pair_P2[part], rows_U, fetch)
                    for part in block_slices(len(pair_P2), _PAIRS_AT_ONCE)
                ]
                search.add(pair_P2, torch.cat(scores))
                least_T = torch.maximum(least_T, search.last())
            if is_all or not len(pair_P2):
                return search.lists()

    @torch.no_grad()
    def bounds(self, text: TextFeatures) -> tuple[Tensor, Tensor]:
        """Lower and upper bounds of all scores by keys, each [T, V]; −∞ for videos that are gone."""
        home, planes = self._devices[0], self._planes(text)
        lower_TV = torch.full((len(text), self.num_rows), -torch.inf, device=home)
        upper_TV = torch.full_like(lower_TV, -torch.inf)
        # Kernels of several devices run at the same time; results come together afterwards.
        parts = []
        for chunk in self._filled_chunks():
            all_rows = torch.arange(chunk.used, device=chunk.device)
            parts.append((chunk, self._chunk_bounds(chunk, planes[chunk.device], all_rows)))
        for chunk, found in parts:
            rows = slice(chunk.first, chunk.first + chunk.used)
            for bound_TV, of_chunk in zip((lower_TV, upper_TV), found, strict=True):
                bound_TV[:, rows] = of_chunk.masked_fill(~chunk.is_here(), -torch.inf).to(home)
        return lower_TV, upper_TV

    @torch.no_grad()
    def first_rung(self, text: TextFeatures, top: int) -> Tensor:
        """The most that each video can score by ball and slabs, [T, V]; −∞ for videos that are gone."""
        return self._first_rung(self._planes(text), top)[0]

    def _planes(self, text: TextFeatures) -> dict[torch.device, TextPlanes]:
        """Texts as integers, on each device."""
        planes = TextPlanes.round(text.text_TD.to(self._devices[0]))
        return {
            device: planes
            if device == self._devices[0]
            else TextPlanes(planes.planes_T2D.to(device), planes.numbers_T6.to(device))
            for device in self._devices
        }

    def _filled_chunks(self) -> list[_Chunk]:
        return [chunk for chunk in self._chunks if chunk.num_videos]

    @property
    def _rules(self) -> Rules:
        from gare.interaction.bounds_cuda import Rules

        config = self._interaction.config
        return Rules(
            corrects_text=config.corrected_side == "text",
            sign=1 if config.gap_direction == "video_minus_text" else -1,
            temperature=None if config.pooling == "mean" else config.pooling_temperature,
        )

    def _first_rung(self, planes: dict[torch.device, TextPlanes], top: int) -> tuple[Tensor, Tensor, Tensor]:
        """The most that each video can score, [T, V]; rows of the most promising, [T, N]; which are real."""
        from gare.interaction import bounds_cuda

        home, chunks = self._devices[0], self._filled_chunks()
        num_texts = len(planes[home].planes_T2D)
        upper_TV = torch.full((num_texts, self.num_rows), -torch.inf, device=home)
        parts = []
        for chunk in chunks:
            cards = chunk.filled()
            own = upper_TV[:, chunk.first : chunk.first + len(cards)]
            target = own if chunk.device == home else torch.empty(own.shape, device=chunk.device)
            with _on(chunk.device):
                best_TG, place_TG = bounds_cuda.first_bounds(
                    planes[chunk.device], cards, chunk.is_here(len(cards)), target, self._rules
                )
            parts.append((own, target, best_TG, place_TG.long() + chunk.first))
        for own, target, _, _ in parts:
            if own is not target:
                own.copy_(target)
        none = torch.zeros(num_texts, 0, device=home)
        best_TG = torch.cat([part[2].to(home) for part in parts] or [none], dim=1)
        row_TG = torch.cat([part[3].to(home) for part in parts] or [none.long()], dim=1)
        best_TN, group_TN = best_TG.topk(min(best_TG.shape[1], max(_LEAST_SEEDS, 2 * top)), dim=1)
        return upper_TV, row_TG.gather(1, group_TN), best_TN > -torch.inf

    def _threshold(
        self, planes: dict[torch.device, TextPlanes], seed_TN: Tensor, is_seed_TN: Tensor, top: int
    ) -> Tensor:
        """A score that `top` videos reach for certain, [T], by the keys of each text's seeds.

        Of a text only its own seeds count: among those of all texts a video may stand twice.
        """
        num_texts, num_seeds = seed_TN.shape
        if num_seeds < top:
            return torch.full((num_texts,), -torch.inf, dtype=torch.float64, device=seed_TN.device)
        lower_TM, _ = self._bounds_at(planes, seed_TN.flatten())
        lower_TN = lower_TM.unflatten(1, (num_texts, num_seeds)).diagonal(dim1=0, dim2=1).mT
        return _last_of(lower_TN.masked_fill(~is_seed_TN, -torch.inf), top)

    def _bounds_at(self, planes: dict[torch.device, TextPlanes], rows_U: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds by keys of the videos in these rows, each [T, U]."""
        home = self._devices[0]
        if len(self._chunks) == 1:
            return self._chunk_bounds(self._chunks[0], planes[home], rows_U)
        lower_TU = torch.empty(len(planes[home].planes_T2D), len(rows_U), device=home)
        upper_TU = torch.empty_like(lower_TU)
        for chunk in self._filled_chunks():
            places = ((rows_U >= chunk.first) & (rows_U < chunk.first + chunk.capacity)).nonzero()[:, 0]
            if len(places):
                rows = (rows_U[places] - chunk.first).to(chunk.device)
                lower, upper = self._chunk_bounds(chunk, planes[chunk.device], rows)
                lower_TU[:, places], upper_TU[:, places] = lower.to(home), upper.to(home)
        return lower_TU, upper_TU

    def _chunk_bounds(self, chunk: _Chunk, planes: TextPlanes, rows_U: Tensor) -> tuple[Tensor, Tensor]:
        from gare.interaction import bounds_cuda

        with _on(chunk.device):
            parts = [
                bounds_cuda.bounds_of(planes, chunk.cards, self._rules, rows_U[part])
                for part in block_slices(len(rows_U), BLOCK)
            ]
        if not parts:
            none = torch.zeros(len(planes.planes_T2D), 0, device=chunk.device)
            return none, none
        lower, upper = zip(*parts, strict=True)
        return torch.cat(lower, dim=1), torch.cat(upper, dim=1)

    def _score(self, text: TextFeatures, pair_P2: Tensor, rows_U: Tensor, fetch: Fetch) -> Tensor:
        """Exact scores of pairs, [P], on the first device."""
        home = self._devices[0]
        video = fetch(rows_U[pair_P2[:, 1]]).to(home).to(torch.float64)
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
        return self.cards[: _whole_lines(self.used)]

    def _allocate(self, part: ResidentCards) -> ResidentCards:
        def room(rows: Tensor) -> Tensor:
            return rows.new_empty(self.capacity, *rows.shape[1:])

        return replace(
            part,
            high_VSD=room(part.high_VSD),
            low_VAD=None if part.low_VAD is None else room(part.low_VAD),
            numbers_VK=room(part.numbers_VK).zero_(),  # where no video is, kernels compute with them
        )


class _Pairs:
    """Which pairs were scored, and the best of them.

    Args:
        upper_TU: the most that a text can score with each picked video.
        rows_U: of these videos, in rising order.
        others_T: the most that it can score with any other.
    """

    def __init__(self, upper_TU: Tensor, rows_U: Tensor, others_T: Tensor, top: int) -> None:
        self._upper_TU, self._rows_U, self._others_T, self._top = upper_TU, rows_U, others_T, top
        num_texts, device = len(upper_TU), upper_TU.device
        self._score_TN = torch.full((num_texts, top), -torch.inf, dtype=torch.float64, device=device)
        self._row_TN = torch.zeros(num_texts, top, dtype=torch.long, device=device)
        self._scored_T = torch.zeros(num_texts, dtype=torch.long, device=device)
        self._text_T = torch.arange(num_texts, device=device)

    def left(self, least_T: Tensor) -> tuple[Tensor, bool]:
        """Pairs that can still be hits, [P, 2] by text and place, and whether these are all."""
        least_T1 = _reached(least_T)
        pair_P2 = (self._upper_TU >= least_T1).nonzero()
        if len(pair_P2) <= _MOST_LEFT:
            return pair_P2, True
        num_texts, num_videos = self._upper_TU.shape
        size = min(num_videos, max(2 * self._top, _MOST_LEFT // num_texts))
        value_TN, place_TN = self._upper_TU.topk(size, dim=1)
        is_left_TN = value_TN >= least_T1
        text_TN = self._text_T[:, None].expand_as(place_TN)
        return torch.stack([text_TN[is_left_TN], place_TN[is_left_TN]], dim=1), False

    def add(self, pair_P2: Tensor, score_P: Tensor) -> None:
        """These were scored."""
        text_P, place_P = pair_P2.unbind(dim=1)
        self._upper_TU[text_P, place_P] = -torch.inf
        self._scored_T.index_add_(0, text_P, torch.ones_like(text_P))
        text_N = torch.cat([self._text_T.repeat_interleave(self._top), text_P])
        row_N = torch.cat([self._row_TN.flatten(), self._rows_U[place_P]])
        score_N = torch.cat([self._score_TN.flatten(), score_P])
        # By text, then score, then row.
        order_N = row_N.argsort(stable=True)
        order_N = order_N[score_N[order_N].argsort(descending=True, stable=True)]
        order_N = order_N[text_N[order_N].argsort(stable=True)]
        text_N = text_N[order_N]
        begin_T = torch.searchsorted(text_N, self._text_T)
        best_TN = order_N[begin_T[:, None] + torch.arange(self._top, device=text_N.device)]
        self._score_TN, self._row_TN = score_N[best_TN], row_N[best_TN]

    def last(self) -> Tensor:
        """The last score that is wanted of each text; −∞ while there are fewer."""
        return self._score_TN[:, -1]

    def lists(self) -> list[ProvenList]:
        rest_T = self._others_T
        if self._upper_TU.shape[1]:
            rest_T = torch.maximum(rest_T, self._upper_TU.amax(dim=1).double())
        numbers = [self._scored_T.double()[:, None], rest_T.clamp_min(-1)[:, None]]
        found = torch.cat([*numbers, self._row_TN.double(), self._score_TN], dim=1).tolist()
        lists = []
        for num_scored, rest, *both in found:
            rows, scores = both[: self._top], both[self._top :]
            kept = sum(score > -torch.inf for score in scores)
            lists.append(ProvenList([int(row) for row in rows[:kept]], scores[:kept], int(num_scored), rest))
        return lists


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches where torch is."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _whole_lines(num_videos: int) -> int:
    """So many videos, or up to 15 more."""
    return -(-num_videos // 16) * 16


def _reached(least_T: Tensor) -> Tensor:
    """What an upper bound must be at least, [T, 1] in float32; what is gone or scored has −∞."""
    return (least_T - _ROUNDING).clamp_min(-2)[:, None].float()


def _last_of(lower_TN: Tensor, top: int) -> Tensor:
    """The `top`-th largest of each text, [T]; −∞ where there are fewer."""
    if lower_TN.shape[1] < top:
        return torch.full((len(lower_TN),), -torch.inf, dtype=torch.float64, device=lower_TN.device)
    return lower_TN.topk(top, dim=1).values[:, -1].double()
