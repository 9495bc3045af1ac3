"""Which choice of the harness explains a difference: every protocol is tried, the fewest changes first.

A match says that a protocol *gives* the reported numbers, not that it was used: among many protocols some
match by chance, more so when few numbers were reported. The explanation says how many were tried and how
many of them match. What no protocol explains lies in how the scores were made: frames, prompts, weights,
other texts or videos.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gare.evaluate.evaluation_results import (
    DIRECTIONS,
    Direction,
    DirectionResult,
    EvaluationResult,
    markdown_rows,
)
from gare.evaluate.named_measures import Measure
from gare.evaluate.protocol_grid import Captions, Protocol, ProtocolGrid
from gare.evaluate.protocol_table import describe_changes, numbers_of
from gare.evaluate.reported_numbers import Reported, ReportedSet
from gare.evaluate.significance import Interval, bootstrap_intervals, paired_bootstrap_intervals

MOST_SHOWN = 12


@dataclass(frozen=True)
class Candidate:
    """A protocol and what it gives."""

    protocol: Protocol
    numbers: dict[str, float | None]
    ranks: Tensor | None
    groups: Tensor | None


@dataclass(frozen=True)
class GridCandidates:
    """The protocols of a table of scores."""

    grid: ProtocolGrid
    measures: tuple[Measure, ...]

    def captions(self, direction: Direction) -> Captions:
        """The captions of the base protocol."""
        return "max_caption"

    def protocols(self, base: Protocol, num_changes: int) -> Iterable[Protocol]:
        """Those that differ from the base in so many choices."""
        return self.grid.changed(base, num_changes) if num_changes else [base]

    def measure(self, protocol: Protocol) -> Candidate:
        """What a protocol gives."""
        ranking = self.grid.measure(protocol)
        one_rank = len(ranking.ranks) == ranking.num_queries
        ranks = ranking.ranks if one_rank else None
        return Candidate(protocol, numbers_of(ranking, self.measures), ranks, ranking.groups)


@dataclass(frozen=True)
class ResultCandidates:
    """The protocols that a results.json holds: both directions, its tie policies, its rescored results."""

    result: EvaluationResult
    measures: tuple[Measure, ...]

    def captions(self, direction: Direction) -> Captions:
        """The captions of the file; another choice of them needs the scores."""
        if direction == "text_to_video":
            return "max_caption"  # every caption is a query, whatever the protocol
        return "first_caption" if self.result.protocol == "one_caption" else self.result.protocol

    def protocols(self, base: Protocol, num_changes: int) -> Iterable[Protocol]:
        """Those that differ from the base in so many choices."""
        return (each for each in self._held() if len(base.changes(each)) == num_changes)

    def measure(self, protocol: Protocol) -> Candidate:
        """What a protocol gives."""
        results = {each.rescoring: each for each in (self.result, *self.result.rescored)}
        measured: DirectionResult = getattr(results[protocol.rescoring], protocol.direction)  # type: ignore[index]
        numbers = measured.by_ties[protocol.ties]  # type: ignore[index]
        main = protocol.ties == "pessimistic"
        return Candidate(
            protocol,
            {str(measure): _held_number(measure, numbers) for measure in self.measures},
            torch.tensor(measured.ranks) if main else None,
            torch.tensor(measured.groups) if main and measured.groups else None,
        )

    def _held(self) -> Iterable[Protocol]:
        for each in (self.result, *self.result.rescored):
            for direction in DIRECTIONS:
                for ties in getattr(each, direction).by_ties:
                    yield Protocol(direction, ties, self.captions(direction), rescoring=each.rescoring)


Candidates = GridCandidates | ResultCandidates


@dataclass(frozen=True)
class Tried:
    """A protocol against the reported numbers."""

    changes: dict[str, str]
    numbers: dict[str, float | None]
    remains: float | None
    """The first reported number less what the protocol gives; None where the protocol has no such number."""
    rest: float
    """The sum of the differences of all reported shares, to tell protocols with equal `remains` apart."""
    matches: bool

    @property
    def distance(self) -> tuple[float, float, int]:
        """Smaller is nearer: a match, then the first number, then the others, then fewer changes."""
        if self.matches:
            return -1, 0, len(self.changes)
        first = float("inf") if self.remains is None else round(abs(self.remains), 9)
        return first, round(self.rest, 9), len(self.changes)


@dataclass(frozen=True)
class Explanation:
    """What the difference in one direction comes from."""

    direction: Direction
    reported: tuple[Reported, ...]
    base: Tried
    tried: tuple[Tried, ...]
    """Every protocol, the base first, then those with one change, then with two."""
    interval: Interval | None
    """95 % of the first measure under the base protocol, where it is one of the six metrics."""
    paired: dict[str, Any] | None
    """B less A under the nearest protocol, query by query, where B has ranks of as many queries."""

    @property
    def matches(self) -> list[Tried]:
        """The protocols with the fewest changes that give every reported number."""
        found = [tried for tried in self.tried if tried.matches]
        fewest = min((len(tried.changes) for tried in found), default=0)
        return [tried for tried in found if len(tried.changes) == fewest]

    @property
    def nearest(self) -> Tried:
        """The protocol that comes nearest to what was reported."""
        return min(self.tried, key=lambda tried: tried.distance)

    def to_values(self) -> dict[str, Any]:
        """The explanation as JSON."""
        return {
            "reported": {str(each.measure): each.value for each in self.reported},
            "base": vars(self.base),
            "num_tried": len(self.tried),
            "num_matching": sum(tried.matches for tried in self.tried),
            "explained_by": [tried.changes for tried in self.matches],
            "nearest": vars(self.nearest),
            "single_changes": [vars(tried) for tried in self.tried if len(tried.changes) == 1],
            "interval_of_base": None if self.interval is None else vars(self.interval),
            "paired": self.paired,
        }


def explain(
    candidates: Candidates,
    reported: ReportedSet,
    direction: Direction,
    *,
    most_changes: int,
    on_progress: Callable[[int, int], None] | None = None,
) -> Explanation:
    """Try every protocol with up to `most_changes` changes against the reported numbers of a direction."""
    base = Protocol(direction, captions=candidates.captions(direction))
    wanted = reported.numbers[direction]
    protocols = [each for size in range(most_changes + 1) for each in candidates.protocols(base, size)]
    first = nearest = candidates.measure(protocols[0])
    tried = [_judge(first, base, wanted)]
    for done, protocol in enumerate(protocols[1:], start=2):
        candidate = candidates.measure(protocol)
        tried.append(_judge(candidate, base, wanted))
        if tried[-1].distance < min(each.distance for each in tried[:-1]):
            nearest = candidate
        if on_progress:
            on_progress(done, len(protocols))
    return Explanation(
        direction,
        wanted,
        base=tried[0],
        tried=tuple(tried),
        interval=_base_interval(first, wanted[0]),
        paired=_paired(nearest, base, reported.ranks.get(direction)),
    )


def explanation_markdown(explanation: Explanation) -> str:
    """The explanation in words and a table, in percent."""
    parts = [_finding(explanation), _single_table(explanation)]
    if explanation.paired:
        parts.append(_paired_sentence(explanation.paired))
    return "\n\n".join(parts)


def _finding(explanation: Explanation) -> str:
    shown = ", ".join(each.shown() for each in explanation.reported[:MOST_SHOWN])
    head = f"**{DIRECTIONS[explanation.direction]}**: reported {shown}."
    num_tried, num_found = len(explanation.tried), sum(tried.matches for tried in explanation.tried)
    if explanation.base.matches:
        return f"{head} The base protocol gives the same: nothing is to be explained."
    first = explanation.reported[0].measure
    if not explanation.matches:
        nearest = explanation.nearest
        remains = _remains(first, nearest)
        return (
            f"{head} None of {num_tried:,} protocols gives that. The nearest is "
            f"{describe_changes(nearest.changes)}; {remains} of {first} remain unexplained. Look for them in "
            "how the scores were made: frames, prompts, weights, other texts or videos."
        )
    names = "; or ".join(describe_changes(tried.changes) for tried in explanation.matches[:MOST_SHOWN])
    chance = (
        f" {num_found:,} of {num_tried:,} protocols match; report more measures to tell them apart."
        if num_found > 1
        else f" It is the only one of {num_tried:,} protocols."
    )
    return f"{head} Explained by {names}.{chance}"


def _single_table(explanation: Explanation) -> str:
    rows = []
    shown = [explanation.nearest, *explanation.matches[:MOST_SHOWN]]
    for tried in explanation.tried:
        if len(tried.changes) <= 1 or tried in shown:
            cells = [_cell(each.measure, tried.numbers[str(each.measure)]) for each in explanation.reported]
            first = explanation.reported[0].measure
            rows.append(
                [
                    describe_changes(tried.changes),
                    *cells,
                    _remains(first, tried),
                    "yes" if tried.matches else "",
                ]
            )
    names = [str(each.measure) for each in explanation.reported]
    table = markdown_rows(["choice", *names, f"{names[0]} left", "same"], rows)
    if explanation.interval is None:
        return table
    low, high = (
        explanation.reported[0].measure.percent(each) for each in vars(explanation.interval).values()
    )
    return f"{table}\n\n95 % of {names[0]} under the base protocol, other queries drawn: [{low}, {high}]."


def _paired_sentence(paired: dict[str, Any]) -> str:
    low, high = (100 * paired["interval"][end] for end in ("low", "high"))
    return (
        f"B − A under {describe_changes(paired['changes'])}, query by query: "
        f"R@1 {100 * paired['difference']:+z.1f} [{low:+z.1f}, {high:+z.1f}]; "
        f"{paired['num_changed']:,} of {paired['num_queries']:,} ranks differ. The queries are taken to be "
        "the same, in the same order."
    )


def _remains(first: Measure, tried: Tried) -> str:
    return "–" if tried.remains is None else first.percent(tried.remains, "+z.2f")


def _cell(measure: Measure, value: float | None) -> str:
    return "–" if value is None else measure.percent(value, ".2f")


def _judge(candidate: Candidate, base: Protocol, wanted: tuple[Reported, ...]) -> Tried:
    numbers = candidate.numbers
    first = numbers[str(wanted[0].measure)]
    return Tried(
        changes=base.changes(candidate.protocol),
        numbers=numbers,
        remains=None if first is None else wanted[0].value - first,
        rest=sum(
            abs(each.value - (numbers[str(each.measure)] or 0)) for each in wanted if each.measure.is_share
        ),
        matches=all(each.is_met_by(numbers[str(each.measure)]) for each in wanted),
    )


def _held_number(measure: Measure, numbers: object) -> float | None:
    """A measure of a results.json, if it holds it."""
    name = f"recall_at_{measure.cutoff}" if measure.kind == "recall" else measure.kind
    value = getattr(numbers, name, None)
    return None if value is None else float(value)


def _base_interval(base: Candidate, first: Reported) -> Interval | None:
    name = f"recall_at_{first.measure.cutoff}" if first.measure.kind == "recall" else first.measure.kind
    if base.ranks is None:
        return None
    return dict[str, Interval](bootstrap_intervals(base.ranks, groups=base.groups)).get(name)  # type: ignore[arg-type]


def _paired(nearest: Candidate, base: Protocol, ranks_b: tuple[int, ...] | None) -> dict[str, Any] | None:
    if ranks_b is None or nearest.ranks is None or len(ranks_b) != len(nearest.ranks):
        return None
    found = paired_bootstrap_intervals(nearest.ranks, ranks_b, groups=nearest.groups)["recall_at_1"]
    other = torch.tensor(ranks_b)
    recall = Measure.named("R@1")
    return {
        "changes": base.changes(nearest.protocol),
        "difference": recall.of_ranks(other) - recall.of_ranks(nearest.ranks),
        "interval": vars(found),
        "num_changed": int((other != nearest.ranks).sum()),
        "num_queries": len(ranks_b),
    }
