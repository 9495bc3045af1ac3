"""The referee's table: the base protocol, then each choice changed alone, with intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gare.evaluate.evaluation_results import DIRECTIONS, Direction, markdown_rows
from gare.evaluate.named_measures import MAIN_MEASURES, Measure
from gare.evaluate.protocol_grid import CHOICES, MEANINGS, Protocol, ProtocolGrid, Ranking
from gare.evaluate.significance import Interval, bootstrap_intervals, paired_bootstrap_intervals

MAIN = Measure.named("R@1")


@dataclass(frozen=True)
class ProtocolRow:
    """One protocol's numbers."""

    protocol: Protocol
    changes: dict[str, str]
    num_queries: int
    num_ranks: int
    num_candidates: int
    numbers: dict[str, float | None]
    """By the name of the measure; None where it means nothing."""
    interval: Interval | None
    """95 % of R@1; none under "legacy", whose ranks are not one a query."""
    moved: float
    """R@1 less that of the base."""
    moved_interval: Interval | None
    """95 % of `moved`, queries paired; none where the queries are others."""

    def to_values(self) -> dict[str, Any]:
        """The row as JSON."""
        return asdict(self)


def protocol_rows(
    grid: ProtocolGrid, base: Protocol, on_progress: Callable[[int, int], None] | None = None
) -> list[ProtocolRow]:
    """The base and every protocol that differs from it in one choice, in the order of `CHOICES`."""
    names = tuple(name for name in CHOICES if name != "direction")
    protocols = [base, *grid.changed(base, 1, names)]
    reference = grid.measure(base)
    rows = []
    for done, protocol in enumerate(protocols, start=1):
        rows.append(_row(grid.measure(protocol), reference))
        if on_progress:
            on_progress(done, len(protocols))
    return rows


def numbers_of(ranking: Ranking, measures: Sequence[Measure] = MAIN_MEASURES) -> dict[str, float | None]:
    """The measures of a ranking; nDCG and MRR only where each query has one rank and one target."""
    single = ranking.one_target and len(ranking.ranks) == ranking.num_queries
    return {
        str(measure): measure.of_ranks(ranking.ranks)
        if single or measure.kind not in ("ndcg", "mrr")
        else None
        for measure in measures
    }


def protocol_markdown(rows: Sequence[ProtocolRow], direction: Direction) -> str:
    """The table of one direction in Markdown, in percent."""
    head = [
        DIRECTIONS[direction],
        "queries",
        "of",
        *map(str, MAIN_MEASURES),
        "95 % of R@1",
        "R@1 moves",
        "95 %",
    ]
    return markdown_rows(head, [_cells(row) for row in rows])


def describe_changes(changes: dict[str, str]) -> str:
    """A row's name.

    >>> describe_changes({}), describe_changes({"ties": "legacy", "precision": "float16"})
    ('base', 'ties: legacy, precision: float16')
    """
    return ", ".join(f"{name}: {value}" for name, value in changes.items()) or "base"


def legend(rows: Sequence[ProtocolRow]) -> str:
    """What the changed choices of a table mean, a line each."""
    used = dict.fromkeys(value for row in rows for value in row.changes.values())
    return "\n".join(f"- {value}: {MEANINGS[value]}" for value in used)


def _row(ranking: Ranking, base: Ranking) -> ProtocolRow:
    one_rank = len(ranking.ranks) == ranking.num_queries
    paired = ranking.is_paired_with(base) and ranking is not base
    return ProtocolRow(
        protocol=ranking.protocol,
        changes=base.protocol.changes(ranking.protocol),
        num_queries=ranking.num_queries,
        num_ranks=len(ranking.ranks),
        num_candidates=ranking.num_candidates,
        numbers=numbers_of(ranking),
        interval=bootstrap_intervals(ranking.ranks, groups=ranking.groups)["recall_at_1"]
        if one_rank
        else None,
        moved=MAIN.of_ranks(ranking.ranks) - MAIN.of_ranks(base.ranks),
        moved_interval=(
            paired_bootstrap_intervals(base.ranks, ranking.ranks, groups=ranking.groups)["recall_at_1"]
            if paired and ranking.protocol != base.protocol
            else None
        ),
    )


def _cells(row: ProtocolRow) -> list[str]:
    values = [row.numbers[str(measure)] for measure in MAIN_MEASURES]
    numbers = [
        "–" if value is None else measure.percent(value, ".3f" if measure.kind == "mean_rank" else ".1f")
        for measure, value in zip(MAIN_MEASURES, values, strict=True)
    ]
    queries = f"{row.num_queries:,}" + (
        "" if row.num_ranks == row.num_queries else f" ({row.num_ranks:,} ranks)"
    )
    moved = "" if not row.changes else MAIN.percent(row.moved, "+z.1f")
    intervals = [_interval(row.interval, ".1f"), moved, _interval(row.moved_interval, "+z.1f")]
    return [describe_changes(row.changes), queries, f"{row.num_candidates:,}", *numbers, *intervals]


def _interval(interval: Interval | None, spec: str) -> str:
    if interval is None:
        return ""
    return f"[{MAIN.percent(interval.low, spec)}, {MAIN.percent(interval.high, spec)}]"
