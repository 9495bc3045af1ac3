"""One table of scores under every protocol in use: how much a number moves by each choice of the harness.

Shapes: T texts, V videos, Q queries.

A protocol is five choices. The order in which they act is fixed: scores are rounded (precision), the gallery
is cut (subset), captions are chosen (captions), scores of other queries correct them (rescoring), and what
is level with the target is counted (ties). The base is what `gare evaluate` does: the scores as they are, the
whole gallery, every caption, no rescoring, ties against the target.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from gare.errors import EvaluationError
from gare.evaluate.caption_protocols import video_to_text_rivals
from gare.evaluate.evaluation_results import Direction
from gare.evaluate.method_rescoring import assignment
from gare.evaluate.rank_metrics import Rivals, TiePolicy, count_rivals
from gare.evaluate.rescoring import dual_softmax, querybank_norm
from gare.evaluate.score_table import ScoreTable
from gare.evaluate.trec_files import trec_places

Ties = TiePolicy | Literal["trec"]
Captions = Literal["max_caption", "any_caption", "first_caption", "mean_caption"]
Subset = Literal["whole", "paired", "chosen"]
TriedRescoring = Literal["none", "dsl", "qb_norm", "qb_norm_on_test", "hungarian"]
Precision = Literal["given", "float32", "bfloat16", "float16"]

ASSIGNMENT_CELLS = 2**20
"""Above this many cells the assignment, O(T² · V), is left out: 1,000 × 1,000 take six seconds."""
CACHE_CELLS = 2**26
"""Matrices are kept for other protocols up to so many cells, half a gigabyte."""

MEANINGS: dict[str, str] = {
    "pessimistic": "a candidate level with the target counts against it",
    "average": "a candidate level with the target counts half",
    "optimistic": "a candidate level with the target does not count",
    "legacy": "every candidate level with the target gives a rank: more ranks than queries (a bug in use)",
    "trec": "equal scores are ordered by id, the larger first, as trec_eval does",
    "max_caption": "every caption is a query; a video stands for its best caption",
    "any_caption": "every caption is a query; the best own caption among all captions of others",
    "first_caption": "only the first caption of each video is used",
    "mean_caption": "the scores of a video's captions are averaged: as near as scores come to a paragraph",
    "whole": "every video",
    "paired": "only videos that a text belongs to",
    "chosen": "only the videos of --subset, and their texts",
    "none": "no rescoring",
    "dsl": "dual softmax over the other test queries, temperature 0.01",
    "qb_norm": "QB-Norm with the bank of --bank-scores",
    "qb_norm_on_test": "QB-Norm with the test queries as their own bank (a leak in use)",
    "hungarian": "each candidate is given to one query at most",
    "given": "scores as they are in the file",
    "float32": "scores rounded to float32",
    "bfloat16": "scores rounded to bfloat16",
    "float16": "scores rounded to float16",
}
"""What each choice means; the page docs/evaluation.md has the same words."""


@dataclass(frozen=True)
class Protocol:
    """How a number is measured."""

    direction: Direction = "text_to_video"
    ties: Ties = "pessimistic"
    captions: Captions = "max_caption"
    subset: Subset = "whole"
    rescoring: TriedRescoring = "none"
    precision: Precision = "given"

    def changes(self, other: Protocol) -> dict[str, str]:
        """What `other` does otherwise.

        >>> Protocol().changes(Protocol(ties="legacy"))
        {'ties': 'legacy'}
        """
        return {name: getattr(other, name) for name in CHOICES if getattr(self, name) != getattr(other, name)}


CHOICES: dict[str, tuple[str, ...]] = {
    "direction": get_args(Direction),
    "ties": ("pessimistic", "average", "optimistic", "trec", "legacy"),
    "captions": get_args(Captions),
    "subset": get_args(Subset),
    "rescoring": get_args(TriedRescoring),
    "precision": get_args(Precision),
}


@dataclass(frozen=True)
class Ranking:
    """The ranks that a protocol gives."""

    protocol: Protocol
    ranks: Tensor
    num_queries: int
    num_candidates: int
    groups: Tensor | None = field(repr=False, compare=False)
    """The video of each query where a video has several."""
    one_target: bool = True
    """Whether each query has one right candidate; nDCG and MRR mean nothing otherwise."""

    def is_paired_with(self, other: Ranking) -> bool:
        """Whether both rank the same queries in the same order."""
        same = self.protocol.direction == other.protocol.direction
        return same and self.num_queries == other.num_queries == len(self.ranks) == len(other.ranks)


@dataclass
class ProtocolGrid:
    """A table and every protocol that can be applied to it; what was computed is kept."""

    table: ScoreTable
    kept: Tensor | None = None
    """The columns of --subset."""
    left_out: dict[tuple[str, str], str] = field(init=False)
    """Choices that cannot be applied here or make no difference, and why."""
    _matrices: dict[tuple[str, ...], tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        every = [(name, value) for name, values in CHOICES.items() for value in values]
        self.left_out = {choice: why for choice in every if (why := self._why_not(*choice))}

    @property
    def one_caption(self) -> bool:
        """Whether every video has one text at most."""
        return len(self.table.video_T) == len(self.table.video_T.unique())

    def choices(self, name: str) -> tuple[str, ...]:
        """The values of a choice that can make a difference here."""
        return tuple(value for value in CHOICES[name] if (name, value) not in self.left_out)

    def changed(
        self, base: Protocol, num_changes: int, names: tuple[str, ...] | None = None
    ) -> Iterator[Protocol]:
        """Every protocol that differs from the base in so many choices."""
        for chosen in itertools.combinations(names or tuple(CHOICES), num_changes):
            others = [[v for v in self.choices(name) if v != getattr(base, name)] for name in chosen]
            for values in itertools.product(*others):
                protocol = replace(base, **dict(zip(chosen, values, strict=True)))  # type: ignore[arg-type]
                if self._is_meaningful(protocol, num_changes):
                    yield protocol

    def measure(self, protocol: Protocol) -> Ranking:
        """The ranks under a protocol."""
        for name in (each.name for each in fields(protocol)):
            value = getattr(protocol, name)
            if value not in CHOICES[name]:
                raise ValueError(f"{name} '{value}' is not one of {', '.join(CHOICES[name])}")
            why_not = self.left_out.get((name, value))
            if why_not and (name == "direction" or value != getattr(Protocol(), name)):
                raise EvaluationError(f"{name} {value} cannot be applied: {why_not}")
        scores_TV, video_T = self._rescored(protocol)
        to_video = protocol.direction == "text_to_video"
        any_caption = protocol.captions == "any_caption" and not to_video
        rivals = (
            count_rivals(scores_TV, video_T)
            if to_video
            else video_to_text_rivals(scores_TV, video_T, "any_caption" if any_caption else "max_caption")
        )
        several = len(video_T) > len(video_T.unique())
        return Ranking(
            protocol,
            self._ranks(rivals, scores_TV, video_T, protocol),
            num_queries=len(rivals.above_Q),
            num_candidates=len(scores_TV) if any_caption else scores_TV.shape[1],
            groups=video_T if to_video and several else None,
            one_target=not (any_caption and several),
        )

    def _is_meaningful(self, protocol: Protocol, num_changes: int) -> bool:
        """Whether a protocol has an answer, and not that of one with fewer changes."""
        several = not self.one_caption and protocol.captions in ("max_caption", "any_caption")
        if num_changes > 1 and protocol.rescoring == "hungarian":
            return False  # slow, and no harness combines it
        if protocol.direction == "text_to_video":
            return protocol.captions != "any_caption"  # differs from max_caption in video→text alone
        return not (
            protocol.rescoring == "qb_norm"  # a bank of texts says nothing about videos as queries
            or protocol.subset == "paired"  # always so
            or (protocol.ties == "trec" and several)
        )

    def _why_not(self, name: str, value: str) -> str:
        complete = self.table.is_complete
        if name == "direction" and not complete and value != _told_direction(self.table):
            return "the run lists only the best candidates"
        if name == "captions" and value != "max_caption" and self.one_caption:
            return "every video has one text"
        if (
            name in ("captions", "rescoring")
            and value not in ("max_caption", "any_caption", "none")
            and not complete
        ):
            return "the run lists only the best candidates"
        if name == "precision":
            return self._why_not_precision(value)
        if name == "subset":
            return self._why_not_subset(value)
        if value == "qb_norm" and self.table.bank_BV is None:
            return "no scores of a query bank were given"
        if value == "hungarian" and self.table.scores_TV.numel() > ASSIGNMENT_CELLS:
            return f"the matrix has more than {ASSIGNMENT_CELLS:,} cells"
        return ""

    def _why_not_subset(self, value: str) -> str:
        if value == "chosen" and self.kept is None:
            return "no subset was given"
        if value == "paired" and len(self.table.video_T.unique()) == self.table.scores_TV.shape[1]:
            return "every video has a text"
        return ""

    def _why_not_precision(self, value: str) -> str:
        scores_TV = self.table.scores_TV
        if value == "given":
            return ""
        rounded = scores_TV.to(_DTYPES[value])
        if not torch.isfinite(rounded).all():
            return f"some scores are too large for {value}"
        return (
            "the scores are no finer than that" if torch.equal(rounded.double(), scores_TV.double()) else ""
        )

    def _cut(self, protocol: Protocol) -> tuple[Tensor, Tensor]:
        """Scores and videos after precision, subset and captions."""
        scores_TV, video_T = self.table.scores_TV, self.table.video_T
        if protocol.precision != "given":
            scores_TV = scores_TV.to(_DTYPES[protocol.precision]).to(scores_TV.dtype)
        columns = self._columns(protocol)
        if columns is not None:
            scores_TV, video_T = _select(scores_TV, video_T, columns)
        if protocol.captions in ("first_caption", "mean_caption"):
            return _one_text_a_video(scores_TV, video_T, mean=protocol.captions == "mean_caption")
        return scores_TV, video_T

    def _columns(self, protocol: Protocol) -> Tensor | None:
        """The videos of the gallery; video→text has queries only for those with a text."""
        if protocol.subset == "chosen" and self.kept is not None:
            columns = self.kept
        elif protocol.subset == "paired" or protocol.direction == "video_to_text":
            columns = self.table.video_T.unique()
        else:
            return None
        if protocol.direction == "video_to_text":
            columns = columns[torch.isin(columns, self.table.video_T)]
        return None if len(columns) == self.table.scores_TV.shape[1] else columns

    def _rescored(self, protocol: Protocol) -> tuple[Tensor, Tensor]:
        captions = protocol.captions.replace("any", "max")  # the same matrix
        key = (protocol.direction, captions, protocol.subset, protocol.rescoring, protocol.precision)
        if key not in self._matrices:
            if sum(kept.numel() for kept, _ in self._matrices.values()) > CACHE_CELLS:
                self._matrices.clear()
            scores_TV, video_T = self._cut(protocol)
            self._matrices[key] = self._rescore(scores_TV, protocol), video_T
        return self._matrices[key]

    def _rescore(self, scores_TV: Tensor, protocol: Protocol) -> Tensor:
        if protocol.rescoring == "none":
            return scores_TV
        if protocol.rescoring == "qb_norm":
            if protocol.direction == "video_to_text" or self.table.bank_BV is None:
                return scores_TV  # a bank of texts says nothing about videos as queries
            columns = self._columns(protocol)
            bank_BV = self.table.bank_BV if columns is None else self.table.bank_BV[:, columns]
            return querybank_norm(scores_TV, bank_BV)
        to_video = protocol.direction == "text_to_video"
        scores_QN = scores_TV if to_video else scores_TV.mT
        if protocol.rescoring == "dsl":
            rescored_QN = dual_softmax(scores_QN)
        elif protocol.rescoring == "hungarian":
            rescored_QN = assignment(scores_QN)
        else:
            rescored_QN = querybank_norm(scores_QN, scores_QN)
        return rescored_QN if to_video else rescored_QN.mT

    def _ranks(self, rivals: Rivals, scores_TV: Tensor, video_T: Tensor, protocol: Protocol) -> Tensor:
        if protocol.ties != "trec":
            return rivals.ranks(protocol.ties)
        columns = self._columns(protocol)
        place_V = trec_places(self.table.video_ids)
        place_V = place_V if columns is None else place_V[columns]
        if protocol.direction == "text_to_video":
            scores_QN, target_Q, place_N = scores_TV, video_T, place_V
        else:  # one text a video: a text goes by the id of its video
            scores_QN, target_Q = scores_TV.mT, video_T.argsort()
            place_N = place_V[video_T]
        level_QN = scores_QN == scores_QN.gather(1, target_Q[:, None])
        return rivals.above_Q + 1 + (level_QN & (place_N < place_N[target_Q][:, None])).sum(dim=1)


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_subset(given: str, video_ids: tuple[str, ...]) -> Tensor:
    """The columns of a subset: a number, for the first so many videos, or a file with an id a line."""
    from pathlib import Path

    if given.isdecimal():
        if not 1 <= int(given) <= len(video_ids):
            raise EvaluationError(f"--subset {given}: there are {len(video_ids):,} videos")
        return torch.arange(int(given))
    try:
        wanted = list(dict.fromkeys(Path(given).read_text(encoding="utf-8-sig").split("\n")))
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(
            f"--subset {given}: give a number or a file with a video id a line ({error})"
        ) from None
    column = {name: place for place, name in enumerate(video_ids)}
    names = [name.strip() for name in wanted if name.strip()]
    unknown = [name for name in names if name not in column]
    if unknown or not names:
        what = f"'{unknown[0]}', which has no column" if unknown else "nothing"
        raise EvaluationError(f"--subset {given} names {what}; its lines are ids such as '{video_ids[0]}'")
    return torch.tensor(sorted({column[name] for name in names}))


def _told_direction(table: ScoreTable) -> Direction:
    return "text_to_video" if table.query_side == "texts" else "video_to_text"


def _select(scores_TV: Tensor, video_T: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """These videos and their texts."""
    place_V = torch.full((scores_TV.shape[1],), -1)
    place_V[columns] = torch.arange(len(columns))
    texts = (place_V[video_T] >= 0).nonzero().flatten()
    if not len(texts):
        raise EvaluationError("no text belongs to a video of the subset")
    return scores_TV[texts][:, columns], place_V[video_T[texts]]


def _one_text_a_video(scores_TV: Tensor, video_T: Tensor, *, mean: bool) -> tuple[Tensor, Tensor]:
    """A row for each video that has a text: its first text's, or the mean of all."""
    videos, row_T = video_T.unique(return_inverse=True)
    if not mean:
        first: dict[int, int] = {}
        for text, video in enumerate(video_T.tolist()):
            first.setdefault(video, text)
        return scores_TV[torch.tensor([first[video] for video in videos.tolist()])], videos
    total_UV = scores_TV.new_zeros(len(videos), scores_TV.shape[1], dtype=torch.float64)
    total_UV.index_add_(0, row_T, scores_TV.double())
    return total_UV / row_T.bincount()[:, None], videos
