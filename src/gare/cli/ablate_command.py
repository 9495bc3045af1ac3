"""`gare ablate`: a table of the paper, rows × seeds."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from rich.console import Console

from gare.cli.options import choose_device
from gare.cli.recipes import RECIPES, TABLES, find_recipe, recipe_names


def ablate(
    table: str = typer.Argument(
        help=f"TOML file with the rows, or one of {', '.join(recipe_names(TABLES))}."
    ),
    recipe: str = typer.Option(..., help="The recipe every row starts from, a file or a name as for train."),
    out: Path = typer.Option(..., "--out", "-o", help="Folder of the cells and of table.md and table.json."),
    seeds: int = typer.Option(5, min=1, help="Number of seeds for each row: 0, 1, …"),
    settings: list[str] = typer.Option([], "--set", help="Change a setting of every row."),
    without: list[str] = typer.Option([], help="A row to leave out, by its name; may be given again."),
    split: str = typer.Option("test", help="Split to evaluate: train, val or test."),
    jobs: int = typer.Option(1, min=1, help="Cells trained at the same time, each in its own process."),
    device: str = typer.Option("auto", help="auto, cpu, cuda or cuda:N."),
    as_json: bool = typer.Option(False, "--json", help="Print the numbers instead of the table."),
) -> None:
    """Train and evaluate every row with several seeds, and compare each with the first row.

    Cells that are finished are never computed again, and a cell that was interrupted is resumed.

    Example:

        gare ablate losses --recipe msrvtt_frames_mini --out runs/losses
    """
    from gare.train.ablation import (
        Ablation,
        ablation_table,
        measure_costs,
        run_ablation,
        save_table,
        summarise,
    )

    console = Console(stderr=True)
    ablation = Ablation.load(find_recipe(table, TABLES)).without(without)
    start, chosen = find_recipe(recipe, RECIPES), choose_device(device)
    results = run_ablation(
        ablation,
        start,
        out,
        seeds=range(seeds),
        overrides=settings,
        split=split,  # type: ignore[arg-type]
        device=chosen,
        jobs=jobs,
        say=console.print,
    )
    costs = None
    if ablation.costs:
        costs = measure_costs(ablation, start, out, seed=0, overrides=settings, device=chosen)
    save_table(ablation, results, out, costs)
    table_text = ablation_table(ablation, results, costs)
    typer.echo(json.dumps(summarise(ablation, results, costs)) if as_json else table_text)
