"""Candidates by one inner product, then their exact scores from the stored frames.

Shapes: K terms, V candidates, F frames, D embedding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gare.library.features import mean_frames, unpack_frames
from gare.library.filters import Filter
from gare.library.query import Term
from gare.library.stage1 import stage1_queries
from gare.library.store.base import Store
from gare.model import GARE
from gare.scoring import factored
from gare.scoring.few import QueryFirst
from gare.scoring.pooling import mean_weights
from gare.types import PairModule, TextFeatures, VideoFeatures

DEFAULT_CANDIDATES = 256
_SHOWN_COLUMNS = [
    "id",
    "path",
    "start",
    "end",
    "content",
    "width",
    "height",
    "modified",
    "tags",
    "times",
]
_SAME_COSINE = 0.985  # of two videos that a person would call copies: re-encoded, cropped a little
_CACHED_TEXTS = 256


@dataclass(frozen=True)
class Explanation:
    """What the increment did to a hit, among the same candidates."""

    rank: int
    plain_rank: int
    """Where a dual tower (the same towers, no increment) would have put it."""
    plain_score: float
    radius: float | None
    """Length of the increment; None for a model without."""


@dataclass(frozen=True)
class SearchHit:
    """A stretch of video, and why it was found."""

    id: str
    score: float
    path: str
    start: float
    end: float
    moment: float
    """Seconds into the file where it matches best."""
    frame_times: tuple[float, ...]
    frame_scores: tuple[float, ...]
    """Cosine of the query with each frame."""
    frame_weights: tuple[float, ...]
    """How much each frame counts in the score; they add up to one."""
    content: str
    width: int
    height: int
    modified: str
    tags: tuple[str, ...]
    duplicates: tuple[str, ...] = ()
    """Ids of near-copies that were folded into this hit."""
    explanation: Explanation | None = None


@dataclass(frozen=True)
class SearchRules:
    """How many items, and which of them may be found."""

    top: int
    candidates: int | None = DEFAULT_CANDIDATES
    """So many are scored exactly; None scores every item there is."""
    where: Filter | None = None
    min_score: float | None = None
    unique: bool = False
    explain: bool = False
    skip: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Found:
    """An item that a search found, before anything about it is read; frames may be padded."""

    id: str
    score: float
    frame_scores: Sequence[float]
    frame_weights: Sequence[float]
    duplicates: tuple[str, ...]
    explanation: Explanation | None


@dataclass(frozen=True)
class Probe:
    """A query ready to be compared: how to find candidates, and how to score them."""

    coarse: np.ndarray
    """[D + 1], for the store."""
    text: TextFeatures | None
    """None when the query is a picture or clip: those are compared as they are, without increments."""
    weights_K: Tensor
    like_D: Tensor | None = None


@dataclass(frozen=True)
class _Ranked:
    """Scored items, best first. Frames stay where they are: `rows` says where."""

    ids: list[str]
    scores: list[float]
    rows: list[int]
    frames: VideoFeatures

    def take(self, places: Sequence[int]) -> _Ranked:
        ids = [self.ids[place] for place in places]
        scores = [self.scores[place] for place in places]
        return _Ranked(ids, scores, [self.rows[place] for place in places], self.frames)

    @property
    def video(self) -> VideoFeatures:
        """The frames in the order of the ids."""
        index = torch.tensor(self.rows, device=self.frames.mask_VF.device, dtype=torch.long)
        return VideoFeatures(self.frames.frames_VFD[index], self.frames.mask_VF[index])


class Searcher:
    """Searches a store with the model that made its vectors."""

    def __init__(self, store: Store, model: GARE) -> None:
        self._store, self._model = store, model
        self._psi: PairModule | None = model.pair_net
        if model.increment_net is not None and model.config.interaction.context == "frames":
            self._psi = QueryFirst.fold(model.increment_net.weights())
        self._encode = lru_cache(_CACHED_TEXTS)(self._encode_text)

    # --- queries --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def text_probe(self, terms: Sequence[Term], text: TextFeatures | None = None) -> Probe:
        """Words as the query; `text` are their features, where they are known already."""
        if text is None:
            text = self._encode(tuple(term.text for term in terms))
        weights_K = torch.tensor([term.weight for term in terms], device=self._model.device)
        # The stage-1 score is linear in the text, so a weighted sum of queries is one query.
        coarse_E = weights_K @ stage1_queries(text.text_TD)
        return Probe(coarse_E.float().cpu().numpy(), text, weights_K)

    @torch.no_grad()
    def video_probe(self, video: VideoFeatures) -> Probe:
        """A picture or clip as the query: what looks alike."""
        like_D = _unit_means(video)[0]
        coarse_E = torch.cat([like_D, like_D.new_zeros(1)])
        return Probe(coarse_E.float().cpu().numpy(), None, like_D.new_ones(1), like_D)

    def stored_video(self, item: str) -> VideoFeatures | None:
        table = self._store.fetch([item], ["vectors"])
        if not len(table):
            return None
        return unpack_frames(table["vectors"], self._model.dim, self._model.device)

    # --- search ---------------------------------------------------------------------------------------------

    def search(self, probe: Probe, rules: SearchRules) -> list[SearchHit]:
        return self.show([self.find(probe, rules)])[0]

    @torch.no_grad()
    def find(self, probe: Probe, rules: SearchRules) -> list[Found]:
        """The first part of a search: which items, and why."""
        if rules.candidates is None:
            ranked = self._scan(probe, rules.top, rules.where)
        else:
            ranked = self._rank(probe, max(rules.candidates, rules.top + len(rules.skip)), rules.where)
        if ranked is None:
            return []
        chosen, folded = _choose(ranked, rules)
        if not chosen:
            return []
        shown = ranked.take(chosen)
        explanations = self._explain(probe, ranked, chosen) if rules.explain else [None] * len(chosen)
        cosine_VF, weight_VF = (part.tolist() for part in self._frames(probe, shown.video))
        return [
            Found(
                id=shown.ids[place],
                score=shown.scores[place],
                frame_scores=cosine_VF[place],
                frame_weights=weight_VF[place],
                duplicates=tuple(ranked.ids[copy] for copy in folded[row]),
                explanation=explanations[place],
            )
            for place, row in enumerate(chosen)
        ]

    def show(self, searches: Sequence[Sequence[Found]]) -> list[list[SearchHit]]:
        """The second part: what is known about the items. One read for all searches that came together."""
        ids = list(dict.fromkeys(found.id for search in searches for found in search))
        rows = self._store.fetch(ids, _SHOWN_COLUMNS).to_pylist() if ids else []
        facts = {row["id"]: row for row in rows}  # without those deleted while we searched
        return [
            [_make_hit(found, facts[found.id]) for found in search if found.id in facts]
            for search in searches
        ]

    @torch.no_grad()
    def rank_captions(self, video: VideoFeatures, captions: Sequence[str]) -> list[tuple[str, float]]:
        """Captions for a video, best first."""
        text = self._model.encode_text(captions)
        scores_T = self._model.score(text, video)[:, 0]
        order = scores_T.argsort(descending=True, stable=True)
        return [(captions[row], float(scores_T[row])) for row in order.tolist()]

    def score(self, probe: Probe, video: VideoFeatures) -> Tensor:
        """The exact score of every video [V]: GARE for words, likeness for pictures."""
        if probe.text is None:
            assert probe.like_D is not None
            return _unit_means(video) @ probe.like_D
        scores_KV = factored.score(probe.text, video, self._psi, self._model.config.interaction)
        return probe.weights_K @ scores_KV

    def _rank(self, probe: Probe, candidates: int, where: Filter | None) -> _Ranked | None:
        found = self._store.search(probe.coarse[None], candidates, where=where)[0]
        if not found.ids:
            return None
        table = self._store.fetch(found.ids, ["id", "vectors"])
        if not len(table):
            return None
        video = unpack_frames(table["vectors"], self._model.dim, self._model.device)
        return _sorted(table["id"].to_pylist(), self.score(probe, video), video)

    def _scan(self, probe: Probe, top: int, where: Filter | None) -> _Ranked | None:
        """Every item, keeping the best so far: memory does not grow with the library."""
        best: _Ranked | None = None
        keep = max(4 * top, DEFAULT_CANDIDATES)
        for ids, video in self._videos(where):
            ranked = _sorted(ids, self.score(probe, video), video)
            best = _merged(best, ranked, keep)
        return best

    def _videos(self, where: Filter | None) -> Iterator[tuple[list[str], VideoFeatures]]:
        for batch in self._store.scan(where=where, columns=["id", "vectors"]):
            if batch.num_rows:
                features = unpack_frames(batch.column("vectors"), self._model.dim, self._model.device)
                yield batch.column("id").to_pylist(), features

    def _encode_text(self, texts: tuple[str, ...]) -> TextFeatures:
        return self._model.encode_text(texts)

    # --- what is shown --------------------------------------------------------------------------------------

    def _explain(self, probe: Probe, ranked: _Ranked, chosen: Sequence[int]) -> list[Explanation | None]:
        if probe.text is None:
            return [None] * len(chosen)
        interaction = self._model.config.interaction
        psi = None if self._model.increment_net is not None else self._psi
        plain_V = probe.weights_K @ factored.score(probe.text, ranked.video, psi, interaction)
        place_V = plain_V.argsort(descending=True, stable=True).argsort()
        radii: list[float | None] = [None] * len(chosen)
        if self._model.increment_net is not None:
            wanted = probe.weights_K.clamp_min(0) / probe.weights_K.clamp_min(0).sum()
            radii = (wanted @ self._model.radii(probe.text, ranked.take(chosen).video)).tolist()
        return [
            Explanation(row + 1, int(place_V[row]) + 1, float(plain_V[row]), radius)
            for row, radius in zip(chosen, radii, strict=True)
        ]

    def _frames(self, probe: Probe, video: VideoFeatures) -> tuple[Tensor, Tensor]:
        """Cosine of the query with each frame, and the weight of each frame in the score; both [V, F]."""
        unit_VFD = F.normalize(video.frames_VFD, dim=-1)
        if probe.text is None:
            assert probe.like_D is not None
            mean_VF = mean_weights(video.mask_VF, mask_frames=True, dtype=unit_VFD.dtype)
            return unit_VFD @ probe.like_D, mean_VF
        cosine_VFK = unit_VFD @ F.normalize(probe.text.text_TD, dim=-1).mT
        wanted_K = probe.weights_K.clamp_min(0) / probe.weights_K.clamp_min(0).sum()
        interaction = self._model.config.interaction
        # Psi has no say in how frames are pooled, and folding it into them would cost more than the search.
        net = None if self._model.increment_net is not None else self._psi
        weights_KVF = factored.frame_weights(probe.text, video, net, interaction).pool_TVF
        return cosine_VFK @ probe.weights_K, (wanted_K[:, None, None] * weights_KVF).sum(dim=0)


def _make_hit(found: Found, facts: dict[str, Any]) -> SearchHit:
    times = tuple(float(time) for time in facts["times"])
    frame_scores = tuple(found.frame_scores[: len(times)])
    return SearchHit(
        id=found.id,
        score=found.score,
        path=facts["path"],
        start=facts["start"],
        end=facts["end"],
        moment=_best_moment(times, frame_scores, facts["start"], facts["end"]),
        frame_times=times,
        frame_scores=frame_scores,
        frame_weights=tuple(found.frame_weights[: len(times)]),
        content=facts["content"],
        width=facts["width"],
        height=facts["height"],
        modified=facts["modified"].isoformat(timespec="seconds"),
        tags=tuple(facts["tags"]),
        duplicates=found.duplicates,
        explanation=found.explanation,
    )


def _best_moment(times: Sequence[float], scores: Sequence[float], start: float, end: float) -> float:
    """The frame that is shown when a stretch begins may have appeared a little before it."""
    return min(max(times[scores.index(max(scores))], start), end)


def _unit_means(video: VideoFeatures) -> Tensor:
    return F.normalize(mean_frames(video), dim=-1)


def _sorted(ids: Sequence[str], scores_V: Tensor, video: VideoFeatures) -> _Ranked:
    """Best first; equal scores by id, so that a search gives the same list every time."""
    scores = scores_V.tolist()
    order = sorted(range(len(ids)), key=lambda row: (-scores[row], ids[row]))
    return _Ranked(list(ids), scores, list(range(len(ids))), video).take(order)


def _merged(best: _Ranked | None, more: _Ranked, keep: int) -> _Ranked:
    parts = [part.take(range(min(keep, len(part.ids)))) for part in (best, more) if part is not None]
    videos = [part.video for part in parts]
    width = max(video.frames_VFD.shape[1] for video in videos)
    frames = VideoFeatures(
        torch.cat([_padded(video.frames_VFD, width) for video in videos]),
        torch.cat([_padded(video.mask_VF, width) for video in videos]),
    )
    ids = [item for part in parts for item in part.ids]
    scores_V = torch.tensor([score for part in parts for score in part.scores], dtype=torch.float64)
    ranked = _sorted(ids, scores_V, frames)
    return ranked.take(range(min(keep, len(ids))))


def _choose(ranked: _Ranked, rules: SearchRules) -> tuple[list[int], dict[int, list[int]]]:
    """Rows to show, and for each the near-copies it stands for."""
    chosen: list[int] = []
    folded: dict[int, list[int]] = {}
    unit_VD = _unit_means(ranked.video) if rules.unique else None
    for row, score in enumerate(ranked.scores):
        if rules.min_score is not None and score < rules.min_score:
            break
        if ranked.ids[row] in rules.skip:
            continue
        if unit_VD is not None and chosen:
            likeness, nearest = (unit_VD[chosen] @ unit_VD[row]).max(dim=0)
            if likeness >= _SAME_COSINE:
                folded[chosen[int(nearest)]].append(row)
                continue
        if len(chosen) == rules.top:
            if rules.unique:
                continue  # later rows may still be copies of those that are shown
            break
        chosen.append(row)
        folded[row] = []
    return chosen, folded


def _padded(tensor: Tensor, width: int) -> Tensor:
    missing = width - tensor.shape[1]
    return F.pad(tensor, (0, 0, 0, missing) if tensor.ndim == 3 else (0, missing))
