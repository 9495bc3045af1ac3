"""`gare`: results go to stdout, everything else to stderr; exit 0 worked, 1 failed, 2 misused."""

from __future__ import annotations

import sys

import typer
from rich.console import Console
from rich.markup import escape

from gare import __version__
from gare.cli import (
    ablate,
    analyze,
    audit,
    bench,
    compare,
    data,
    demo,
    evaluate,
    index,
    mcp,
    search,
    serve,
    train,
)
from gare.errors import GareError

app = typer.Typer(
    name="gare",
    help="Text-video retrieval with gap-aware increments.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
app.add_typer(data.app, name="data")
app.command()(train.train)
app.command()(evaluate.evaluate)
app.command()(ablate.ablate)
app.command()(compare.compare)
app.command()(analyze.analyze)
app.add_typer(bench.app, name="bench")
app.command()(index.index)
app.command()(search.search)
app.command()(audit.audit)
app.command()(serve.serve)
app.command()(mcp.mcp)
app.command()(demo.demo)


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
    """Text-video retrieval with gap-aware increments."""


def main() -> None:
    try:
        app()
    except GareError as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(
            f"[bold red]error:[/] {escape(str(error))}"
        )
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
