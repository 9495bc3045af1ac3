"""What a search returns: a segment of a video, where in it the query matches, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gare.library.search.refined_moment import RefinedMoment

HIT_COLUMNS = (
    "id",
    "path",
    "start",
    "end",
    "file_duration",
    "content",
    "width",
    "height",
    "modified",
    "added",  # with it the checksum speaks for the duration too
    "tags",
    "times",
)
"""What a hit needs from the store."""


@dataclass(frozen=True)
class Explanation:
    """What the increment did to a hit, among the same candidates."""

    rank: int
    plain_rank: int
    """Its rank with a dual encoder: the same towers without increments."""
    plain_score: float
    radius: float | None
    """Length of the increment; None for a model without."""


@dataclass(frozen=True)
class OtherMoment:
    """A part of the same file that matches too, but less."""

    id: str
    score: float
    start: float
    end: float
    moment: float


@dataclass(frozen=True)
class SearchHit:
    """A segment of a video, and why it was found."""

    id: str
    score: float
    path: str
    start: float
    """Where the moment begins, in seconds into the file; where its frames are too few to tell, the item."""
    end: float
    moment: float
    """The time of the frame with the best score (`find_moment`)."""
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
    file_duration: float = 0.0
    """Seconds of the whole file."""
    others: tuple[OtherMoment, ...] = ()
    """Other moments of the file among the items that were scored, best first: those whose best frame still
    matches beside the hit's own. None of them overlap. Empty where every moment is a hit of its own."""
    duplicates: tuple[str, ...] = ()
    """Ids of near-copies that were folded into this hit."""
    explanation: Explanation | None = None

    @property
    def moment_ids(self) -> list[str]:
        """Ids of the items that its moments were found by, its own first."""
        return [self.id, *(other.id for other in self.others)]


@dataclass(frozen=True)
class Certificate:
    """Why a list is the true one: no item that was not scored can be a hit."""

    num_items: int
    """Items that could have been hits: those that pass the filter."""
    num_scored: int
    """Items whose exact score was computed."""
    last_score: float | None = None
    """The lowest score that was needed; None when all items were scored."""
    next_bound: float | None = None
    """What no item that was left out can reach; None when all were scored."""
    num_refined: int = 0
    """Items for which two products were not enough, so that their keys were read."""


class Hits(list[SearchHit]):
    """The hits of a search, best first."""

    def __init__(
        self,
        hits: Iterable[SearchHit] = (),
        certificate: Certificate | None = None,
        missing: tuple[str, ...] = (),
    ) -> None:
        super().__init__(hits)
        self.certificate = certificate
        """The proof that no other item belongs among them; None where there is none."""
        self.missing = missing
        """Ranges of item ids that could not be searched: their shard is lost. It comes back."""

    @property
    def partial(self) -> bool:
        """Whether items were left out because a shard did not answer."""
        return bool(self.missing)


def make_hit(
    facts: dict[str, Any],
    *,
    score: float,
    frame_scores: Sequence[float],
    frame_weights: Sequence[float],
    duplicates: tuple[str, ...],
    explanation: Explanation | None,
    others: tuple[OtherMoment, ...] = (),
    refined: RefinedMoment | None = None,
) -> SearchHit:
    """A hit from a row of the store and what the search knows; frames beyond the real ones are padding."""
    times = tuple(float(time) for time in facts["times"])
    real_scores = tuple(frame_scores[: len(times)])
    start, end = facts["start"], facts["end"]
    part = refined or RefinedMoment(start, end, find_moment(times, real_scores, start, end))
    part = _within(part, facts["file_duration"])
    return SearchHit(
        id=facts["id"],
        score=score,
        path=facts["path"],
        start=part.start,
        end=part.end,
        moment=part.best,
        frame_times=times,
        frame_scores=real_scores,
        frame_weights=tuple(frame_weights[: len(times)]),
        content=facts["content"],
        width=facts["width"],
        height=facts["height"],
        modified=facts["modified"].isoformat(timespec="seconds"),
        tags=tuple(facts["tags"]),
        file_duration=facts["file_duration"],
        others=others,
        duplicates=duplicates,
        explanation=explanation,
    )


def other_moment(
    facts: dict[str, Any], *, score: float, frame_scores: Sequence[float], refined: RefinedMoment | None
) -> OtherMoment:
    """A moment beside the best one of its file."""
    times, start, end = facts["times"], facts["start"], facts["end"]
    best = find_moment(times, frame_scores[: len(times)], start, end)
    part = _within(refined or RefinedMoment(start, end, best), facts["file_duration"])
    return OtherMoment(facts["id"], score, part.start, part.end, part.best)


def _within(part: RefinedMoment, duration: float) -> RefinedMoment:
    """Not longer than its file: how long its last frame is shown is a guess."""
    return replace(part, end=duration) if part.best < duration < part.end else part


def find_moment(times: Sequence[float], scores: Sequence[float], start: float, end: float) -> float:
    """The time of the frame with the best score, kept within the segment.

    The frame on screen when a segment begins may have appeared a little before it.

    >>> find_moment([1.9, 4.0, 6.0], [0.3, 0.1, 0.2], start=2.0, end=7.0)
    2.0
    """
    return min(max(times[scores.index(max(scores))], start), end)
