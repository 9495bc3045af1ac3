"""`gare evaluate`: what a model can do, with the uncertainty beside it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import typer
from rich.console import Console
from rich.progress import Progress

from gare.cli.options import choose_device
from gare.errors import EvaluationError

RESCORINGS: dict[str, Literal["none", "dsl", "qb_norm"]] = {"none": "none", "dsl": "dsl", "qbnorm": "qb_norm"}


def evaluate(
    model: str = typer.Argument(help="Folder of a saved model, or a hub id."),
    data: Path = typer.Option(..., help="What `gare data prepare` made."),
    split: str = typer.Option("test", help="train, val or test."),
    frames: int = typer.Option(12, min=1, help="Frames a video."),
    protocol: str = typer.Option("max_caption", help="max_caption, any_caption or one_caption."),
    rescore: str = typer.Option("none", help="none, or dsl or qbnorm as a second, labelled result."),
    querybank: str = typer.Option(
        "", help="Queries for qbnorm: MANIFEST, MANIFEST:SPLIT (default train) or a text file."
    ),
    drop_overlap: bool = typer.Option(
        False, "--drop-overlap", help="Leave out queries of the bank that are captions of this split."
    ),
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

        gare evaluate runs/mini/best --data data/msrvtt_frames --split test --out results.json

        gare evaluate runs/mini/best --data data/msrvtt_frames --split val --json

        gare evaluate runs/mini/best --data data/mine --rescore qbnorm --querybank data/mine:train
    """
    from gare.data.loader import FrameSource
    from gare.evaluate import markdown_report, read_querybank
    from gare.evaluate.protocols import VIDEO_TO_TEXT
    from gare.evaluate.run import evaluate_model
    from gare.model import GARE

    _check_choice(rescore, RESCORINGS, "--rescore")
    _check_choice(protocol, VIDEO_TO_TEXT, "--protocol")
    bank = read_querybank(querybank) if querybank else None
    selection, seed = _selection(Path(model), selected_on)
    loaded = GARE.from_pretrained(model).to(choose_device(device))
    source = FrameSource.open(data, frames, allow_missing=allow_missing)
    if bank is not None and drop_overlap:
        bank = bank.without(source.manifest.captions(split))  # type: ignore[arg-type]
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("encoding", total=None)
        result, _ = evaluate_model(
            loaded,
            source,
            split,  # type: ignore[arg-type]
            selected_on=selection,
            seed=seed,
            protocol=protocol,  # type: ignore[arg-type]
            rescoring=RESCORINGS[rescore],
            querybank=bank,
            num_workers=workers,
            allow_missing=allow_missing,
            on_progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if out is not None:
        result.save(out)
    if as_json:
        typer.echo(json.dumps(result.to_values()))
    else:
        typer.echo(markdown_report(result, legacy=legacy_ties))


def _selection(folder: Path, given: str) -> tuple[str, int | None]:
    """The split that chose the model, as given or as noted beside it, and the seed of its run."""
    from gare.evaluate.run import read_selection

    noted, seed = read_selection(folder)
    if not given and noted is None:
        raise EvaluationError(
            "which split chose this model is not noted in its folder; say it with --selected-on "
            "(val, test, or none if nothing was chosen)"
        )
    return given or str(noted), seed


def _check_choice(value: str, choices: Iterable[str], option: str) -> None:
    if value not in choices:
        raise typer.BadParameter(f"'{value}' is not one of {', '.join(choices)}", param_hint=option)
