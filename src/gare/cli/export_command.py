"""`gare export`: the vectors of a library as a Parquet file. A verb has a file of its own, however short."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def export(
    path: Annotated[Path, typer.Argument(help="The file to write, such as vectors.parquet.")],
    library: Annotated[
        str | None,
        typer.Option(help="The library; default: $GARE_LIBRARY, or .gare here or in a folder above."),
    ] = None,
    where: Annotated[
        str | None, typer.Option(help="Only items that pass this filter: 'folder:holidays duration:>10'.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write stage-1 vectors, frame vectors, times and paths of all items into a Parquet file.

    In Python, Library.add reads it again.

    Examples:

        gare export vectors.parquet

        gare export vectors.parquet --library ~/Videos/.gare --where 'duration:>10' --overwrite
    """
    from gare.library.library import Library, find_library

    with Library.open(library or find_library(), create=False, read_only=True) as opened:
        num_items = opened.export(path, where=where, overwrite=overwrite)
    if as_json:
        typer.echo(json.dumps({"path": str(path), "items": num_items}))
    else:
        typer.echo(f"{path}: {num_items:,} items")
