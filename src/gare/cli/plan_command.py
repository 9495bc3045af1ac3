"""`gare plan`: what a library of a given size takes, before anything is bought."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gare.bench.capacity_plan import Demand, Machines, Plan
    from gare.bench.measured_constants import Constant

_SIZES = (1e6, 1e8, 1e9)
_MOST = 1e15  # of anything; infinity and nonsense are above it
_WIDTH = 110
_SECONDS_A_VIDEO = 10.0


def plan(
    videos: Annotated[
        float | None, typer.Option(min=1, help="Videos; default: a million, a hundred million, a billion.")
    ] = None,
    hours: Annotated[
        float | None,
        typer.Option(min=0, help=f"Hours of video in all; default: {_SECONDS_A_VIDEO:g} seconds a video."),
    ] = None,
    queries: Annotated[float, typer.Option(min=0, help="Searches a second.")] = 100.0,
    cores: Annotated[int, typer.Option(min=1, help="CPU cores of a node.")] = 16,
    memory_gb: Annotated[float, typer.Option(min=1, help="Main memory of a node.")] = 64.0,
    gpu_memory_gb: Annotated[float, typer.Option(min=1, help="Memory of a GPU.")] = 80.0,
    days: Annotated[float, typer.Option(min=0.01, help="Days that indexing may take.")] = 7.0,
    dim: Annotated[int, typer.Option(min=1, help="Width of the embedding.")] = 512,
    constants: Annotated[
        Path | None, typer.Option(help="Constants of another machine: the constants.json of its cache.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Compute what a library takes: bytes, memory, nodes, hours to index it, milliseconds to search it.

    It is arithmetic on constants that gare bench measured on this machine, or on defaults that were measured
    elsewhere; the list below the table says which, and
    the command that measures each again.

    Examples:

        gare plan

        gare plan --videos 5e6 --hours 40000 --queries 20 --cores 32 --memory-gb 128

        gare bench index ~/Videos && gare plan --json
    """
    from gare.bench.capacity_plan import Machines, make_plan
    from gare.bench.measured_constants import as_plain, read_constants

    _check_numbers(
        {
            "--videos": videos,
            "--hours": hours,
            "--queries": queries,
            "--memory-gb": memory_gb,
            "--gpu-memory-gb": gpu_memory_gb,
            "--days": days,
        }
    )
    known = read_constants(constants)
    machines = Machines(cores, memory_gb, gpu_memory_gb, days, dim)
    plans = [make_plan(demand, machines, known) for demand in demands(videos, hours, queries)]
    if as_json:
        described = {
            "machines": dataclasses.asdict(machines),
            "plans": [dataclasses.asdict(plan) for plan in plans],
            "constants": as_plain(known),
        }
        typer.echo(json.dumps(described))
        return
    typer.echo(render(plans, machines, known), nl=False)


def _check_numbers(values: Mapping[str, float | None]) -> None:
    """Refuse what nobody has, infinity among it."""
    for option, value in values.items():
        if value is not None and not value <= _MOST:
            raise typer.BadParameter(
                f"{value:g} is no amount to plan for; give a number up to {_MOST:g}", param_hint=f"'{option}'"
            )


def demands(videos: float | None, hours: float | None, queries: float) -> list[Demand]:
    """What is planned for: the videos that were named, or three sizes."""
    from gare.bench.capacity_plan import Demand

    sizes = _SIZES if videos is None else (videos,)
    return [
        Demand(size, size * _SECONDS_A_VIDEO / 3600 if hours is None else hours, queries) for size in sizes
    ]


def render(plans: Sequence[Plan], machines: Machines, known: Mapping[str, Constant]) -> str:
    """The plans and their constants as text."""
    console = Console(file=io.StringIO(), width=_WIDTH, highlight=False, soft_wrap=True)
    console.print(_plan_table(plans, machines))
    for made in plans:
        for limit in made.limits:
            console.print(f"{_count(made.demand.videos)} videos: {limit}")
    console.print()
    for (command, where, day), group in itertools.groupby(
        known.items(), key=lambda pair: (pair[1].command, pair[1].where, pair[1].measured)
    ):
        console.print(f"{command}  ({where}; {day})")
        for name, constant in group:
            console.print(f"  {name:<19}{_count(constant.value):>14}  {constant.unit}")
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def _plan_table(plans: Sequence[Plan], machines: Machines) -> Table:
    days, a_node = machines.days, f"{machines.cores} cores and {machines.memory_gb:g} GB"
    queries = plans[0].demand.queries
    title = f"{queries:g} searches a second; a node has {a_node}, a GPU {machines.gpu_memory_gb:g} GB"
    rows: dict[str, Callable[[Plan], str]] = {
        "hours of video": lambda plan: _count(plan.demand.hours),
        "items, frames": lambda plan: f"{_count(plan.items)}, {_count(plan.frames)}",
        "library on storage": lambda plan: _size(plan.storage_bytes),
        "index on CPUs: node hours": lambda plan: _count(plan.index_cpu_hours),
        f"  nodes for {days:g} days": lambda plan: _count(plan.index_cpu_nodes),
        "index with GPUs: node hours": lambda plan: _count(plan.index_gpu_hours),
        f"  nodes for {days:g} days ": lambda plan: _count(plan.index_gpu_nodes),
        "search, two stages: ms": lambda plan: _count(plan.search_ms),
        "  memory of a replica": lambda plan: _size(plan.search_memory_bytes),
        "  replicas": lambda plan: _count(plan.replicas),
        "search, exact: cards": lambda plan: _size(plan.card_bytes),
        "  CPU: shards, ms": lambda plan: f"{_count(plan.exact_cpu_shards)}, {_count(plan.exact_cpu_ms)}",
        "  GPU: shards, ms": lambda plan: f"{_count(plan.exact_gpu_shards)}, {_count(plan.exact_gpu_ms)}",
    }
    table = Table("videos", *(_count(plan.demand.videos) for plan in plans), title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for label, shown in rows.items():
        table.add_row(label, *map(shown, plans))
    return table


def _count(value: float) -> str:
    """Three digits that matter.

    >>> _count(1.5), _count(123456), _count(2e6), _count(3e9)
    ('1.5', '123 thousand', '2 million', '3 billion')
    """
    for size, word in ((1e12, " trillion"), (1e9, " billion"), (1e6, " million"), (1e4, " thousand")):
        if value >= 0.9995 * size:
            scale = 1e3 if size == 1e4 else size
            return f"{value / scale:.3g}{word}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _size(num_bytes: float) -> str:
    """Bytes as a person reads them.

    >>> _size(1.5e9), _size(2e15)
    ('1.5 GB', '2 PB')
    """
    for size, word in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {word}"
    return f"{num_bytes:,.0f} bytes"
