"""`gare train`: a recipe becomes a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gare.cli.options import choose_device
from gare.cli.recipes import RECIPES, find_recipe, recipe_names

if TYPE_CHECKING:
    from gare.train import Observer, RunConfig


def train(
    recipe: str = typer.Argument(
        help=f"TOML file with the settings of the run, or one of {', '.join(recipe_names(RECIPES))}."
    ),
    out: Path = typer.Option(..., "--out", "-o", help="Folder of the run: checkpoints, metrics, models."),
    model: str | None = typer.Option(
        None, "--model", help="Go on from this model: gare-mini, a folder, a hub id (the setting start_from)."
    ),
    settings: list[str] = typer.Option([], "--set", help="Change a setting: --set epochs=3."),
    resume: bool = typer.Option(False, "--resume", help="Go on from the last checkpoint in --out."),
    probe: bool = typer.Option(False, "--probe", help="Record in OUT/probe.jsonl what gare analyze shows."),
    probe_every: int = typer.Option(0, min=0, help="Steps between records of --probe; 0: about 100 in all."),
    log_to: list[str] = typer.Option(
        [], "--log-to", help="Send metrics to wandb or trackio too (extras of these names)."
    ),
    device: str = typer.Option("auto", help="auto, cpu, cuda or cuda:N."),
    ray: str | None = typer.Option(
        None,
        "--ray",
        metavar="ADDRESS",
        help="Train on a Ray cluster: HOST:PORT, ray://HOST:PORT, auto, or local. See docs/training.md.",
    ),
    workers: int = typer.Option(
        0, min=0, help="Processes with --ray; 0: one for each GPU, or each machine if there are none."
    ),
) -> None:
    """Train a model. The best on the selection split is in OUT/best, the final one in OUT/last.

    Examples:

        gare train msrvtt_frames_mini --out runs/mini --set data.manifest=data/msrvtt_frames

        gare train my_recipe.toml --out runs/mine --resume

        gare train own_csv --out runs/mine --model openai/clip-vit-base-patch32

        gare train msrvtt_frames_mini --out runs/mini --probe

        WANDB_MODE=offline gare train my_recipe.toml --out runs/mine --log-to wandb

        torchrun --nproc-per-node 4 -m gare train msrvtt9k_paper --out runs/paper

        gare train my_recipe.toml --out /shared/run --ray head:6379 --workers 8
    """
    from gare.train import RunConfig
    from gare.train import train as run
    from gare.train.log_sinks import SINKS

    unknown = sorted(set(log_to) - SINKS.keys())
    if unknown:
        raise typer.BadParameter(f"'{unknown[0]}' is not one of {', '.join(SINKS)}", param_hint="--log-to")
    if workers and ray is None:
        raise typer.BadParameter("is for --ray; with torchrun give --nproc-per-node", param_hint="--workers")
    observers: list[Observer] = []
    if probe:
        from gare.analysis.training_probe import TrainingProbe

        observers.append(TrainingProbe(probe_every))

    # As TOML reads it: a name may have any character.
    chosen = [f"start_from={json.dumps(model)}"] if model else []
    config = RunConfig.load(find_recipe(recipe, RECIPES), [*settings, *chosen])
    if ray is not None:
        _train_by_ray(ray, config, out, workers, resume, device, observers, log_to)
        return
    best = run(
        config,
        out,
        resume=resume,
        device=None if device == "auto" else choose_device(device),
        observers=observers,
        log_to=log_to,
    )
    typer.echo(best)


def _train_by_ray(
    address: str,
    config: RunConfig,
    out: Path,
    workers: int,
    resume: bool,
    device: str,
    observers: Sequence[Observer],
    log_to: Sequence[str],
) -> None:
    from gare.cluster.ray_link import connected
    from gare.cluster.train_cluster import train_on_cluster
    from gare.train.training_run import BEST

    def say(machines: Sequence[str]) -> None:
        typer.echo(f"training on {', '.join(machines)}; metrics: {out / 'metrics.jsonl'}", err=True)

    with connected(address, user="gare train --ray"):
        train_on_cluster(
            config,
            out,
            num_workers=workers or None,
            resume=resume,
            device=device,
            observers=observers,
            log_to=log_to,
            on_start=say,
        )
    typer.echo(out / BEST)
