"""`gare train`: a recipe becomes a model."""

from __future__ import annotations

from pathlib import Path

import typer

from gare.cli.options import choose_device


def train(
    recipe: Path = typer.Argument(help="TOML file with the settings of the run; see recipes/."),
    out: Path = typer.Option(..., "--out", "-o", help="Folder of the run: checkpoints, metrics, models."),
    settings: list[str] = typer.Option([], "--set", help="Change a setting: --set epochs=3."),
    resume: bool = typer.Option(False, "--resume", help="Go on from the last checkpoint in --out."),
    device: str = typer.Option("auto", help="auto, cpu, cuda or cuda:N."),
) -> None:
    """Train a model. The best on the selection split is in OUT/best, the final one in OUT/last.

    Examples:

        gare train recipes/msrvtt_frames_mini.toml --out runs/mini --set data.manifest=data/msrvtt

        gare train recipes/msrvtt_frames_mini.toml --out runs/mini --resume

        torchrun --nproc-per-node 4 -m gare train recipes/msrvtt9k_paper.toml --out runs/paper
    """
    from gare.train import RunConfig
    from gare.train import train as run

    config = RunConfig.load(recipe, settings)
    best = run(config, out, resume=resume, device=None if device == "auto" else choose_device(device))
    typer.echo(best)
