"""`gare index --ray`, `--status` and `--stop`: the options of `gare index` that are about many machines."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from gare.cluster.ray_link import LOCAL, connected
from gare.errors import ClusterError

if TYPE_CHECKING:
    from gare.cluster.run_status import RunStatus
    from gare.library.index.index_report import IndexReport
    from gare.library.index.index_run import IndexOptions
    from gare.library.library import Library

_LINE_EVERY_S = 10.0
_stderr = Console(stderr=True, highlight=False, soft_wrap=True)


def index_by_ray(
    library: Library,
    dirs: list[str],
    options: IndexOptions,
    *,
    address: str,
    device: str,
    detach: bool,
) -> IndexReport | None:
    """Index on a cluster; the report, or None where the run was left to the cluster."""
    from gare.cluster.index_cluster import index_on_cluster
    from gare.interrupts import note_interrupt
    from gare.library.index.object_files import normal_source

    if detach and address == LOCAL:
        raise ClusterError("a Ray of our own ends with this command; --on-interrupt detach needs a cluster")
    sources = [normal_source(folder) for folder in dirs]
    with connected(address, user="gare index --ray"), note_interrupt() as interrupted:
        report = index_on_cluster(
            library,
            sources,
            options=options,
            on_status=_StatusLines(_stderr),
            is_interrupted=interrupted.is_set,
            detach=detach,
            device=device,
        )
    if report.interrupted and interrupted.is_set() and detach:
        place = library.home.uri
        _stderr.print(
            f"the cluster goes on. See how far it is: gare index --status --library {place}; stop it: gare "
            f"index --stop --library {place}",
            markup=False,
        )
        return None
    return report


def show_status(place: str, as_json: bool) -> None:
    """Print where the run of a library stands."""
    status = _read_status(place)
    if as_json:
        typer.echo(json.dumps(None if status is None else status.to_json(), ensure_ascii=False))
        return
    if status is None:
        typer.echo("no run on a cluster so far")
        return
    typer.echo(f"{status.run.state}: {status.line()}")
    if status.run.message:
        typer.echo(f"  {status.run.message}")
    if status.run.state == "planning":
        typer.echo("  if the command that plans it has ended, give it again")
    for shard in status.shards:
        if shard.state == "leased":
            typer.echo(
                f"  shard {shard.number} on {shard.node}: {shard.done:,} of {shard.num_files:,} files, "
                f"attempt {shard.attempt}, {shard.still_s:.0f} s since the last one"
            )
        elif shard.error:
            typer.echo(f"  shard {shard.number} ({shard.state}): {shard.error}")
    for node, trouble in sorted(status.troubles.items()):
        typer.echo(f"  {node}: {trouble}")


def stop_run(place: str) -> None:
    """Stop the run of a library: workers commit what they have, and end."""
    from gare.cluster.shard_ledger import ShardLedger
    from gare.library.store import open_store

    store = open_store(place)
    ledger = ShardLedger(store.records())
    run = ledger.run()
    if run is None or run.state == "finished":
        words = "no run is under way"
    elif run.state == "planning":
        words = "it was still planned; the command that plans it ends"
    else:
        words = "its workers commit what they have, then they end; the same 'gare index' goes on with it"
    ledger.set_state("stopping")
    typer.echo(words)
    store.close()


def _read_status(place: str) -> RunStatus | None:
    from gare.cluster.run_status import RunStatus
    from gare.cluster.shard_ledger import ShardLedger
    from gare.library.store import open_store

    store = open_store(place, read_only=True)
    try:
        return RunStatus.read(ShardLedger(store.records()))
    finally:
        store.close()


class _StatusLines:
    """One line that is written anew on a terminal, and a line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = time.monotonic()

    def __call__(self, status: RunStatus) -> None:
        if self._console.is_terminal:
            self._console.print(f"\x1b[2K{status.line()}", end="\r", markup=False)
        elif time.monotonic() - self._last >= _LINE_EVERY_S:
            self._last = time.monotonic()
            self._console.print(status.line(), markup=False)
