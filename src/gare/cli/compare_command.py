"""`gare compare A B`: is one run better than the other, or is it noise?"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from gare.evaluate import EvaluationResult, compare_results, comparison_table


def compare(
    a: Annotated[Path, typer.Argument(help="results.json of the first run, the baseline.")],
    b: Annotated[Path, typer.Argument(help="results.json of the second run, on the same split.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare two result files with paired permutation tests, query by query."""
    result_a, result_b = EvaluationResult.read(a), EvaluationResult.read(b)
    comparison = compare_results(result_a, result_b)
    if result_a.selected_on != result_b.selected_on:
        typer.echo(
            f"warning: A was selected on {result_a.selected_on}, B on {result_b.selected_on}; "
            "selection on the measured split inflates a number",
            err=True,
        )
    if as_json:
        tests = {
            direction: {
                name: {**asdict(test), "difference": test.difference} for name, test in by_metric.items()
            }
            for direction, by_metric in comparison.items()
        }
        typer.echo(json.dumps({"a": str(a), "b": str(b), **tests}, indent=2))
        return
    typer.echo(f"A: {a}\nB: {b}\n{result_a.dataset}, split {result_a.split}, protocol {result_a.protocol}\n")
    typer.echo(comparison_table(comparison), nl=False)
    typer.echo(
        "p: two-sided, from paired permutations; twelve tests at once, so expect a small one by chance",
        err=True,
    )
