"""Scored items in order, and which of them become hits. Shapes: V items, F frames, D embedding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gare.library.search.search_hit import Certificate, Explanation
from gare.library.search.search_request import SearchRequest
from gare.library.search.stage1 import unit_means
from gare.library.store.read_deadline import check_deadline
from gare.types import VideoFeatures

_SAME_COSINE = 0.985  # of two videos that a person would call copies: re-encoded, cropped a little


@dataclass(frozen=True)
class Ranking:
    """Items, best first, and what is known about them before the store is asked for their facts.

    Frames stay where they are: `rows` says where those of each item lie.
    """

    ids: list[str]
    scores: list[float]
    rows: list[int]
    frames: VideoFeatures
    # The rest is filled in for items that become hits.
    frame_scores: list[list[float]] = field(default_factory=list)
    """The cosine of the query with each frame, padded ones included."""
    frame_weights: list[list[float]] = field(default_factory=list)
    duplicates: list[tuple[str, ...]] = field(default_factory=list)
    """Ids of the near-copies that an item stands for."""
    explanations: list[Explanation | None] = field(default_factory=list)
    certificate: Certificate | None = None
    """The proof that no other item belongs among them; None where there is none."""

    @classmethod
    def by_score(cls, ids: Sequence[str], scores_V: Tensor, video: VideoFeatures) -> Ranking:
        """Best first; equal scores by id, so that a search gives the same list every time."""
        scores = scores_V.tolist()
        order = sorted(range(len(ids)), key=lambda row: (-scores[row], ids[row]))
        return cls([ids[row] for row in order], [scores[row] for row in order], order, video)

    @classmethod
    def nothing(cls) -> Ranking:
        """A ranking without items."""
        return cls([], [], [], VideoFeatures(torch.zeros(0, 1, 1), torch.zeros(0, 1, dtype=torch.bool)))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def video(self) -> VideoFeatures:
        """The frames in the order of the ids."""
        return self.frames[torch.tensor(self.rows, device=self.frames.mask_VF.device, dtype=torch.long)]

    def take(self, places: Sequence[int]) -> Ranking:
        """The items at these places, in this order."""
        ids = [self.ids[place] for place in places]
        scores = [self.scores[place] for place in places]
        return Ranking(ids, scores, [self.rows[place] for place in places], self.frames)

    def merged(self, other: Ranking, keep: int) -> Ranking:
        """The best `keep` of both, with the frames of no other."""
        parts = [part.take(range(min(keep, len(part)))) for part in (self, other) if len(part)]
        frames = VideoFeatures.cat([part.video for part in parts])
        ids = [item for part in parts for item in part.ids]
        scores_V = torch.tensor([score for part in parts for score in part.scores], dtype=torch.float64)
        return Ranking.by_score(ids, scores_V, frames).take(range(min(keep, len(ids))))

    def choose(self, request: SearchRequest) -> dict[int, list[int]]:
        """The places that become hits, in order, each with the places of the near-copies it stands for."""
        chosen: dict[int, list[int]] = {}
        unit_VD = unit_means(self.video) if request.unique and len(self) else None
        # The chosen ones side by side: gathering them for each candidate would take ten times as long.
        kept_ND = (
            None if unit_VD is None else unit_VD.new_empty(min(request.reach, len(self)), unit_VD.shape[1])
        )
        for place, score in enumerate(self.scores):
            if request.min_score is not None and score < request.min_score:
                break
            if self.ids[place] in request.skipped:
                continue
            if unit_VD is not None and kept_ND is not None and chosen:
                check_deadline()
                likeness, nearest = (kept_ND[: len(chosen)] @ unit_VD[place]).max(dim=0)
                if likeness >= _SAME_COSINE:
                    chosen[list(chosen)[int(nearest)]].append(place)
                    continue
            if len(chosen) == request.reach:
                if request.unique:
                    continue  # later ones may still be copies of those that are shown
                break
            if unit_VD is not None and kept_ND is not None:
                kept_ND[len(chosen)] = unit_VD[place]
            chosen[place] = []
        return dict(list(chosen.items())[request.offset :])
