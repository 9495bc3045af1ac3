"""A table of videos in the memory of a GPU, or of several, that finds the best of them for certain.

Cards are made once and stay (`resident_cards.py`, `resident_chunk.py`). Videos come and go: the row of one
that is gone is taken by the next. A search climbs a ladder (`docs/proof.md`):

1. ball and slabs give every video the most that it can score, from two vectors;
2. keys give the most promising of them a lower bound, the k-th best of which is a threshold;
3. keys bound what can still reach it;
4. what is left then is scored in float64.

The host waits for the device three times: for how many videos are left after each rung, and for the lists.
What comes before the first of these is always the same, and launched at once (`kernel_calls_cuda.py`).
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
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from gare.interaction.proven_pairs import ProvenList, ProvenPairs, reached
from gare.interaction.resident_cards import TextPlanes, make_resident
from gare.interaction.resident_chunk import Chunk, whole_lines
from gare.types import TextFeatures, VideoFeatures, block_slices

if TYPE_CHECKING:
    from gare.interaction.cosine_bounds_cuda import Rules
    from gare.interaction.gap_aware import GapAware
    from gare.interaction.gap_aware_bounds import GapAwareBounds
    from gare.interaction.kernel_calls_cuda import Replayed
    from gare.interaction.pair_scores_cuda import PairScorer

CHUNK = 2**20
"""Videos whose cards are allocated together, at most."""
BLOCK = 2**16
"""Videos whose keys are multiplied at once: their products take 4 bytes a text and row of a card."""
MOST_ATOMS = 124
"""Frames × heads of a video whose products fit into a tile of the kernel."""
_SMALLEST_CHUNK = 1024
_MADE_AT_ONCE = 1024  # their atoms in float64 are 50 MB, several times over
_PAIRS_AT_ONCE = 2**14
_WHOLE_AT_ONCE = 1024  # pairs whose frames are too many for the kernel that scores them
_TEXTS_AT_ONCE = 64  # the more texts, the more videos are left for one of them
_LEAST_SEEDS = 32

Fetch = Callable[[Tensor], VideoFeatures]


@dataclass(frozen=True)
class _Begun:
    """What is known of a search after its first rung. Another search may overwrite it."""

    planes: dict[torch.device, TextPlanes]
    upper_TV: Tensor
    least_T: Tensor
    """A score that as many videos reach as are wanted."""
    is_left_V: Tensor
    """Which videos can still be in a list."""


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
        self._chunks: list[Chunk] = []

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
        text_TD, used = text.text_TD.to(self._devices[0]), tuple(chunk.used for chunk in self._chunks)
        is_one = len(self._chunks) == 1
        begun: _Begun = (
            self._replayed(self._begin, text_TD, top, used) if is_one else self._begin(text_TD, top, used)
        )
        rows_U = begun.is_left_V.nonzero()[:, 0]
        lower_TU, upper_TU = self._bounds_at(begun.planes, rows_U)
        # A text has its bounds from both rungs; the others are below the threshold.
        upper_TU = torch.minimum(upper_TU, begun.upper_TV[:, rows_U])
        least_T = torch.maximum(begun.least_T, _last_of(lower_TU, top))
        others_T = least_T if len(rows_U) < len(self) else torch.full_like(least_T, -torch.inf)
        search = ProvenPairs(upper_TU, rows_U, others_T, top)
        while True:
            pair_P2, is_all = search.left(least_T)
            if len(pair_P2):
                scores = [
                    self._score(text_TD.double(), pair_P2[part], rows_U, fetch)
                    for part in block_slices(len(pair_P2), _PAIRS_AT_ONCE)
                ]
                search.add(pair_P2, torch.cat(scores))
            if is_all or not len(pair_P2):
                return search.lists()
            least_T = torch.maximum(least_T, search.last())

    def _begin(self, text_TD: Tensor, top: int, _: tuple[int, ...]) -> _Begun:
        """The first rung, and a threshold. It waits for nothing where all videos are in one chunk.

        What is unnamed is how many videos each chunk has had: the kernels launched depend on it.
        """
        planes = self._planes(text_TD)
        upper_TV, seed_TN, is_seed_TN = self._first_rung(planes, top)
        least_T = self._threshold(planes, seed_TN, is_seed_TN, top)
        return _Begun(planes, upper_TV, least_T, (upper_TV >= reached(least_T)).any(dim=0))

    @cached_property
    def _replayed(self) -> Replayed:
        from gare.interaction.kernel_calls_cuda import Replayed

        return Replayed()

    @torch.no_grad()
    def bounds(self, text: TextFeatures) -> tuple[Tensor, Tensor]:
        """Lower and upper bounds of all scores by keys, each [T, V]; −∞ for videos that are gone."""
        home, planes = self._devices[0], self._planes(text.text_TD)
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
        return self._first_rung(self._planes(text.text_TD), top)[0]

    def _planes(self, text_TD: Tensor) -> dict[torch.device, TextPlanes]:
        """Texts as integers, on each device."""
        planes = TextPlanes.round(text_TD.to(self._devices[0]))
        return {
            device: planes
            if device == self._devices[0]
            else TextPlanes(planes.planes_T2D.to(device), planes.numbers_T6.to(device))
            for device in self._devices
        }

    def _filled_chunks(self) -> list[Chunk]:
        return [chunk for chunk in self._chunks if chunk.num_videos]

    @property
    def _rules(self) -> Rules:
        from gare.interaction.cosine_bounds_cuda import Rules

        config = self._interaction.config
        return Rules(
            corrects_text=config.corrected_side == "text",
            sign=1 if config.gap_direction == "video_minus_text" else -1,
            temperature=None if config.pooling == "mean" else config.pooling_temperature,
        )

    def _first_rung(self, planes: dict[torch.device, TextPlanes], top: int) -> tuple[Tensor, Tensor, Tensor]:
        """The most that each video can score, [T, V]; rows of the most promising, [T, N]; which are real."""
        from gare.interaction import ball_bounds_cuda

        home, chunks = self._devices[0], self._filled_chunks()
        num_texts = len(planes[home].planes_T2D)
        upper_TV = torch.full((num_texts, self.num_rows), -torch.inf, device=home)
        parts = []
        for chunk in chunks:
            cards = chunk.filled()
            own = upper_TV[:, chunk.first : chunk.first + len(cards)]
            target = own if chunk.device == home else torch.empty(own.shape, device=chunk.device)
            with _on(chunk.device):
                best_TG, place_TG = ball_bounds_cuda.first_bounds(
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

    def _chunk_bounds(self, chunk: Chunk, planes: TextPlanes, rows_U: Tensor) -> tuple[Tensor, Tensor]:
        from gare.interaction import key_bounds_cuda

        with _on(chunk.device):
            parts = [
                key_bounds_cuda.bounds_of(planes, chunk.cards, self._rules, rows_U[part])
                for part in block_slices(len(rows_U), BLOCK)
            ]
        if not parts:
            none = torch.zeros(len(planes.planes_T2D), 0, device=chunk.device)
            return none, none
        lower, upper = zip(*parts, strict=True)
        return torch.cat(lower, dim=1), torch.cat(upper, dim=1)

    def _score(self, text_TD: Tensor, pair_P2: Tensor, rows_U: Tensor, fetch: Fetch) -> Tensor:
        """Exact scores of pairs, [P], on the first device."""
        text_P = pair_P2[:, 0].contiguous()
        video = fetch(rows_U[pair_P2[:, 1]]).to(self._devices[0])
        if self._scorer.fits(video):
            return self._scorer(text_TD, text_P, video)
        parts = [
            self._double.score_each(
                TextFeatures.from_vectors(text_TD[text_P[part]]), video[part].to(torch.float64)
            )
            for part in block_slices(len(video), _WHOLE_AT_ONCE)
        ]
        return torch.cat(parts)

    @cached_property
    def _scorer(self) -> PairScorer:
        from gare.interaction.pair_scores_cuda import PairScorer

        return PairScorer.of(self._double)

    def _bounds_on(self, device: torch.device) -> GapAwareBounds:
        rules = self._interaction.bound_rules
        return replace(rules, net=rules.net.to(device))

    def _open_chunk(self, num_frames: int, to_come: int) -> Chunk:
        """One with room for videos of so many frames, on the device that has the fewest rows if it is new."""
        for chunk in self._chunks:
            if chunk.num_frames == num_frames and chunk.room:
                return chunk
        rows = {device: 0 for device in self._devices}
        for chunk in self._chunks:
            rows[chunk.device] += chunk.capacity
        share = -(-max(to_come, self._least_growth) // len(self._devices))
        capacity = whole_lines(min(CHUNK, max(_SMALLEST_CHUNK, share)))
        self._chunks.append(Chunk(min(rows, key=rows.__getitem__), num_frames, capacity, self.num_rows))
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


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches where torch is."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _last_of(lower_TN: Tensor, top: int) -> Tensor:
    """The `top`-th largest of each text, [T]; −∞ where there are fewer."""
    if lower_TN.shape[1] < top:
        return torch.full((len(lower_TN),), -torch.inf, dtype=torch.float64, device=lower_TN.device)
    return lower_TN.topk(top, dim=1).values[:, -1].double()
