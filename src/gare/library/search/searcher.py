"""A search from end to end: candidates by stage 1, their exact scores from the stored frames, hits.

Shapes: V items.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gare.cache_folder import cache_folder
from gare.errors import DamagedLibraryError, QueryError
from gare.library.filters import Filter
from gare.library.search.damaged_items import DamagedItems
from gare.library.search.exact_score import ExactScorer
from gare.library.search.proven_search import FLOAT32_ERROR, ProvenSearch
from gare.library.search.query_notices import language_notice
from gare.library.search.query_vectors import EncodedQuery, QueryEncoder
from gare.library.search.ranked_items import Ranking
from gare.library.search.search_hit import HIT_COLUMNS, Certificate, Explanation, Hits, make_hit
from gare.library.search.search_request import SearchRequest, check_text
from gare.library.search.stage1 import DEFAULT_CANDIDATES, recommended_candidates
from gare.library.store import Store
from gare.library.store.read_deadline import check_deadline, checked
from gare.library.store.row_checksums import CHECKSUM_COLUMN
from gare.library.store.store_protocol import Hits as StoreHits
from gare.library.store.stored_frames import unpack_frames
from gare.model import GARE
from gare.model.known_models import languages_of
from gare.types import TextFeatures, VideoFeatures

if TYPE_CHECKING:
    import pyarrow as pa

_MARGIN = 64  # more than are wanted: a store multiplies in float32, in an order of its own


class Searcher:
    """Searches a store with the model that made its vectors.

    `search` is `find` and `show` one after the other. Searches that come together call `find` one by one, so
    that each has its own error, and `show` once.

    An item that is damaged is left out, and `damaged` knows of it: no score is given that is not exact.
    """

    def __init__(self, store: Store, model: GARE) -> None:
        self.store, self.model = store, model
        self.damaged = DamagedItems(store)
        self.encoder = QueryEncoder(store, model, self.damaged)
        self.scorer = ExactScorer(model)
        self.proven = ProvenSearch(store, model, self.scorer, self.damaged, cache_folder() / "bounds")

    def search(self, request: SearchRequest) -> Hits:
        """The hits of one request, best first."""
        return self.show([self.find(request)])[0]

    @torch.no_grad()
    def find(
        self,
        request: SearchRequest,
        *,
        query: EncodedQuery | None = None,
        texts: Mapping[str, TextFeatures] | None = None,
        default_candidates: int | None = None,
    ) -> Ranking:
        """The first part of a search: which items, and why.

        Args:
            query: the vectors of the request, where they are known already.
            texts: the features of its terms, where they are known already.
            default_candidates: for a request without a number of its own, instead of reading the library's.
        """
        check_deadline()
        query = query or self.encoder.encode(request, texts)
        if request.exact:
            ranking = self._score_proven(query, request)
        elif request.exhaustive:
            ranking = self._score_all(query, request)
        else:
            wanted = request.candidates or default_candidates or recommended_candidates(self.store)
            ranking = self._score_candidates(query, request, wanted)
        chosen = ranking.choose(request)
        if not chosen:
            return replace(Ranking.nothing(), certificate=ranking.certificate)
        places = list(chosen)
        hits = ranking.take(places)
        video = hits.video
        cosine_VF, weight_VF = self.scorer.frames(query, video)
        return replace(
            hits,
            rows=list(range(len(places))),
            certificate=ranking.certificate,
            frames=video,  # what was not chosen is let go
            frame_scores=cosine_VF.tolist(),
            frame_weights=weight_VF.tolist(),
            duplicates=[tuple(ranking.ids[copy] for copy in chosen[place]) for place in places],
            explanations=self._explain(query, ranking, places, video)
            if request.explain and query.text is not None
            else [None] * len(places),
        )

    def show(self, rankings: Sequence[Ranking]) -> list[Hits]:
        """The second part: what is known about the items. One read for all searches that came together."""
        ids = list(dict.fromkeys(item for ranking in rankings for item in ranking.ids))
        # Without those deleted while we searched, and those that are damaged.
        facts = self.damaged.read_facts(ids, HIT_COLUMNS) if ids else {}
        return [
            Hits(
                (
                    make_hit(
                        facts[item],
                        score=ranking.scores[place],
                        frame_scores=ranking.frame_scores[place],
                        frame_weights=ranking.frame_weights[place],
                        duplicates=ranking.duplicates[place],
                        explanation=ranking.explanations[place],
                    )
                    for place, item in enumerate(ranking.ids)
                    if item in facts
                ),
                ranking.certificate,
            )
            for ranking in rankings
        ]

    def notices(self, request: SearchRequest) -> list[str]:
        """What to tell whoever asked, besides the hits: that damaged items were left out, that the model does
        not read the language."""
        encoder = self.model.config.encoder
        name = self.store.stamp.name
        languages = languages_of(name, encoder.name, str(getattr(encoder, "source", "")))
        texts = [term.text for term in request.all_terms if term.weight > 0]
        notice = language_notice(texts, name, languages, pieces=self.encoder.texts.num_pieces(texts))
        return [line for line in (self.damaged.warning(), notice) if line]

    def rank_captions(
        self,
        captions: Sequence[str],
        *,
        video: str | os.PathLike[str] | None = None,
        like: str | None = None,
        top: int,
    ) -> list[tuple[str, float]]:
        """Which of these captions fit a video, or an item of the library; best first."""
        if not captions:
            raise QueryError("no captions to choose from")
        for caption in captions:
            check_text(caption)
        return self.scorer.rank_captions(self.encoder.features(video=video, like=like), captions)[:top]

    # --- scoring --------------------------------------------------------------------------------------------

    def _score_candidates(self, query: EncodedQuery, request: SearchRequest, candidates: int) -> Ranking:
        """What stage 1 finds, scored exactly."""
        at_least = request.reach + len(request.skipped)
        wanted = max(candidates, at_least)
        found = self.store.search(query.stage1_E[None], wanted, where=request.filter)[0]
        if not found.ids:
            return Ranking.nothing()
        table = self.damaged.read_vectors(found.ids, self._columns)
        if not len(table):
            return Ranking.nothing()
        check_deadline()  # scoring is one call: 4,096 candidates at most, from the API
        ids = table["id"].to_pylist()
        video = unpack_frames(table["vectors"], self.model.dim, self.model.device)
        ranking = Ranking.by_score(ids, self._scores(query, video, table), video)
        if len(found.ids) < wanted and not self.damaged:  # stage 1 had no more: every item was scored
            return replace(ranking, certificate=Certificate(len(found.ids), len(ids)))
        return replace(ranking, certificate=self._certify(query, request, found, ranking))

    def _certify(
        self, query: EncodedQuery, request: SearchRequest, found: StoreHits, ranking: Ranking
    ) -> Certificate | None:
        """The proof of what an ordinary search found, where it comes at no cost."""
        if not self.model.interaction.stage1_is_exact:
            return self.proven.certify(query, ranking, request.depth, request.filter)
        if self.damaged or not found.is_exact or len(ranking) < request.depth:
            return None
        # The products that ranked the candidates are the scores.
        last, bound = ranking.scores[request.depth - 1], float(found.scores[-1])
        if bound > last - FLOAT32_ERROR:
            return None
        return Certificate(self.store.count(request.filter), len(ranking), last, bound)

    def _score_proven(self, query: EncodedQuery, request: SearchRequest) -> Ranking:
        """The best items, with the proof that no other belongs among them."""
        if not self.model.interaction.stage1_is_exact:
            return self.proven.find(query, request.depth, request.filter)
        # The product with the stage-1 vector is the score, so the store compares every item by itself.
        num_items = self.store.count(request.filter)
        found = self.store.search(
            query.stage1_E[None], request.depth + _MARGIN, where=request.filter, exact=True
        )
        table = self.damaged.read_vectors(found[0].ids, self._columns)
        if not len(table):
            return replace(Ranking.nothing(), certificate=Certificate(num_items, num_items))
        ids = table["id"].to_pylist()
        video = unpack_frames(table["vectors"], self.model.dim, self.model.device)
        ranking = Ranking.by_score(ids, self._scores(query, video, table), video)
        if self.damaged:  # what was left out might have been among them
            return ranking
        return replace(ranking, certificate=Certificate(num_items, num_items))

    def _score_all(self, query: EncodedQuery, request: SearchRequest) -> Ranking:
        """Every item, keeping the best so far: memory does not grow with the library.

        More than the hits are kept, and ordered by their scores in float64, as an exact search does.
        """
        best, num_items = Ranking.nothing(), 0
        keep = max(4 * request.reach, DEFAULT_CANDIDATES)
        for ids, video, batch in self._videos(request.filter):
            ranking = Ranking.by_score(ids, self._scores(query, video, batch), video)
            best = best.merged(ranking, keep)
            num_items += len(ids)
        if len(best) and not self.model.interaction.stage1_is_exact:
            video = best.video
            best = Ranking.by_score(best.ids, self.scorer.score_double(query, video), video)
        if self.damaged:  # what was left out might have been among them
            return best
        return replace(best, certificate=Certificate(num_items, num_items))

    @property
    def _columns(self) -> list[str]:
        """What scoring reads of an item."""
        frames = ["id", "frames_key", "vectors"]
        return [*frames, "vector", CHECKSUM_COLUMN] if self.model.interaction.stage1_is_exact else frames

    def _scores(self, query: EncodedQuery, video: VideoFeatures, rows: pa.Table | pa.RecordBatch) -> Tensor:
        """The score of each item, [V]. Where the stage-1 vector gives it, that is the better source: it is
        kept in float32, frames in float16."""
        if not self.model.interaction.stage1_is_exact:
            return self.scorer.score(query, video)
        vector = rows.column("vector")
        flat = (vector.combine_chunks() if hasattr(vector, "combine_chunks") else vector).flatten()
        vectors_VE = flat.to_numpy(zero_copy_only=False).reshape(len(video), -1)
        return torch.from_numpy(vectors_VE @ query.stage1_E).to(self.model.device)

    def _videos(
        self, where: Filter | None
    ) -> Iterator[tuple[list[str], VideoFeatures, pa.Table | pa.RecordBatch]]:
        read: set[str] = set()
        try:
            for batch in checked(self.store.scan(where=where, columns=self._columns)):
                yield from self._features(self.damaged.keep_intact(batch))
                read.update(batch["id"].to_pylist())
        except DamagedLibraryError:  # the rest bit by bit: slow, but without what cannot be read only
            for batch in checked(self.store.scan(where=where, columns=["id"])):
                ids = [item for item in batch["id"].to_pylist() if item not in read]
                for first in range(0, len(ids), DEFAULT_CANDIDATES):
                    some = ids[first : first + DEFAULT_CANDIDATES]
                    yield from self._features(self.damaged.read_vectors(some, self._columns))

    def _features(
        self, rows: pa.Table | pa.RecordBatch
    ) -> Iterator[tuple[list[str], VideoFeatures, pa.Table | pa.RecordBatch]]:
        if rows.num_rows:
            features = unpack_frames(rows["vectors"], self.model.dim, self.model.device)
            yield rows["id"].to_pylist(), features, rows

    def _explain(
        self, query: EncodedQuery, ranking: Ranking, places: Sequence[int], video: VideoFeatures
    ) -> list[Explanation | None]:
        """What the increment changed for the items at these places; `video` are their frames."""
        plain_V = self.scorer.plain_score(query, ranking.video)
        plain_place_V = plain_V.argsort(descending=True, stable=True).argsort()
        return [
            Explanation(place + 1, int(plain_place_V[place]) + 1, float(plain_V[place]), radius)
            for place, radius in zip(places, self.scorer.radii(query, video), strict=True)
        ]
