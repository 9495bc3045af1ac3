"""Scored items in order, and which of them become hits. Shapes: V items, F frames, D embedding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gare.library.search.item_frames import ItemFrames, Span
from gare.library.search.refined_moment import RefinedMoment
from gare.library.search.search_hit import Certificate, Explanation
from gare.library.search.search_request import By, SearchRequest
from gare.library.search.stage1 import unit_means
from gare.library.store.read_deadline import check_deadline
from gare.types import VideoFeatures

MOST_OTHERS = 50
"""Other moments of a file that go with a hit, at most."""
_SAME_COSINE = 0.985  # of two videos that a person would call copies: re-encoded, cropped a little


@dataclass
class Choice:
    """A place of a ranking that becomes a hit, and the places that it stands for."""

    place: int
    copies: list[int] = field(default_factory=list)
    """Near-copies."""
    others: list[int] = field(default_factory=list)
    """Other moments of the same file."""

    @property
    def moments(self) -> list[int]:
        """The hit's own place, then those of the other moments."""
        return [self.place, *self.others]


@dataclass(frozen=True)
class Ranking:
    """Items, best first, and what is known about them before the store is asked for their facts.

    Frames stay where they are: `rows` says where those of each item lie.
    """

    ids: list[str]
    scores: list[float]
    spans: list[Span]
    rows: list[int]
    frames: VideoFeatures
    # The rest is filled in for items that become hits.
    frame_scores: list[list[float]] = field(default_factory=list)
    """The cosine of the query with each frame, padded ones included."""
    frame_weights: list[list[float]] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    """Which of them become hits; places are those of this ranking."""
    refined: dict[str, RefinedMoment] = field(default_factory=dict)
    """Where the moments of hits begin and end, by id, where frames are dense enough to tell."""
    duplicates: list[tuple[str, ...]] = field(default_factory=list)
    """Ids of the near-copies that each hit stands for."""
    explanations: list[Explanation | None] = field(default_factory=list)
    certificate: Certificate | None = None
    """The proof that no other item belongs among them; None where there is none."""
    missing: tuple[str, ...] = ()
    """Ranges of items that could not be searched, where a search is spread over several machines."""

    @classmethod
    def by_score(cls, items: ItemFrames, scores_V: Tensor) -> Ranking:
        """Best first; equal scores by id, so that a search gives the same list every time."""
        scores, ids = scores_V.tolist(), items.ids
        order = sorted(range(len(ids)), key=lambda row: (-scores[row], ids[row]))
        return cls(
            [ids[row] for row in order],
            [scores[row] for row in order],
            [items.spans[row] for row in order],
            order,
            items.video,
        )

    @classmethod
    def nothing(cls) -> Ranking:
        """A ranking without items."""
        return cls([], [], [], [], VideoFeatures(torch.zeros(0, 1, 1), torch.zeros(0, 1, dtype=torch.bool)))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def video(self) -> VideoFeatures:
        """The frames in the order of the ids."""
        return self.frames[torch.tensor(self.rows, device=self.frames.mask_VF.device, dtype=torch.long)]

    @property
    def items(self) -> ItemFrames:
        """The items in the order of the ids."""
        return ItemFrames(self.ids, self.spans, self.video)

    def take(self, places: Sequence[int]) -> Ranking:
        """The items at these places, in this order."""
        ids = [self.ids[place] for place in places]
        scores = [self.scores[place] for place in places]
        spans = [self.spans[place] for place in places]
        return Ranking(ids, scores, spans, [self.rows[place] for place in places], self.frames)

    def merged(self, other: Ranking, keep: int) -> Ranking:
        """The best `keep` of both, with the frames of no other."""
        parts = [part.take(range(min(keep, len(part)))) for part in (self, other) if len(part)]
        items = ItemFrames(
            [item for part in parts for item in part.ids],
            [span for part in parts for span in part.spans],
            VideoFeatures.cat([part.video for part in parts]),
        )
        scores_V = torch.tensor([score for part in parts for score in part.scores], dtype=torch.float64)
        return Ranking.by_score(items, scores_V).take(range(min(keep, len(items))))

    def choose(self, request: SearchRequest) -> list[Choice]:
        """What becomes a hit, best first, up to the last hit that is wanted; those before `offset` too.

        A moment that overlaps a better one is left out. By file, the moments after a file's first go with it.
        What resembles an item is not that item: by file not its file, by moment nothing that overlaps it.
        """
        chosen: list[Choice] = []
        of_path: dict[str, list[Choice]] = {}
        alike = _Alike(self.video, request.reach) if request.unique and len(self) else None
        skipped = request.skipped
        liked = [span for item, span in zip(self.ids, self.spans, strict=True) if item in skipped]
        reach, least = request.reach, request.min_score
        for place, (score, span) in enumerate(zip(self.scores, self.spans, strict=True)):
            if least is not None and score < least:
                break
            is_full, known = len(chosen) == reach, of_path.get(span.path)
            if is_full and alike is None:  # what is left can only be a further moment of a file that is a hit
                if request.by == "moment":
                    break
                if not known:
                    continue
            if liked and any(_is_same(span, other, request.by) for other in liked):
                continue
            if known and any(
                span.overlaps(self.spans[other]) for choice in known for other in choice.moments
            ):
                continue
            if known and request.by == "file":
                if len(known[0].others) < MOST_OTHERS:
                    known[0].others.append(place)
            elif alike is not None and (copied := alike.find(place)) is not None:
                chosen[copied].copies.append(place)
            elif not is_full:
                chosen.append(Choice(place))
                of_path.setdefault(span.path, []).append(chosen[-1])
                if alike is not None:
                    alike.add(place)
        return chosen


def fold_parts(choices: Sequence[Choice], parts: Mapping[int, Span]) -> list[Choice]:
    """The same hits and other moments, without those that overlap a better one.

    Args:
        parts: the part of its file that each moment is; moments that are not among them go.
    """
    folded: list[Choice] = []
    taken: dict[str, list[Span]] = {}
    for choice in choices:
        kept = []
        for place in choice.moments:
            part = parts.get(place)
            known = taken.setdefault(part.path, []) if part else []
            if part is None or any(part.overlaps(other) for other in known):
                continue
            known.append(part)
            kept.append(place)
        if kept and kept[0] == choice.place:
            folded.append(replace(choice, others=kept[1:]))
    return folded


def _is_same(span: Span, liked: Span, by: By) -> bool:
    """Whether a part of a file is, or belongs to, what others shall resemble."""
    return span == liked or span.overlaps(liked) or (by == "file" and span.path == liked.path)


class _Alike:
    """Finds near-copies of what was chosen."""

    def __init__(self, video: VideoFeatures, most: int) -> None:
        self._unit_VD = unit_means(video)
        # The chosen ones side by side: gathering them for each candidate would take ten times as long.
        self._kept_ND = self._unit_VD.new_empty(min(most, len(video)), self._unit_VD.shape[1])
        self._num_kept = 0

    def add(self, place: int) -> None:
        self._kept_ND[self._num_kept] = self._unit_VD[place]
        self._num_kept += 1

    def find(self, place: int) -> int | None:
        """Which of those that were added this one is a copy of."""
        if not self._num_kept:
            return None
        check_deadline()
        likeness, nearest = (self._kept_ND[: self._num_kept] @ self._unit_VD[place]).max(dim=0)
        return int(nearest) if likeness >= _SAME_COSINE else None
