"""`gare compare A B`: is one run better than the other, or is it noise, or only another protocol?"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gare.errors import EvaluationError

if TYPE_CHECKING:
    from gare.cli.score_options import ScoreInput
    from gare.evaluate.difference_explained import Candidates, Explanation
    from gare.evaluate.evaluation_results import Direction
    from gare.evaluate.named_measures import Measure
    from gare.evaluate.reported_numbers import ReportedSet


def compare(
    a: Annotated[Path, typer.Argument(help="results.json of the first run, or a file of scores.")],
    b: Annotated[
        str,
        typer.Argument(help="results.json of the second run, scores, MTEB's result, or R@1=53.8,R@5=80.1."),
    ],
    explain_it: Annotated[
        bool, typer.Option("--explain", help="Of two results.json: which choice explains the difference?")
    ] = False,
    direction: Annotated[
        str, typer.Option(help="Of reported numbers: text_to_video or video_to_text.")
    ] = "text_to_video",
    qrels: Annotated[
        Path | None, typer.Option(help="Which video is right for each text of A's scores.")
    ] = None,
    qrels_b: Annotated[
        Path | None, typer.Option(help="The same for B's scores, if it is not --qrels or --data.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Prepared dataset of A's rows and columns.")] = None,
    split: Annotated[str, typer.Option(help="Split of --data.")] = "test",
    subset: Annotated[str, typer.Option(help="The first N videos, or a file of video ids, to try.")] = "",
    bank_scores: Annotated[
        Path | None, typer.Option(help="A query bank's scores with A's videos, .npy.")
    ] = None,
    logit_scale: Annotated[float, typer.Option(min=1e-6, help="What A's cosines were multiplied by.")] = 1.0,
    changes: Annotated[int, typer.Option(min=1, max=3, help="Choices that may differ at once.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare two result files with paired tests, or explain a number by the protocol it was measured with.

    Two results.json of the same queries and protocol: paired permutation tests and intervals, query by query.
    Scores, or a reported number: every protocol is tried, and what gives the other number is named.

    Examples:

        gare compare baseline.json full.json

        gare compare scores.npy R@1=52.8,R@5=78.0,R@10=85.8

        gare compare run.trec theirs.json --qrels qrels.txt

        gare compare scores.npy run.trec --qrels-b qrels.txt

        gare compare mine.json theirs.json --explain
    """
    from gare.cli.score_options import ScoreInput, check_direction, describe_table
    from gare.evaluate import EvaluationResult
    from gare.evaluate.difference_explained import GridCandidates, ResultCandidates
    from gare.evaluate.reported_numbers import ReportedSet

    is_result = _is_result(a)
    if is_result and _is_result(Path(b)) and not explain_it:
        _compare_results(a, Path(b), as_json)
        return
    towards = check_direction(direction)
    given = ScoreInput(a, qrels, data, split, "", bank_scores, logit_scale, subset)
    if is_result:
        result = EvaluationResult.read(a)
        reported = _reported(b, towards, given, qrels_b)
        explained = _explain(ResultCandidates(result, _measures(reported)), reported, changes)
        _print_explained({"a": str(a), "b": reported.source}, explained, as_json)
        return
    grid = given.grid()
    reported = _reported(b, towards, given, qrels_b)
    told = {way: numbers for way, numbers in reported.numbers.items() if way in grid.choices("direction")}
    reported = ReportedSet(reported.source, told, reported.ranks)
    explained = _explain(GridCandidates(grid, _measures(reported)), reported, changes)
    _print_explained({**describe_table(given, grid.table), "b": reported.source}, explained, as_json)


def _compare_results(a: Path, b: Path, as_json: bool) -> None:
    from gare.evaluate import EvaluationResult, compare_results, comparison_table, difference_intervals

    result_a, result_b = EvaluationResult.read(a), EvaluationResult.read(b)
    comparison = compare_results(result_a, result_b)
    intervals = difference_intervals(result_a, result_b)
    if result_a.selected_on != result_b.selected_on:
        typer.echo(
            f"warning: A was selected on {result_a.selected_on}, B on {result_b.selected_on}; "
            "selection on the measured split inflates a number",
            err=True,
        )
    if as_json:
        tests = {
            way: {
                name: {
                    **asdict(test),
                    "difference": test.difference,
                    "interval": asdict(intervals[way][name]),
                }
                for name, test in by_metric.items()
            }
            for way, by_metric in comparison.items()
        }
        typer.echo(json.dumps({"a": str(a), "b": str(b), **tests}, indent=2))
        return
    typer.echo(f"A: {a}\nB: {b}\n{result_a.dataset}, split {result_a.split}, protocol {result_a.protocol}\n")
    typer.echo(comparison_table(comparison, intervals), nl=False)
    typer.echo(
        "p: two-sided, from paired permutations; twelve tests at once, so expect a small one by chance",
        err=True,
    )


def _is_result(path: Path) -> bool:
    from gare.evaluate.reported_numbers import is_own_result, read_json

    return path.suffix == ".json" and path.is_file() and is_own_result(read_json(path))


def _reported(b: str, direction: Direction, given: ScoreInput, qrels_b: Path | None) -> ReportedSet:
    """What B says: numbers as typed, of a result file, or of scores under the base protocol."""
    from gare.cli.score_options import ScoreInput
    from gare.evaluate import EvaluationResult
    from gare.evaluate.reported_numbers import (
        is_mteb_result,
        is_own_result,
        parse_reported,
        read_json,
        read_mteb_result,
        reported_by_grid,
        reported_by_result,
    )

    path = Path(b)
    if not path.is_file():
        return parse_reported(b, direction)
    if path.suffix == ".json":
        values = read_json(path)
        if is_own_result(values):
            return reported_by_result(EvaluationResult.read(path), b)
        if is_mteb_result(values):
            return read_mteb_result(path, direction)
    if qrels_b is not None:
        return reported_by_grid(ScoreInput(path, qrels_b, None, given.split).grid(), b)
    other = ScoreInput(path, given.qrels, given.data, given.split)
    return reported_by_grid(other.grid(), b)


def _measures(reported: ReportedSet) -> tuple[Measure, ...]:
    return tuple(dict.fromkeys(each.measure for numbers in reported.numbers.values() for each in numbers))


def _explain(candidates: Candidates, reported: ReportedSet, changes: int) -> dict[Direction, Explanation]:
    from gare.cli.score_options import progress
    from gare.evaluate.difference_explained import explain
    from gare.evaluate.evaluation_results import DIRECTIONS

    explained = {}
    for way in reported.numbers:
        with progress(f"{DIRECTIONS[way]}, protocols") as advance:
            explained[way] = explain(candidates, reported, way, most_changes=changes, on_progress=advance)
    if not explained:
        raise EvaluationError("A's run lists only the best candidates and tells nothing of B's direction")
    return explained


def _print_explained(facts: dict[str, Any], explained: dict[Direction, Explanation], as_json: bool) -> None:
    from gare.evaluate.difference_explained import explanation_markdown

    if as_json:
        typer.echo(json.dumps({**facts, **{way: found.to_values() for way, found in explained.items()}}))
        return
    typer.echo(" · ".join(f"{name} {value}" for name, value in facts.items()))
    for found in explained.values():
        typer.echo(f"\n{explanation_markdown(found)}")
