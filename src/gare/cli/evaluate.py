"""`gare evaluate`: what a model can do, with the uncertainty beside it."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import Progress

from gare.cli.options import choose_device
from gare.errors import EvaluationError


def evaluate(
    model: str = typer.Argument(help="Folder of a saved model, or a hub id."),
    data: Path = typer.Option(..., help="What `gare data prepare` made."),
    split: str = typer.Option("test", help="train, val or test."),
    frames: int = typer.Option(12, min=1, help="Frames a video."),
    protocol: str = typer.Option("max_caption", help="max_caption, any_caption or one_caption."),
    rescore: str = typer.Option("none", help="none, or dsl as a second, labelled result."),
    selected_on: str = typer.Option("", help="The split that chose this model, if not noted in its folder."),
    legacy_ties: bool = typer.Option(False, "--legacy-ties", help="Add rows with the field's tie bug."),
    allow_missing: bool = typer.Option(False, "--allow-missing", help="Measure on the videos there are."),
    out: Path | None = typer.Option(None, "--out", "-o", help="Write results.json here."),
    workers: int = typer.Option(0, min=0, help="Processes that decode."),
    device: str = typer.Option("auto", help="auto, cpu, cuda or cuda:N."),
    as_json: bool = typer.Option(False, "--json", help="Print results.json instead of the table."),
) -> None:
    """Retrieve in both directions on a split, and say how sure the numbers are.

    Examples:

        gare evaluate runs/mini/best --data data/msrvtt --split test --out results.json

        gare evaluate runs/mini/best --data data/msrvtt --split val --json
    """
    from gare.data.loader import FrameSource
    from gare.evaluate import markdown_report
    from gare.evaluate.run import evaluate_model, read_selection
    from gare.model import GARE

    noted, seed = read_selection(Path(model))
    selection = selected_on or noted
    if selection is None:
        raise EvaluationError(
            "which split chose this model is not noted in its folder; say it with --selected-on "
            "(val, test, or none if nothing was chosen)"
        )
    chosen = choose_device(device)
    loaded = GARE.from_pretrained(model).to(chosen)
    source = FrameSource.open(data, frames, allow_missing=allow_missing)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("encoding", total=None)
        results = [
            evaluate_model(
                loaded,
                source,
                split,  # type: ignore[arg-type]
                selected_on=selection,
                seed=seed,
                protocol=protocol,  # type: ignore[arg-type]
                rescoring=kind,  # type: ignore[arg-type]
                num_workers=workers,
                allow_missing=allow_missing,
                on_progress=lambda done, total: bar.update(task, completed=done, total=total),
            )[0]
            for kind in dict.fromkeys(["none", rescore])
        ]
    result, *rescored = results
    if out is not None:
        result.save(out)
    if as_json:
        typer.echo(json.dumps(result.to_values()))
    else:
        typer.echo(markdown_report(result, rescored=rescored, legacy=legacy_ties))
