"""`gare bench moments`: scenes planted in a film, and whether they come back. Apart from the other
benchmarks, whose file is long enough."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from gare.bench.moments_bench import MomentsBenchmark


def moments(
    clips: list[Path] = typer.Argument(help="Clips, and folders of clips."),
    captions: Path | None = typer.Option(
        None, help="CSV with the columns video and caption; default: captions.csv beside the first clip."
    ),
    planted: int = typer.Option(10, min=1, help="Clips that are planted, of those with a caption."),
    minutes: float = typer.Option(40.0, min=0.1, help="Length of the film."),
    seed: int = typer.Option(0, help="Which clips are planted, and where."),
    model: str = typer.Option("gare-mini", help="Folder, hub id or name of the model."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of the table."),
) -> None:
    """Plant clips in a film made of the others, index it, search their captions.

    Examples:

        gare bench moments ~/clips

        gare bench moments ~/clips --captions ~/captions.csv --planted 5 --minutes 10 --json
    """
    from gare.bench.moments_bench import benchmark_moments

    result = benchmark_moments(
        clips,
        captions,
        model=model,
        num_planted=planted,
        minutes=minutes,
        seed=seed,
        say=Console(stderr=True).print,
    )
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(result)))
        return
    Console().print(_table(result))
    typer.echo(
        f"first at the right second: {result.num_first} of {result.num_planted}; "
        f"among the first ten: {result.num_among_ten}"
    )
    typer.echo(
        f"indexed in {result.index_s:.1f} s, {result.times_as_fast:.0f} times as fast as it plays; "
        f"{result.num_items:,} items, {result.bytes_per_hour / 1e6:.1f} MB for an hour; "
        f"a search takes {result.search_ms:.0f} ms"
    )


def _table(result: MomentsBenchmark) -> Table:
    table = Table(
        title=f"{result.num_planted} scenes in {result.film_s / 60:.0f} minutes",
        caption=f"{result.model}, {result.device}",
    )
    for column in ("caption", "planted at", "first hit at", "rank"):
        table.add_column(column, justify="left" if column == "caption" else "right")
    for scene in result.scenes:
        found = "–" if scene.found_at is None else f"{scene.found_at:.1f} s"
        rank = "–" if scene.rank is None else str(scene.rank)
        table.add_row(scene.caption, f"{scene.start:.1f} to {scene.end:.1f} s", found, rank)
    return table
