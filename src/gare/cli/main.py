"""`gare`: results go to stdout, everything else to stderr; exit 0 worked, 1 failed, 2 misused."""

from __future__ import annotations

import errno
import os
import sys

import typer
from rich.console import Console
from rich.markup import escape

from gare import __version__
from gare.cli import (
    ablate_command,
    analyze_command,
    audit_command,
    bench_command,
    card_command,
    check_command,
    clip_command,
    compare_command,
    data_command,
    demo_command,
    evaluate_command,
    export_command,
    index_command,
    mcp_command,
    models_command,
    plan_command,
    search_command,
    serve_command,
    train_command,
)
from gare.errors import GareError

app = typer.Typer(
    name="gare",
    help="Search your videos in plain words; train and measure models that do it.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
# As the README goes: search, then study.
app.command()(index_command.index)
app.command()(search_command.search)
app.command()(serve_command.serve)
app.command()(clip_command.clip)
app.command()(audit_command.audit)
app.command()(check_command.check)
app.command()(export_command.export)
app.command()(models_command.models)
app.command()(mcp_command.mcp)
app.command()(demo_command.demo)
app.add_typer(data_command.app, name="data")
app.command()(train_command.train)
app.command()(evaluate_command.evaluate)
app.command()(compare_command.compare)
app.command()(ablate_command.ablate)
app.command()(analyze_command.analyze)
app.command()(card_command.card)
app.add_typer(bench_command.app, name="bench")
app.command()(plan_command.plan)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Search your videos in plain words; train and measure models that do it."""


_FULL = "the disk is full; free some space and run the same command again"
_NOT_ALLOWED = "you may not read or write this; choose another place, or change its permissions"
_FILE_THERE = "there is a file where a folder is needed; choose another place"
_PLACE_ERRORS = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EROFS: "this disk is read-only; choose another place",
    errno.EACCES: _NOT_ALLOWED,
    errno.EPERM: _NOT_ALLOWED,
    errno.EEXIST: _FILE_THERE,  # of mkdir, which takes a folder that is there
    errno.ENOTDIR: _FILE_THERE,
    errno.EISDIR: "there is a folder where a file is needed; name a file",
}


def main() -> None:
    """Run a command; an error that a user can mend is printed without a traceback."""
    try:
        app()
    except GareError as error:
        _print_error(str(error))
    except OSError as error:
        if error.errno not in _PLACE_ERRORS:
            raise
        place = error.filename2 or error.filename  # of a rename, where the file was to go
        name = f"{os.fspath(place)}: " if isinstance(place, (str, os.PathLike)) else ""
        _print_error(name + _PLACE_ERRORS[error.errno])
    except KeyboardInterrupt:
        sys.exit(130)


def _print_error(message: str) -> None:
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"[bold red]error:[/] {escape(message)}")
    sys.exit(1)
