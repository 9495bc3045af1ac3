"""`gare bench exact`: exact search with its proof; on a CPU rung by rung, on a GPU the table it holds."""

from __future__ import annotations

import dataclasses
import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Column, Table

from gare.bench.measured_constants import remember_constants
from gare.cli.options import choose_device

if TYPE_CHECKING:
    from gare.bench.exact_bench import ExactBenchmark
    from gare.bench.resident_bench import ResidentBenchmark

KEY_DTYPES = ("int8", "int16", "float32", "float64", "bfloat16", "float16")


def exact(
    items: int = typer.Option(20_000, min=100, help="Items."),
    queries: int = typer.Option(64, min=1, help="Texts searched for."),
    batch: int = typer.Option(16, min=1, help="Texts answered together."),
    check: int = typer.Option(16, min=0, help="Lists compared with all items scored in float64."),
    top: int = typer.Option(10, min=1, help="Items in a list."),
    dim: int = typer.Option(512, min=8, help="Width of the embedding."),
    frames: int = typer.Option(12, min=1, help="Frames per item."),
    scale: float = typer.Option(1.0, min=0, help="How many times larger all weights of the interaction are."),
    pooling: str = typer.Option("text_conditioned", help="mean or text_conditioned."),
    side: str = typer.Option("text", help="Which vector the increment is added to: text or video."),
    keys: str = typer.Option("int16", help=f"How keys are kept: {', '.join(KEY_DTYPES)}."),
    library: int = typer.Option(
        0, min=0, help="Ask a real library this many times with --exact and --exhaustive too."
    ),
    folder: Path | None = typer.Option(None, help="Keep that library here and use it again."),
    device: str = typer.Option("auto", help="auto, cpu, cuda or cuda:N; the real library is asked on a CPU."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of the table."),
) -> None:
    """Time exact search with its proof, rung by rung, beside the bare reading of the same bytes.

    On a GPU it is the table of cards that such a search keeps there, for one batch of texts. gare plan uses
    what was timed with a million items or more there.

    Examples:

        gare bench exact

        gare bench exact --items 100000 --scale 10 --library 10

        gare bench exact --items 1000000 --top 100 --device cuda --json
    """
    for value, choices, name in (
        (pooling, ("mean", "text_conditioned"), "--pooling"),
        (side, ("text", "video"), "--side"),
        (keys, KEY_DTYPES, "--keys"),
    ):
        if value not in choices:
            raise typer.BadParameter(f"'{value}' is not one of {', '.join(choices)}", param_hint=name)
    import torch

    from gare.bench.exact_bench import ExactCase, benchmark_exact, compare_library

    say = Console(stderr=True, highlight=False).print
    chosen = choose_device(device)
    if chosen.type == "cuda" and keys in ("int8", "int16") and not library and find_spec("triton"):
        from gare.bench.resident_bench import ResidentCase, benchmark_resident

        held = ResidentCase(
            items, min(batch, queries), top, dim, frames, scale, pooling, side, wide_keys=keys == "int16"
        )
        on_gpu = benchmark_resident(held, check=check, device=chosen, say=say)
        remember_constants(on_gpu.constants, where=on_gpu.device, dim=dim)
        if as_json:
            typer.echo(json.dumps(dataclasses.asdict(on_gpu)))
        else:
            print_resident(on_gpu)
        return
    case = ExactCase(items, dim, frames, top, scale, pooling, side)
    result = benchmark_exact(
        case,
        queries=queries,
        batch=min(batch, queries),
        check=check,
        key_dtype=getattr(torch, keys),
        device=chosen,
        say=say,
    )
    if library:
        compared = compare_library(case, queries=library, folder=folder, say=say)
        result = dataclasses.replace(result, library=compared)
    remember_constants(result.constants, where=result.device, dim=result.case.dim)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(result)))
    else:
        _print_exact(result)


def print_resident(result: ResidentBenchmark) -> None:
    case, times, check = result.case, result.times, result.check
    _print_ms(
        {
            "texts to proven lists": times.search_ms,
            "of it the first rung: two products a pair": times.first_ms,
            "floor of the first rung: its bytes read once": times.first_read_ms,
            "all pairs by keys, which a search does not do": times.bounds_ms,
            "its floor: all bytes of the cards read once": times.read_ms,
            "its floor: the matrix product, F + 2 vectors": result.product_ms,
        },
        title=f"{case.num_items:,} items held by a GPU, {case.frames} × {case.dim}, {case.num_texts} texts "
        f"at once, weights × {case.scale:g}",
        caption=f"{result.device}, torch {result.torch}; cards of {result.cards_gb:.1f} GB, made with their "
        f"items in {result.fill_s:.0f} s",
    )
    typer.echo(f"scored {times.scored:.1f} of {case.num_items:,} items in float64 for a top {case.top}")
    _print_check(check.num_equal, check.num_checked, check.bounds_broken)


def _print_exact(result: ExactBenchmark) -> None:
    case = result.case
    _print_ms(
        {
            "first rung: two products a pair": result.first_pass_ms,
            "second rung: keys": result.keys_ms,
            "exact scores in float64": result.rescoring_ms,
            "certificate": result.certificate_ms,
            "floor: reading the same bytes": result.read_ms,
            "floor: the matrix product, F + 2 vectors": result.product_ms,
        },
        title=f"{case.num_items:,} items, {case.frames} × {case.dim}, {result.batch} texts at once, "
        f"weights × {case.scale:g}",
        caption=f"{result.device}, torch {result.torch}; {result.bytes_an_item / 1000:.1f} KB an item, "
        f"made in {result.prepare_s:.0f} s",
    )
    typer.echo(
        f"scored {result.scored:.1f} of {case.num_items:,} items for a top {case.top} (most "
        f"{result.scored_most:,}; the first rung alone leaves {result.left_by_ball:.0f})"
    )
    _print_check(result.num_equal, result.num_compared, result.bounds_broken)
    if found := result.library:
        typer.echo(
            f"a real library: --exact {found.exact_ms:.0f} ms, --exhaustive {found.exhaustive_ms:.0f} ms "
            f"({found.ratio:.1f}×); {found.num_same} of {found.num_queries} lists the same; "
            f"{found.scored:.0f} items scored; the first search took {found.first_exact_s:.0f} s"
        )


def _print_ms(rows: dict[str, float], *, title: str, caption: str) -> None:
    table = Table("", Column("ms", justify="right"), title=title, caption=caption)
    for label, milliseconds in rows.items():
        table.add_row(label, f"{milliseconds:.2f}")
    Console().print(table)


def _print_check(num_equal: int, num_checked: int, bounds_broken: int) -> None:
    if num_checked:
        typer.echo(
            f"{num_equal:,} of {num_checked:,} lists are those of float64 over all items; "
            f"{bounds_broken} scores outside their bounds"
        )
