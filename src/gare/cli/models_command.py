"""`gare models`: the models there are, and the vectors that a library keeps of them."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from gare.library.library import Library
    from gare.model.model_inventory import ListedModel

_WHERE = {"box": "with gare", "installed": "installed", "cache": "on this machine", "hub": "by name"}
_NO_TERMINAL_WIDTH = 200


def models(
    library: Annotated[
        str | None, typer.Option(help="List the vectors that this library keeps instead.")
    ] = None,
    use: Annotated[
        str | None,
        typer.Option(help="Search the library with the vectors of this model from now on.", metavar="NAME"),
    ] = None,
    forget: Annotated[
        str | None, typer.Option(help="Free the vectors of a model that is not used.", metavar="NAME")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the models that `--model` takes: those that come with gare, those on this machine, those by name.

    With `--library`, list the vectors that a library keeps, one set for each model that encoded it. `gare
    index --model NAME` makes another set and changes to it; `--use` changes to one that is kept, at once.

    Speeds are those that `gare bench encode --model NAME` measured here. Nothing is downloaded.

    Examples:

        gare models

        gare models --library ~/Videos/.gare

        gare models --library ~/Videos/.gare --use gare-mini

        gare models --library ~/Videos/.gare --forget gare-mini
    """
    if library is None:
        if use is not None or forget is not None:
            raise typer.BadParameter("name the library", param_hint="--library")
        _list_models(as_json)
        return
    from gare.library.library import Library

    with Library.open(library, create=False, read_only=use is None and forget is None) as opened:
        if use is not None:
            _use(opened, use)
        if forget is not None:
            chosen = opened.forget_model(forget)
            Console(stderr=True, highlight=False).print(
                f"the vectors of {chosen.stamp.name} are gone", markup=False
            )
        _list_sets(opened, as_json)


def _use(library: Library, name: str) -> None:
    behind = library.use_model(name)
    if behind:
        Console(stderr=True, highlight=False, soft_wrap=True).print(
            f"{behind:,} files are newer than these vectors; bring them up to date: gare index DIR --library "
            f"{library.home.uri}",
            style="yellow",
            markup=False,
        )


def _list_models(as_json: bool) -> None:
    from gare.model.model_inventory import list_models

    found = list_models()
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(model) for model in found], ensure_ascii=False))
        return
    table = _table(
        "model", "where", "dim", "disk", "memory", "languages", "texts/s", "frames/s", "licence", ""
    )
    for model in found:
        table.add_row(*_row(model))
    _print(table)


def _row(model: ListedModel) -> list[str]:
    speed = model.speed
    return [
        model.name,
        _WHERE[model.where],
        str(model.dim or ""),
        _megabytes(model.disk_bytes),
        _megabytes(model.memory_bytes),
        ", ".join(model.languages),
        f"{speed.texts_per_second:.0f}" if speed else "",
        f"{speed.frames_per_second:.0f}" if speed else "",
        model.licence,
        model.purpose,
    ]


def _list_sets(library: Library, as_json: bool) -> None:
    rows = [library.describe_set(found) for found in library.sets()]
    if as_json:
        typer.echo(json.dumps(rows, ensure_ascii=False))
        return
    table = _table("", "model", "set", "items", "size", "dim", "state")
    for row in rows:
        table.add_row(
            "*" if row["is_current"] else "",
            row["model"],
            row["set"],
            f"{row['num_items']:,}",
            _megabytes(row["num_bytes"]),
            str(row["dim"]),
            row["state"],
        )
    _print(table)


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        is_number = name in ("dim", "disk", "memory", "texts/s", "frames/s", "items", "size")
        table.add_column(
            name, justify="right" if is_number else "left", overflow="fold", no_wrap=name == "model"
        )
    return table


def _print(table: Table) -> None:
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console = Console(markup=False, highlight=False, width=_NO_TERMINAL_WIDTH)
    console.print(table)


def _megabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 1e6:,.0f} MB" if size >= 1e6 else f"{size / 1e3:,.0f} kB"
