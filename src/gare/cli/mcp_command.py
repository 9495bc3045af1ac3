"""`gare mcp`: the library as tools for assistants, over stdin and stdout."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from gare.cli.options import choose_device
from gare.extras import require
from gare.interrupts import INTERRUPTED


def mcp(
    library: Annotated[
        str | None,
        typer.Option(help="The library; default: $GARE_LIBRARY, or .gare here or in a folder above."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Where the library's model is now, if it moved.")] = None,
    clips: Annotated[
        Path | None, typer.Option(help="Let the assistant cut clips into this folder; without it, it cannot.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
) -> None:
    """Let an assistant search the library (Model Context Protocol, stdio). It can change nothing.

    With --clips it can also cut parts of videos, which become new files in that folder.

    Examples:

        gare mcp --library ~/Videos/.gare

        gare mcp --library ~/Videos/.gare --clips ~/Videos/clips
    """
    require("mcp", "gare mcp")
    from gare.library.library import Library, find_library
    from gare.serve.mcp_tools import make_tool_server

    try:
        with Library.open(
            library or find_library(), model=model, device=choose_device(device), create=False, read_only=True
        ) as opened:
            make_tool_server(opened, clips).run("stdio")
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)  # Python would wait for the thread that reads stdin, up to the next line
