"""`gare check`: is a library as it was written, and with `--repair`, make it so."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from gare.cli.options import choose_device

if TYPE_CHECKING:
    from gare.library.check import CheckReport
    from gare.library.check.repair_run import LoadModel
    from gare.library.store import ModelStamp
    from gare.model import GARE

DAMAGED = 3
"""The exit code for damage that is there, or is left after a repair."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "": 1}
_stderr = Console(stderr=True)


def check(
    libraries: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[LIBRARY]...",
            help="Folders, s3://… or postgresql://…; default: $GARE_LIBRARY, or .gare here or above.",
        ),
    ] = None,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Mend what is damaged; reads all data, unless --read-data is given."),
    ] = False,
    read_data: Annotated[
        str | None,
        typer.Option(
            help="Read data too and compare it with its checksums: all, a share such as 2.5% (the next check "
            "goes on where it ended), or n/t, the n-th of t parts.",
        ),
    ] = None,
    max_duration: Annotated[
        str | None, typer.Option(help="Stop reading data after so long, such as 90s, 10m, 2h.")
    ] = None,
    recompute: Annotated[
        bool,
        typer.Option(
            "--recompute", help="Also compare stage-1 vectors with what the model makes of the data read."
        ),
    ] = False,
    files: Annotated[
        bool, typer.Option("--files/--no-files", help="Compare the ledger with the files on the disk.")
    ] = True,
    model: Annotated[str | None, typer.Option(help="Where the library's model is now, if it moved.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object a library.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
) -> None:
    """Check that libraries are as they were written. Exit code 0: sound; 3: damaged.

    Without `--read-data` everything but the bulk data is checked: tables, rows, ledger, index, files on the
    disk. A check writes nothing into a library. Ctrl-C ends it; the next one goes on.

    Examples:

        gare check

        gare check --read-data 2.5% ~/Videos/.gare

        gare check --read-data all --max-duration 10m s3://my-bucket/videos

        gare check --repair ~/Videos/.gare
    """
    from gare.library.check.read_share import ReadShare
    from gare.library.library import find_library
    from gare.library.library_model import model_loader
    from gare.library.vector_set_checks import check_sets, repair_sets

    try:
        if read_data is not None:
            ReadShare.parse(read_data)
        seconds = None if max_duration is None else parse_duration(max_duration)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if seconds is not None and (read_data is None or repair):
        raise typer.BadParameter("--max-duration goes with --read-data, and not with --repair")
    is_sound = True
    for library in libraries or [find_library()]:
        load = model_loader(library, model, choose_device(device))
        with _progress() as bar:
            task = bar.add_task("", total=None)

            def show(what: str, done: int, total: int, bar: Progress = bar, task: TaskID = task) -> None:
                bar.update(task, description=what, completed=done, total=total)

            if repair:
                report = repair_sets(library, load, read_data=read_data or "all", on_progress=show)
            else:
                report = check_sets(
                    library,
                    read_data=read_data,
                    max_duration=seconds,
                    with_files=files,
                    load_model=_only_model(load) if recompute else None,
                    on_progress=show,
                )
        if as_json:
            typer.echo(json.dumps(report.to_json(), ensure_ascii=False))
        else:
            _print(report, has_read=read_data is not None)
        is_sound = is_sound and report.is_sound
    if not is_sound:
        raise typer.Exit(DAMAGED)


def _only_model(load: LoadModel) -> Callable[[ModelStamp], GARE]:
    return lambda stamp: load(stamp)[0]


def parse_duration(text: str) -> float:
    """Seconds of `90s`, `10m` or `2h`.

    >>> parse_duration("10m"), parse_duration("1.5h"), parse_duration("20")
    (600.0, 5400.0, 20.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if match is None:
        raise ValueError(f"'{text}' is no duration; write 90s, 10m or 2h")
    return float(match[1]) * _UNITS[match[2]]


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=_stderr, transient=True, disable=not _stderr.is_terminal)


def _print(report: CheckReport, *, has_read: bool) -> None:
    from gare.library.check.check_report import summarise
    from gare.library.index.scan import on_one_line

    def say(title: str, lines: list[str]) -> None:
        if lines:
            typer.echo(title)
        for line in lines:
            typer.echo(f"  {on_one_line(line)}")

    read = f", data of {report.num_read:,} items read" if report.num_read or report.num_to_read else ""
    counts = f"{report.num_items:,} items, {report.num_files:,} files in the ledger"
    typer.echo(f"{report.library}: {counts}{read} ({report.seconds:.1f} s)")
    say("damage:", summarise(report.damage))
    say("notes:", summarise(report.notes, most=5))
    say("mended:", report.mended)
    say("not mended:", summarise(report.left, most=1000))
    if not report.is_complete:
        typer.echo(
            f"stopped after {report.num_read:,} of {report.num_to_read:,} items; the next check goes on there"
        )
    if report.was_repaired:
        verdict = "sound" if report.is_sound else "mended but for what is listed"
    elif report.damage:
        verdict = "damaged; to mend it, run 'gare check --repair'"
    else:
        verdict = "sound" if has_read else "sound (data was not read; --read-data all does)"
    typer.echo(verdict)
