"""`gare audit`: is two-stage search good enough on this library?"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gare.cli.options import choose_device, read_lines
from gare.extras import install_command, is_installed


def audit(
    library: Annotated[
        str | None,
        typer.Option(help="The library; default: $GARE_LIBRARY, or .gare here or in a folder above."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Where the library's model is now, if it moved.")] = None,
    queries: Annotated[
        Path | None, typer.Option(help="A text file of queries, one a line; default: everyday sentences.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write audit.json, audit.md and audit.png here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of Markdown.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
) -> None:
    """Compare two-stage search with exhaustive GARE, and set how many candidates a search scores.

    Examples:

        gare audit

        gare audit --library ~/Videos/.gare --queries my-queries.txt --out audit/
    """
    from gare.errors import LibraryError
    from gare.library.library import Library, find_library
    from gare.library.search.stage1_audit import audit_markdown, save_audit

    sentences = read_lines(queries) if queries else []
    stderr = Console(stderr=True)
    columns = (TextColumn("scoring every item"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        Library.open(
            library or find_library(), model=model, device=choose_device(device), create=False
        ) as opened,
        Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bar,
    ):
        task = bar.add_task("")
        result = opened.audit(
            sentences, on_progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
    if out is not None:
        try:
            save_audit(result, out)
        except OSError as error:
            raise LibraryError(f"the audit cannot be written to {out}: {error.strerror or error}") from None
        if not is_installed("analysis"):
            message = f"audit.png needs matplotlib, which is not installed: {install_command('analysis')}"
            stderr.print(message, markup=False, soft_wrap=True)
    typer.echo(json.dumps(dataclasses.asdict(result)) if as_json else audit_markdown(result), nl=as_json)
