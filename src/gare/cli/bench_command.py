"""`gare bench`: speed, with the reference beside it."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from gare.bench.measured_constants import remember_constants
from gare.cli.bench_exact_command import exact
from gare.cli.bench_moments_command import moments
from gare.cli.options import choose_device
from gare.extras import require

if TYPE_CHECKING:
    from gare.bench.replica_bench import ReplicaBenchmark
    from gare.bench.scoring_bench import ScoringBenchmark

app = typer.Typer(help="Speed, always beside a reference measured in the same run.", no_args_is_help=True)
app.command()(exact)
app.command()(moments)

DTYPES = ("float32", "float64", "bfloat16", "float16")  # as torch calls them


@app.callback()
def bench() -> None:
    """Speed, always beside a reference measured in the same run."""


@app.command()
def scoring(
    texts: int = typer.Option(64, min=1, help="Number of texts."),
    videos: int = typer.Option(1000, min=1, help="Number of videos."),
    frames: int = typer.Option(12, min=1, help="Frames per video."),
    dim: int = typer.Option(512, min=1, help="Width of the embedding."),
    dtype: str = typer.Option("float32", help=f"One of {', '.join(DTYPES)}."),
    device: str = typer.Option("auto", help="auto, cpu, cuda or cuda:N."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of the table."),
) -> None:
    """Score random features densely and factored, and compare speed and numbers.

    Examples:

        gare bench scoring

        gare bench scoring --texts 1000 --videos 1000 --device cuda --json
    """
    if dtype not in DTYPES:
        raise typer.BadParameter(f"'{dtype}' is not one of {', '.join(DTYPES)}", param_hint="--dtype")
    import torch

    from gare.bench.scoring_bench import benchmark_scoring

    chosen = choose_device(device)
    with Console(stderr=True).status(f"scoring {texts} texts × {videos} videos on {chosen} …"):
        result = benchmark_scoring(
            texts=texts, videos=videos, frames=frames, dim=dim, dtype=getattr(torch, dtype), device=chosen
        )
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(result)))
    else:
        Console().print(scoring_table(result))


@app.command()
def train(
    batch_size: int = typer.Option(128, min=2, help="Pairs per step."),
    frames: int = typer.Option(12, min=1, help="Frames per video."),
    encoder: str = typer.Option(
        "clip", "--encoder", "--backbone", help="clip (ViT-B/32, random weights) or tiny."
    ),
    compiled: bool = typer.Option(True, "--compile/--no-compile", help="torch.compile the towers."),
    chunk_size: int | None = typer.Option(None, min=1, help="Encode this many pairs at a time (GradCache)."),
    cuda_graph: bool = typer.Option(True, help="Replay full GARE's step as a CUDA graph, on a GPU."),
    device: str = typer.Option("auto", help="auto, cpu, cuda or cuda:N."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of the table."),
) -> None:
    """Time a training step with the full objective, beside a bare dual encoder in the same run.

    Examples:

        gare bench train

        gare bench train --encoder tiny --batch-size 8 --frames 2 --no-compile --json
    """
    from gare.bench.train_bench import benchmark_train
    from gare.model import GareConfig

    config = GareConfig.load({"encoder": {"name": encoder}, "interaction": {"pooling": "text_conditioned"}})
    chosen = choose_device(device)
    with Console(stderr=True).status(f"training on {chosen} …"):
        result = benchmark_train(
            batch_size=batch_size,
            frames=frames,
            model=config,
            device=chosen,
            compiled=compiled,
            chunk_size=chunk_size,
            cuda_graph=cuda_graph,
        )
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(result)))
        return
    table = Table(
        title=f"{batch_size} pairs × {frames} frames, {encoder}",
        caption=f"{result.device}, torch {result.torch}",
    )
    for column in ("", "ms a step", "GB", "TFLOP"):
        table.add_column(column, justify="right" if column else "left")
    for name, numbers in (
        ("bare dual encoder", (result.bare_ms, result.bare_memory_gb, result.bare_tflop_per_step)),
        ("full GARE", (result.step_ms, result.peak_memory_gb, result.tflop_per_step)),
    ):
        table.add_row(name, *(f"{number:.1f}" for number in numbers))
    Console().print(table)
    used = result.model_flop_utilisation
    share = "" if used is None else f", {100 * used:.0f} % of the device's peak"
    typer.echo(f"{result.pairs_per_second:.0f} pairs a second{share}")


def scoring_table(result: ScoringBenchmark) -> Table:
    """The result of `gare bench scoring` as a table."""
    size = f"{result.texts} texts × {result.videos} videos × {result.frames} frames"
    table = Table(
        title=f"{size}, D = {result.dim}, {result.dtype}",
        caption=(
            f"{result.device}, torch {result.torch}. "
            f"Largest difference of a score: {result.max_abs_difference:.1e}. "
            "The floor is the one matrix product that factored scoring cannot avoid."
        ),
    )
    for column in ("", "ms", "GFLOP", "GFLOP/s", "speed-up"):
        table.add_column(column, justify="right" if column else "left")
    rows = [
        ("dense, 128 × 128 blocks", result.dense_ms, result.dense_gflop),
        ("factored, cards ready", result.factored_ms, result.factored_gflop),
        ("floor: the matrix product", result.floor_ms, result.floor_gflop),
    ]
    for name, ms, gflop in rows:
        speedup = f"{result.dense_ms / ms:.1f}×"
        table.add_row(name, f"{ms:.2f}", f"{gflop:.2f}", f"{1000 * gflop / ms:.0f}", speedup)
    table.add_row("score cards, once a video", f"{result.cards_ms:.2f}", "", "", "")
    return table


@app.command()
def search(
    items: int = typer.Option(100_000, min=100, help="Items in the library."),
    dim: int = typer.Option(512, min=8, help="Width of the embedding."),
    frames: int = typer.Option(12, min=1, help="Frames per item."),
    candidates: int = typer.Option(256, min=10, help="Items scored exactly."),
    queries: int = typer.Option(100, min=10, help="Searches timed."),
    hours: int = typer.Option(0, min=0, help="Search once more with so many hours of film beside the items."),
    folder: Path | None = typer.Option(None, help="Keep the library here and use it again."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of the table."),
) -> None:
    """Time searches in a synthetic library, stage by stage, beside a dual encoder and dense re-scoring.

    Examples:

        gare bench search

        gare bench search --hours 100

        gare bench search --items 2000 --queries 20 --json
    """
    from gare.bench.search_bench import benchmark_search

    console = Console(stderr=True, highlight=False)
    result = benchmark_search(
        num_items=items,
        dim=dim,
        frames=frames,
        candidates=candidates,
        queries=queries,
        hours=hours,
        folder=folder,
        say=console.print,
    )
    remember_constants(result.constants, where=_cpu(), dim=dim)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(result)))
        return
    table = Table(
        title=f"{result.num_items:,} items, {frames} × {dim}, {candidates} candidates",
        caption=f"{result.threads} threads; recall of stage 1 {result.recall:.3f}; open and first result "
        f"{result.open_and_first_ms:.0f} ms; peak memory {result.peak_memory_gb:.2f} GB",
    )
    for column in ("", "p50 ms", "p95 ms"):
        table.add_column(column, justify="right" if column else "left")
    names = {
        "search": "search, words to hits",
        "encode": "  encode the text",
        "stage1": "  stage 1",
        "fetch": "  fetch frames",
        "unpack": "  unpack them",
        "score": "  score exactly (factored)",
        "hits": "  fetch the hits",
        "plain_search": "dual encoder, words to hits",
        "dense_score": "dense scores of the candidates",
    }
    for name, label in names.items():
        spread = getattr(result, name)
        table.add_row(label, f"{spread.p50:.1f}", f"{spread.p95:.1f}")
    if result.with_films is not None:
        label = f"with {hours:,} hours of film: {result.num_with_films:,} items"
        table.add_row(label, f"{result.with_films.p50:.1f}", f"{result.with_films.p95:.1f}")
    Console().print(table)
    if result.with_films is not None and result.without_films is not None:
        ratio = result.with_films.p50 / result.without_films.p50
        typer.echo(f"with the films a search takes {ratio:.2f} times as long")
    typer.echo(f"factored is {result.dense_over_factored:.1f}× faster than dense")


@app.command()
def index(
    folder: Path = typer.Argument(help="A folder of videos.", exists=True),
    model: str | None = typer.Option(
        None, help="Folder, hub id or name; default: the mini encoder, untrained."
    ),
    workers: int = typer.Option(0, min=0, help="Processes that decode; 0 is one per core."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of text."),
) -> None:
    """Time indexing a folder, beside decoding and encoding the same files alone.

    Examples:

        gare bench index ~/Videos
    """
    from gare.bench.index_bench import benchmark_index
    from gare.model import GARE, GareConfig

    loaded = (
        GARE.from_pretrained(model) if model else GARE(GareConfig.load({"encoder": {"name": "mini"}})).eval()
    )
    result = benchmark_index(folder, model=loaded, num_workers=workers)
    remember_constants(result.constants, where=_cpu())
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(result)))
        return
    typer.echo(
        f"{result.num_files} files, {result.num_items} items: decode {result.decode_s:.1f} s, encode "
        f"{result.encode_s:.1f} s, index {result.index_s:.1f} s ({result.over_parts:.2f} of both), "
        f"{result.files_per_second:.1f} files/s; again, unchanged: {1000 * result.unchanged_s:.0f} ms"
    )


@app.command()
def encode(
    model: str = typer.Option(
        "gare-mini",
        "--model",
        "--backbone",
        help="gare-mini, a folder, a hub id or a name; clip is ViT-B/32 with random weights.",
    ),
    frames: int = typer.Option(12, min=1, help="Frames per video."),
    videos: int = typer.Option(1, min=1, help="Time also this many videos at once."),
    device: str = typer.Option("auto", help="auto, cpu, cuda or cuda:N."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of text."),
) -> None:
    """Time a model's towers, beside transformers' own where it runs them. `gare models` shows the last times.

    Examples:

        gare bench encode

        gare bench encode --model clip

        gare bench encode --backbone clip --videos 128 --device cuda

        gare bench encode --model runs/mine/best --device cuda --json
    """
    from gare.bench.encode_bench import benchmark_encode
    from gare.model.model_inventory import Speed, remember_speed

    result = benchmark_encode(model, frames=frames, device=choose_device(device), batch=videos)
    today = datetime.now(UTC).date().isoformat()
    rate = frames * result.videos_per_second
    remember_speed(model, Speed(result.device, result.texts_per_second, rate, today))
    if not result.device.startswith("CPU"):
        remember_constants({"gpu_frames": rate}, where=result.device)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(result)))
        return
    typer.echo(
        f"{result.model} on {result.device}: loaded in {result.load_s:.2f} s; a text {result.text_ms:.1f} ms "
        f"({result.texts_per_second:.0f}/s in batches); a video of {frames} frames {result.video_ms:.1f} ms"
        + (f", {videos} at once {result.batch_ms:.1f} ms" if videos > 1 else "")
        + f" ({result.videos_per_second:.1f}/s); peak memory {result.peak_memory_gb:.2f} GB"
    )
    if result.ratio is not None:
        typer.echo(
            f"frames a second: {result.frames_per_second:.1f}; get_image_features of transformers "
            f"{result.transformers_frames_per_second:.1f}; ratio {result.ratio:.2f}; cosine of their vectors "
            f"at least {result.least_cosine:.7f}"
        )


@app.command()
def serve(
    items: int = typer.Option(100_000, min=100, help="Items in the library."),
    dim: int = typer.Option(512, min=8, help="Width of the embedding."),
    frames: int = typer.Option(12, min=1, help="Frames per item."),
    clients: int = typer.Option(50, min=2, help="Most clients at once."),
    seconds: float = typer.Option(
        60.0, min=0.5, help="Seconds of load with the most clients; a sixth of it with fewer."
    ),
    batch: int = typer.Option(16, min=2, help="Searches answered together."),
    replicas: int = typer.Option(
        0, min=0, help="Instead: one server beside so many, and one of them killed."
    ),
    address: str | None = typer.Option(None, help="With --replicas: where that library is, such as s3://…"),
    folder: Path | None = typer.Option(None, help="Keep the library here and use it again."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of the table."),
) -> None:
    """Ask a real server, with more and more clients; then without batching.

    Examples:

        gare bench serve

        gare bench serve --items 2000 --clients 8 --seconds 6 --json

        gare bench serve --replicas 3 --address s3://bucket/bench
    """
    if bool(replicas) != (address is not None):
        raise typer.BadParameter("--replicas and --address go together", param_hint="--replicas")
    require("serve", "gare bench serve")
    from gare.bench.replica_bench import benchmark_replicas
    from gare.bench.serve_bench import benchmark_serve

    if address is not None:
        compared = benchmark_replicas(
            address,
            num_items=items,
            dim=dim,
            frames=frames,
            num_replicas=replicas,
            clients=clients,
            seconds=seconds,
            batch=batch,
            say=Console(stderr=True, highlight=False).print,
        )
        _print_replicas(compared, as_json)
        return
    result = benchmark_serve(
        num_items=items,
        dim=dim,
        frames=frames,
        clients=clients,
        seconds=seconds,
        batch=batch,
        folder=folder,
        say=Console(stderr=True, highlight=False).print,
    )
    remember_constants(result.constants, where=_cpu(), dim=dim)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(result)))
        return
    table = Table(
        title=f"{items:,} items, {frames} × {dim}",
        caption=f"batching: {result.batching_gain:.2f}×; saturated by {result.saturation:.1f} clients, p95 "
        f"up to there {result.p95_over_single:.1f}× that of one; server: {result.peak_memory_gb:.2f} GB",
    )
    for column in ("clients", "searches/s", "p50 ms", "p95 ms", "429, 503", "errors"):
        table.add_column(column, justify="right")
    for label, step in [*(("", step) for step in result.steps), (", no batches", result.unbatched)]:
        table.add_row(
            f"{step.clients}{label}",
            f"{step.searches_per_second:.1f}",
            f"{step.p50_ms:.0f}",
            f"{step.p95_ms:.0f}",
            str(step.num_busy),
            str(step.num_errors),
        )
    Console().print(table)


def _print_replicas(result: ReplicaBenchmark, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(result)))
        return
    table = Table(
        title=f"{result.num_items:,} items",
        caption=f"{result.killed.num_retried} times a search was asked again of the next server; "
        f"the largest server held {result.server_memory_gb:.2f} GB",
    )
    for column in ("", "clients", "searches/s", "p50 ms", "p95 ms", "longest ms", "429, 503", "errors"):
        table.add_column(column, justify="right" if column else "left")
    several = f"{result.num_replicas} servers"
    rows = (
        ("Library.search", result.in_process),
        ("one server", result.one_client),
        ("one server", result.single),
        (several, result.replicas),
        (f"{several}, one is killed", result.killed),
    )
    for name, step in rows:
        numbers = (step.searches_per_second, step.p50_ms, step.p95_ms, step.longest_ms)
        shown = [f"{numbers[0]:.1f}", *(f"{number:.0f}" for number in numbers[1:])]
        table.add_row(name, str(step.clients), *shown, str(step.num_busy), str(step.num_errors))
    Console().print(table)


def _cpu() -> str:
    import torch

    from gare.bench.bench_timing import describe_device

    return describe_device(torch.device("cpu"))
