"""Scores of any system with what they are scores of: texts, videos, and the video of each text.

Shapes: T texts, V videos, B bank queries. A run file may list only the best candidates of a query. What it
does not list stands below all it lists, level with each other: "optimistic" and "pessimistic" ties are then
the bounds of what the whole ranking would have given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from gare.data.manifest import Manifest, Split
from gare.errors import EvaluationError
from gare.evaluate.rank_metrics import as_index, as_matrix

Run = Mapping[str, Mapping[str, float]]
"""Scores by query and document."""
Qrels = Mapping[str, Mapping[str, int]]
"""Relevance by query and document; above 0 is relevant."""
QuerySide = Literal["texts", "videos"]
FEWEST_TO_DOUBT = 10
"""So many right documents that no query has found are ids of another kind, not bad luck."""


@dataclass(frozen=True)
class ScoreTable:
    """A score for every text and video. `read_scores` makes one from a file."""

    scores_TV: Tensor
    video_T: Tensor
    """The column of each text's video."""
    text_ids: tuple[str, ...]
    video_ids: tuple[str, ...]
    bank_BV: Tensor | None = None
    """Scores of a query bank's texts with the same videos, for QB-Norm."""
    num_unlisted: int = 0
    """Pairs that a run file did not list; their scores say only that they come last."""
    query_side: QuerySide = "texts"
    """What the queries of the file were; an incomplete run says nothing about the other direction."""

    @property
    def is_complete(self) -> bool:
        """Whether every pair has a score of its own."""
        return self.num_unlisted == 0

    def with_bank(self, bank_BV: Tensor) -> ScoreTable:
        """The same table with the scores of a query bank."""
        if bank_BV.shape[1] != self.scores_TV.shape[1]:
            raise EvaluationError(
                f"the bank has scores for {bank_BV.shape[1]:,} videos, but there are "
                f"{self.scores_TV.shape[1]:,}; score the bank's queries against the same videos, in the same "
                "order"
            )
        return replace(self, bank_BV=bank_BV)

    def scaled(self, logit_scale: float) -> ScoreTable:
        """The scores divided by a logit scale, so that they are cosines again."""
        bank = None if self.bank_BV is None else self.bank_BV / logit_scale
        return replace(self, scores_TV=self.scores_TV / logit_scale, bank_BV=bank)


def table_of_matrix(
    scores: Tensor | np.ndarray,
    *,
    video_of_text: Tensor | np.ndarray | Sequence[int] | None = None,
    text_ids: Sequence[str] | None = None,
    video_ids: Sequence[str] | None = None,
) -> ScoreTable:
    """A table from a matrix, rows texts. By default text i belongs to video i, and numbers are the ids.

    >>> table_of_matrix(torch.eye(2)).text_ids
    ('0', '1')
    """
    scores_TV = _checked(scores)
    num_texts, num_videos = scores_TV.shape
    if video_of_text is None and num_texts != num_videos:
        raise EvaluationError(
            f"{num_texts:,} texts and {num_videos:,} videos are not pairs; say which video each text belongs "
            "to: --qrels FILE, --data FOLDER --split NAME, or 'video_of_text' in the file"
        )
    wanted = np.arange(num_texts) if video_of_text is None else video_of_text
    return ScoreTable(
        scores_TV,
        _checked_index(wanted, num_texts, num_videos),
        _checked_ids(text_ids, num_texts, "texts"),
        _checked_ids(video_ids, num_videos, "videos"),
    )


def table_of_manifest(scores: Tensor, manifest: Manifest, split: Split) -> ScoreTable:
    """A table whose rows and columns are the captions and videos of a split, in their order."""
    videos = [row.video_id for row in manifest.videos(split)]
    video_of_text = manifest.video_index(split)
    if tuple(scores.shape) != (len(video_of_text), len(videos)):
        raise EvaluationError(
            f"the matrix is {scores.shape[0]:,} × {scores.shape[1]:,}, but split {split} has "
            f"{len(video_of_text):,} captions of {len(videos):,} videos; rows are captions"
        )
    return table_of_matrix(
        scores, video_of_text=video_of_text, text_ids=caption_ids(video_of_text, videos), video_ids=videos
    )


def caption_ids(video_of_text: Sequence[int], video_ids: Sequence[str]) -> list[str]:
    """A name for each caption: its video and its number there.

    >>> caption_ids([0, 1, 0], ["a", "b"])
    ['a#0', 'b#0', 'a#1']
    """
    seen = dict.fromkeys(range(len(video_ids)), 0)
    names = []
    for video in video_of_text:
        names.append(f"{video_ids[video]}#{seen[video]}")
        seen[video] += 1
    return names


def relabelled(table: ScoreTable, qrels: Qrels) -> ScoreTable:
    """The same matrix with the videos of the texts as the qrels say; ids are those of the table."""
    column = {video: place for place, video in enumerate(table.video_ids)}
    video_of_text = []
    for text in table.text_ids:
        (video,) = _relevant(qrels, text, exactly_one=True)
        if video not in column:
            raise EvaluationError(f"the qrels give text '{text}' the video '{video}', which has no column")
        video_of_text.append(column[video])
    return replace(table, video_T=torch.tensor(video_of_text))


