"""`gare card`: what a model scored, on its card."""

from __future__ import annotations

from pathlib import Path

import typer

from gare.errors import CheckpointError


def card(
    model: Path = typer.Argument(help="Folder of a saved model.", show_default=False),
    results: list[Path] = typer.Argument(
        help="results.json files of `gare evaluate --out`.", show_default=False
    ),
) -> None:
    """Write results into a model's card, README.md in its folder, as a model-index that the hub reads.

    Results of other weights are refused. What else the card says stays. Results are kept when the model is
    loaded, saved elsewhere or pushed to the hub, until its weights change.

    Examples:

        gare card runs/mini/best results.json

        gare card runs/mini/best test.json val.json
    """
    from gare.evaluate.card_results import write_results_to_card

    if not model.is_dir():
        raise CheckpointError(f"{model} is not a folder; give the folder of a saved model")
    typer.echo(write_results_to_card(model, results))
