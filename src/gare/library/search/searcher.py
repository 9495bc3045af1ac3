"""A search from end to end: candidates by stage 1, their exact scores from the stored frames, hits.

Shapes: V items.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gare.cache_folder import cache_folder
from gare.errors import DamagedLibraryError, QueryError
from gare.library.filters import Filter
from gare.library.search.damaged_items import DamagedItems
from gare.library.search.exact_score import ExactScorer
from gare.library.search.exact_search import ExactSearch
from gare.library.search.item_frames import SCORE_COLUMNS, ItemFrames, Span
from gare.library.search.proven_search import FLOAT32_ERROR, ProvenSearch
from gare.library.search.query_notices import language_notice, length_notice
from gare.library.search.query_vectors import EncodedQuery, QueryEncoder
from gare.library.search.ranked_items import Choice, Ranking, fold_parts
from gare.library.search.refined_moment import FrameLine, RefinedMoment, refine, still_matches
from gare.library.search.search_hit import (
    HIT_COLUMNS,
    Certificate,
    Explanation,
    Hits,
    SearchHit,
    make_hit,
    other_moment,
)
from gare.library.search.search_request import SearchRequest, check_text
from gare.library.search.stage1 import DEFAULT_CANDIDATES, recommended_candidates
from gare.library.store import Store, fetch_readable
from gare.library.store.read_deadline import check_deadline, checked
from gare.library.store.row_checksums import CHECKSUM_COLUMN
from gare.library.store.store_protocol import Hits as StoreHits
from gare.model import GARE
from gare.model.known_models import languages_of
from gare.types import TextFeatures, VideoFeatures

if TYPE_CHECKING:
    import numpy as np
import pyarrow as pa

_MOST_CANDIDATES = 4096  # where few files fill the candidates with their moments
_OF_A_FILE = 8  # candidates of each further file then
_MARGIN = 64  # more than are wanted: a store multiplies in float32, in an order of its own


class Searcher:
    """Searches a store with the model that made its vectors.

    `search` is `find` and `show` one after the other. Searches that come together call `find` one by one, so
    that each has its own error, and `show` once.

    An item that is damaged is left out, and `damaged` knows of it: no score is given that is not exact.
    """

    def __init__(
        self, store: Store, model: GARE, *, exact_search: Callable[[Searcher], ExactSearch] | None = None
    ) -> None:
        """`exact_search` makes what finds lists with a proof; default: in this process."""
        self.store, self.model = store, model
        self.damaged = DamagedItems(store)
        self.encoder = QueryEncoder(store, model, self.damaged)
        self.scorer = ExactScorer(model)
        self.proven: ExactSearch
        if exact_search is None:
            self.proven = ProvenSearch(store, model, self.scorer, self.damaged, cache_folder() / "bounds")
        else:
            self.proven = exact_search(self)

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
        asked, request = request, request.before_folding
        query = query or self.encoder.encode(request, texts)
        if request.exact:
            ranking = self._score_proven(query, request)
        elif request.exhaustive:
            ranking = self._score_all(query, request)
        else:
            wanted = request.candidates or default_candidates or recommended_candidates(self.store)
            ranking = self._score_candidates(query, request, wanted)
        return self._detail(query, asked, request, ranking)

    def _detail(
        self, query: EncodedQuery, asked: SearchRequest, request: SearchRequest, ranking: Ranking
    ) -> Ranking:
        """The hits alone, each followed by the other moments of its file, and what their frames say."""
        choices, refined = self._fold(query, ranking, ranking.choose(request)[request.offset :])
        choices = choices[asked.offset - request.offset :][: asked.top]
        if not choices:
            return replace(Ranking.nothing(), certificate=ranking.certificate, missing=ranking.missing)
        places, own = list[int](), list[Choice]()
        for choice in choices:
            first = len(places)
            places += choice.moments
            own.append(Choice(first, others=list(range(first + 1, len(places)))))
        hits = ranking.take(places)
        video = hits.video  # what was not chosen is let go
        cosine_VF, weight_VF = self.scorer.frames(query, video)
        explained = request.explain and query.text is not None
        return replace(
            hits,
            rows=list(range(len(places))),
            certificate=ranking.certificate,
            missing=ranking.missing,
            frames=video,
            frame_scores=cosine_VF.tolist(),
            frame_weights=weight_VF.tolist(),
            choices=own,
            refined=refined,
            duplicates=[tuple(ranking.ids[copy] for copy in choice.copies) for choice in choices],
            explanations=self._explain(query, request, ranking, choices)
            if explained
            else [None] * len(choices),
        )

    def _fold(
        self, query: EncodedQuery, ranking: Ranking, choices: Sequence[Choice]
    ) -> tuple[list[Choice], dict[str, RefinedMoment]]:
        """The same hits without moments that match too little beside the best of their file, and without
        those that turn out to be part of a better one; and where moments begin and end, by id."""
        if not any(ranking.spans[choice.place].is_dense or choice.others for choice in choices):
            return list(choices), {}
        video = ranking.video
        cosine_VF = self.scorer.cosines(query, video)
        usual = float(cosine_VF[video.mask_VF].median())
        best = cosine_VF.masked_fill(~video.mask_VF, float("-inf")).amax(dim=1).tolist()
        places = [
            place
            for choice in choices
            for place in choice.moments
            if place == choice.place or still_matches(best[place], best[choice.place], usual)
        ]
        refined = self._refine(query, ranking.take(places), usual)
        parts = {place: _part(ranking, place, refined) for place in places}
        return fold_parts(choices, parts), refined

    def _refine(self, query: EncodedQuery, moments: Ranking, usual: float) -> dict[str, RefinedMoment]:
        """Where moments begin and end; of those alone that are ranges of dense frames."""
        ids = [item for item, span in zip(moments.ids, moments.spans, strict=True) if span.is_dense]
        table = self.damaged.read_blocks(ids) if ids else None
        if table is None or not len(table):
            return {}
        cosine_VF = self.scorer.cosines(query, ItemFrames.of(table, self.model).video)
        refined = {}
        for row, cosines in zip(table.drop_columns(["vectors"]).to_pylist(), cosine_VF.tolist(), strict=True):
            times = row["times"]
            line = FrameLine(times, end_of(times, row["end"]), cosines[: len(times)])
            refined[row["id"]] = refine(line, row["start"], row["end"], usual)
        return refined

    def show(self, rankings: Sequence[Ranking]) -> list[Hits]:
        """The second part: what is known about the items. One read for all searches that came together."""
        ids = list(dict.fromkeys(item for ranking in rankings for item in ranking.ids))
        # Without those deleted while we searched, and those that are damaged.
        facts = self.damaged.read_facts(ids, HIT_COLUMNS) if ids else {}
        return [
            Hits(_make_hits(ranking, facts), ranking.certificate, ranking.missing) for ranking in rankings
        ]

    def notices(self, request: SearchRequest) -> list[str]:
        """What to tell whoever asked, besides the hits: that damaged items were left out, that the model does
        not read the language, or not all of a text."""
        encoder = self.model.config.encoder
        name = self.store.stamp.name
        languages = languages_of(name, encoder.name, str(getattr(encoder, "source", "")))
        texts = [term.text for term in request.all_terms if term.weight > 0]
        notice = language_notice(texts, name, languages, pieces=self.encoder.texts.num_pieces(texts))
        cut = length_notice(name) if any(map(self.encoder.texts.is_cut, texts)) else None
        return [line for line in (self.damaged.warning(), notice, cut) if line]

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
        items = ItemFrames.of(table, self.model)
        ranking = Ranking.by_score(items, self._scores(query, items.video, table))
        if len(found.ids) < wanted and not self.damaged:  # stage 1 had no more: every item was scored
            return replace(ranking, certificate=Certificate(len(found.ids), len(items)))
        has_more = len(found.ids) == wanted and wanted < _MOST_CANDIDATES
        if request.candidates is None and has_more and _is_short(ranking, request):
            # One long file may fill the candidates with its moments.
            if request.by == "moment":
                return self._score_candidates(query, request, min(4 * wanted, _MOST_CANDIDATES))
            ranking = self._add_other_files(query, request, ranking)
        return replace(ranking, certificate=self._certify(query, request, found, ranking))

    def _add_other_files(self, query: EncodedQuery, request: SearchRequest, ranking: Ranking) -> Ranking:
        """The ranking with items of further files, if stage 1 finds any: moments of a film that has its best
        ones already are not scored."""
        more = self.store.search(query.stage1_E[None], _MOST_CANDIDATES, where=request.filter)[0].ids
        rows, _ = fetch_readable(self.store, more, ["id", "path"])
        paths = {row["id"]: row["path"] for row in rows.to_pylist()}
        known, of_file, ids = {span.path for span in ranking.spans}, Counter[str](), list[str]()
        for item in more:
            path = paths.get(item)
            if path is not None and path not in known and of_file[path] < _OF_A_FILE:
                of_file[path] += 1
                ids.append(item)
        try:
            table = self.damaged.read_vectors(ids, self._columns) if ids else None
        except DamagedLibraryError:  # all of them; the hits that there are need none
            return ranking
        if table is None or not len(table):
            return ranking
        items = ItemFrames.of(table, self.model)
        other = Ranking.by_score(items, self._scores(query, items.video, table))
        return ranking.merged(other, keep=len(ranking) + len(other))

    def _certify(
        self, query: EncodedQuery, request: SearchRequest, found: StoreHits, ranking: Ranking
    ) -> Certificate | None:
        """The proof of what an ordinary search found, where it comes at no cost."""
        is_product = self.model.interaction.stage1_is_exact
        if not (found.is_exact and not self.damaged if is_product else self.proven.can_certify()):
            return None
        depth = self._depth(request, ranking)
        if depth is None:
            return None
        if not is_product:
            return self.proven.certify(query, ranking, depth, request.filter)
        # The products that ranked the candidates are the scores.
        last, bound = ranking.scores[depth - 1], float(found.scores[-1])
        if bound > last - FLOAT32_ERROR:
            return None
        return Certificate(self.store.count(request.filter), len(ranking), last, bound)

    def _depth(self, request: SearchRequest, ranking: Ranking) -> int | None:
        """How many of the best items must be the true ones for the hits to be; None: more than there are."""
        chosen = ranking.choose(request)
        if request.unique or len(chosen) < request.reach:
            return request.depth if len(ranking) >= request.depth and request.unique else None
        return chosen[-1].place + 1

    def _score_proven(self, query: EncodedQuery, request: SearchRequest) -> Ranking:
        """The best items, with the proof that no other belongs among them.

        As many as exhaustive scoring keeps, where more than the hits matters: moments of few files fill the
        list, a hit may have other moments, or ranks without increments are asked for.
        """
        depth, full = request.depth, _kept(request)
        while True:
            ranking = self._find_proven(query, request, depth)
            choices = ranking.choose(request)
            is_enough = len(choices) >= request.reach and (
                depth >= full or not _is_wide(request, ranking, choices)
            )
            if len(ranking) < depth or is_enough:
                return ranking
            depth = full if depth < full else 4 * depth

    def _find_proven(self, query: EncodedQuery, request: SearchRequest, depth: int) -> Ranking:
        if not self.model.interaction.stage1_is_exact:
            return self.proven.find(query, depth, request.filter)
        # The product with the stage-1 vector is the score, so the store compares every item by itself.
        num_items = self.store.count(request.filter)
        found = self.store.search(query.stage1_E[None], depth + _MARGIN, where=request.filter, exact=True)
        table = self.damaged.read_vectors(found[0].ids, self._columns)
        if not len(table):
            return replace(Ranking.nothing(), certificate=Certificate(num_items, num_items))
        items = ItemFrames.of(table, self.model)
        ranking = Ranking.by_score(items, self._scores(query, items.video, table))
        # No more than were asked for: what is usual among them tells which moments of a file still match.
        ranking = ranking.take(range(min(depth, len(ranking))))
        if self.damaged:  # what was left out might have been among them
            return ranking
        return replace(ranking, certificate=Certificate(num_items, num_items))

    def _score_all(self, query: EncodedQuery, request: SearchRequest) -> Ranking:
        """Every item, keeping the best so far: memory does not grow with the library.

        More than the hits are kept, and ordered by their scores in float64, as an exact search does.
        """
        keep = _kept(request)
        while True:
            best, num_items = self._best_of_all(query, request.filter, keep)
            if len(best) < keep or len(best.choose(request)) >= request.reach:
                break
            keep *= 4  # moments of few files filled the list
        if self.damaged:  # what was left out might have been among them
            return best
        return replace(best, certificate=Certificate(num_items, num_items))

    def _best_of_all(self, query: EncodedQuery, where: Filter | None, keep: int) -> tuple[Ranking, int]:
        best, num_items = Ranking.nothing(), 0
        for items, batch in self._videos(where):
            ranking = Ranking.by_score(items, self._scores(query, items.video, batch))
            best = best.merged(ranking, keep)
            num_items += len(items)
        if len(best) and not self.model.interaction.stage1_is_exact:
            items = best.items
            best = Ranking.by_score(items, self.scorer.score_double(query, items.video))
        return best, num_items

    @property
    def _columns(self) -> list[str]:
        """What scoring reads of an item."""
        more = ["vector", CHECKSUM_COLUMN] if self.model.interaction.stage1_is_exact else []
        return [*SCORE_COLUMNS, *more]

    def _scores(self, query: EncodedQuery, video: VideoFeatures, rows: pa.Table | pa.RecordBatch) -> Tensor:
        """The score of each item, [V]. Where the stage-1 vector gives it, that is the better source: it is
        kept in float32, frames in float16. Its product is in float64, as that of every list with a proof."""
        if not self.model.interaction.stage1_is_exact:
            return self.scorer.score(query, video)
        vector = rows.column("vector")
        flat = (vector.combine_chunks() if hasattr(vector, "combine_chunks") else vector).flatten()
        vectors_VE = flat.to_numpy(zero_copy_only=False).reshape(len(video), -1)
        return torch.from_numpy(vectors_VE.astype(np.float64) @ query.stage1_E.astype(np.float64))

    def _videos(self, where: Filter | None) -> Iterator[tuple[ItemFrames, pa.Table | pa.RecordBatch]]:
        read: set[str] = set()
        try:
            for batch in checked(self.store.scan(where=where, columns=self._columns)):
                yield from self._items(self.damaged.keep_intact(batch))
                read.update(batch["id"].to_pylist())
        except DamagedLibraryError:  # the rest bit by bit: slow, but without what cannot be read only
            for batch in checked(self.store.scan(where=where, columns=["id"])):
                ids = [item for item in batch["id"].to_pylist() if item not in read]
                for first in range(0, len(ids), DEFAULT_CANDIDATES):
                    some = ids[first : first + DEFAULT_CANDIDATES]
                    yield from self._items(self.damaged.read_vectors(some, self._columns))

    def _items(
        self, rows: pa.Table | pa.RecordBatch
    ) -> Iterator[tuple[ItemFrames, pa.Table | pa.RecordBatch]]:
        if rows.num_rows:
            yield ItemFrames.of(rows, self.model), rows

    def _explain(
        self, query: EncodedQuery, request: SearchRequest, ranking: Ranking, choices: Sequence[Choice]
    ) -> list[Explanation | None]:
        """What the increment changed for the items that were chosen. By file, ranks are those of files."""
        places = [choice.place for choice in choices]
        plain_V = self.scorer.plain_score(query, ranking.video)
        names = [span.path for span in ranking.spans] if request.by == "file" else ranking.ids
        ranks = _ranks(names)
        plain_ranks = _ranks([names[place] for place in plain_V.argsort(descending=True, stable=True)])
        radii = self.scorer.radii(query, ranking.take(places).video)
        return [
            Explanation(ranks[names[place]], plain_ranks[names[place]], float(plain_V[place]), radius)
            for place, radius in zip(places, radii, strict=True)
        ]


def _is_short(ranking: Ranking, request: SearchRequest) -> bool:
    """Whether more candidates could give more hits."""
    is_enough = request.min_score is not None and ranking.scores[-1] < request.min_score
    return not is_enough and len(ranking.choose(request)) < request.reach


def _kept(request: SearchRequest) -> int:
    """How many of the best items exhaustive scoring keeps."""
    return max(4 * request.reach, DEFAULT_CANDIDATES)


def _is_wide(request: SearchRequest, ranking: Ranking, choices: Sequence[Choice]) -> bool:
    """Whether what is told of a hit depends on items that are no hits."""
    return request.explain or any(ranking.spans[choice.place].is_part for choice in choices)


def _ranks(names: Sequence[str]) -> dict[str, int]:
    """The rank of each name, from 1, where they stand best first and may stand several times.

    >>> _ranks(["film", "film", "clip"])
    {'film': 1, 'clip': 2}
    """
    return {name: rank for rank, name in enumerate(dict.fromkeys(names), start=1)}


def _part(ranking: Ranking, place: int, refined: Mapping[str, RefinedMoment]) -> Span:
    """The part of the file that a moment is, as far as it is known."""
    span, found = ranking.spans[place], refined.get(ranking.ids[place])
    return span if found is None else span._replace(start=found.start, end=found.end)


def end_of(times: Sequence[float], end: float) -> float:
    """When the last frame of a block leaves the screen; where the item ends before, as long after it came as
    the one before it did."""
    if end > times[-1] or len(times) == 1:
        return max(end, times[-1])
    return 2 * times[-1] - times[-2]


def _make_hits(ranking: Ranking, facts: dict[str, dict[str, Any]]) -> Iterator[SearchHit]:
    """The hits of a ranking, of items about which something is known."""
    for choice, copies, explanation in zip(
        ranking.choices, ranking.duplicates, ranking.explanations, strict=True
    ):
        if ranking.ids[choice.place] not in facts:
            continue
        others = tuple(
            other_moment(
                facts[ranking.ids[other]],
                score=ranking.scores[other],
                frame_scores=ranking.frame_scores[other],
                refined=ranking.refined.get(ranking.ids[other]),
            )
            for other in choice.others
            if ranking.ids[other] in facts
        )
        yield make_hit(
            facts[ranking.ids[choice.place]],
            score=ranking.scores[choice.place],
            frame_scores=ranking.frame_scores[choice.place],
            frame_weights=ranking.frame_weights[choice.place],
            duplicates=copies,
            explanation=explanation,
            others=others,
            refined=ranking.refined.get(ranking.ids[choice.place]),
        )