def table_of_run(run: Run, qrels: Qrels, query_side: QuerySide | None = None) -> ScoreTable:
    """A table from a run and its qrels.

    Queries with one relevant document each are texts, unless `query_side` says "videos". Queries with
    several are videos, and their documents are captions. The gallery is every document of either file.
    """
    queries = list(qrels)
    missing = [query for query in queries if query not in run]
    if missing:
        raise EvaluationError(
            f"the run has no answer to {len(missing):,} of {len(queries):,} queries of the qrels, such as "
            f"'{missing[0]}'; leaving them out would raise the numbers"
        )
    unknown = [query for query in run if query not in qrels]
    if unknown:
        raise EvaluationError(
            f"{len(unknown):,} queries of the run are not in the qrels, such as '{unknown[0]}'"
        )
    right = {document for of_query in qrels.values() for document in of_query}
    listed = {document for answers in run.values() for document in answers}
    if len(right) >= FEWEST_TO_DOUBT and not right & listed:
        raise EvaluationError(
            f"no document of the qrels, such as '{min(right)}', is in the run, which has '{min(listed)}': "
            "their ids must be the same"
        )
    documents = list(
        dict.fromkeys(name for source in (qrels, run) for query in queries for name in source[query])
    )
    several = any(len(_relevant(qrels, query)) > 1 for query in queries)
    side: QuerySide = query_side or ("videos" if several else "texts")
    scores_QN, num_unlisted = _matrix_of_run(run, queries, documents)
    place = {name: number for number, name in enumerate(documents)}
    if side == "texts":
        target = [place[_relevant(qrels, query, exactly_one=True)[0]] for query in queries]
        table = table_of_matrix(scores_QN, video_of_text=target, text_ids=queries, video_ids=documents)
    else:
        owner = _owners(qrels, queries, documents)
        table = table_of_matrix(scores_QN.mT, video_of_text=owner, text_ids=documents, video_ids=queries)
    return replace(table, num_unlisted=num_unlisted, query_side=side)


def _matrix_of_run(run: Run, queries: Sequence[str], documents: Sequence[str]) -> tuple[Tensor, int]:
    place = {name: number for number, name in enumerate(documents)}
    scores_QN = np.full((len(queries), len(documents)), np.nan)
    for row, query in zip(scores_QN, queries, strict=True):
        answers = run[query]
        row[[place[name] for name in answers]] = list(answers.values())
        if not np.isfinite(list(answers.values())).all():
            raise EvaluationError(f"query '{query}' of the run has a score that is not a finite number")
    is_unlisted_QN = np.isnan(scores_QN)
    lowest_Q = np.where(is_unlisted_QN, np.inf, scores_QN).min(axis=1)
    lowest_Q[np.isinf(lowest_Q)] = 0  # a query without any answer
    below_Q = lowest_Q - np.maximum(1, np.abs(lowest_Q))
    return torch.from_numpy(np.where(is_unlisted_QN, below_Q[:, None], scores_QN)), int(is_unlisted_QN.sum())


def _relevant(qrels: Qrels, query: str, *, exactly_one: bool = False) -> list[str]:
    found = [name for name, relevance in qrels.get(query, {}).items() if relevance > 0]
    if not found or (exactly_one and len(found) > 1):
        raise EvaluationError(
            f"the qrels have {len(found)} relevant documents for '{query}', expected "
            f"{'one' if exactly_one else 'at least one'}: a text belongs to one video. Graded or "
            "many-to-many relevance cannot be measured here"
        )
    return found


def _owners(qrels: Qrels, queries: Sequence[str], documents: Sequence[str]) -> list[int]:
    """The query, a video, that each document, a caption, belongs to."""
    owner: dict[str, int] = {}
    for number, query in enumerate(queries):
        for name in _relevant(qrels, query):
            if name in owner:
                raise EvaluationError(
                    f"document '{name}' is relevant to '{queries[owner[name]]}' and to '{query}'; a caption "
                    "belongs to one video. Many-to-many relevance cannot be measured here"
                )
            owner[name] = number
    strays = [name for name in documents if name not in owner]
    if strays:
        raise EvaluationError(
            f"{len(strays):,} captions of the run belong to no video of the qrels, such as '{strays[0]}'"
        )
    return [owner[name] for name in documents]


def _checked(scores: Tensor | np.ndarray) -> Tensor:
    try:
        return as_matrix(scores)
    except ValueError as error:
        raise EvaluationError(str(error)) from None


def _checked_index(video_of_text: object, num_texts: int, num_videos: int) -> Tensor:
    index = torch.as_tensor(np.asarray(video_of_text))
    try:
        return as_index(
            index, name="video_of_text", length=num_texts, below=num_videos, device=torch.device("cpu")
        )
    except ValueError as error:
        raise EvaluationError(str(error)) from None


def _checked_ids(ids: Sequence[str] | None, count: int, what: str) -> tuple[str, ...]:
    names = tuple(map(str, range(count))) if ids is None else tuple(map(str, ids))
    if len(names) != count or len(set(names)) != count:
        raise EvaluationError(f"{count:,} {what} need as many different ids, got {len(set(names)):,}")
    return names
