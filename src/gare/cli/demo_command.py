"""`gare demo`: a library made on the spot, indexed, searched and served."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from gare.cli.options import choose_device
from gare.extras import require

if TYPE_CHECKING:
    from gare.library.library import Library

_out = Console(highlight=False, soft_wrap=True)


def demo(
    folder: Annotated[
        Path | None,
        typer.Option(help="Keep the sample videos and their library here; default: delete them at the end."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="A model folder or hub id; default: gare-mini.")] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8080,
    once: Annotated[bool, typer.Option("--once", help="Stop after the searches; serve nothing.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
) -> None:
    """Make sample videos, index them, search them three times and serve the page until Ctrl-C.

    Examples:

        gare demo

        gare demo --folder ~/gare-sample --port 9000
    """
    require("demo", "gare demo")
    if not once:
        require("serve", "gare demo without --once")
    from gare.library.library import DEFAULT_MODEL, Library
    from gare.library.sample_videos import EXAMPLES, make_sample

    with _kept(folder) as place:
        started = time.monotonic()
        _out.print(f"[bold]1.[/] Sample videos in {escape(str(place))}")
        paths = make_sample(place)
        _out.print(f"   {len(paths)} mp4 files ({time.monotonic() - started:.0f} s)")
        _out.print(f"[bold]2.[/] Index with {escape(model or DEFAULT_MODEL)}")
        with Library.open(
            place / ".gare", model=model or DEFAULT_MODEL, device=choose_device(device)
        ) as library:
            report = library.index(place)
            _out.print(f"   {report.new} new, {report.unchanged} unchanged ({report.seconds:.0f} s)")
            _out.print("[bold]3.[/] Search")
            for query in EXAMPLES:
                _search(library, query, place)
            if not once:
                _serve(library, model, port)


def _search(library: Library, query: str, place: Path) -> None:
    started = time.perf_counter()
    hits = library.search(query, top=3)
    _out.print(f'   [bold]"{escape(query)}"[/]  [dim]{1000 * (time.perf_counter() - started):.0f} ms[/]')
    for hit in hits:
        name = Path(hit.path).relative_to(place.resolve())
        _out.print(f"     {hit.score:.3f}  {escape(str(name))}  [dim]at {hit.moment:.0f} s[/]")


def _serve(library: Library, model: str | None, port: int) -> None:
    from gare.serve.app import create_app
    from gare.serve.http_server import bind, serve
    from gare.serve.observability import set_up_logs
    from gare.serve.serve_options import ServeOptions

    options = ServeOptions(port=port)
    bound = bind(options)
    set_up_logs(quiet=True)
    address = f"http://localhost:{bound.getsockname()[1]}"
    app = create_app(library, options, model_name=model)
    serve(
        app, options, bound, lambda: _out.print(f"[bold]4.[/] Open [link]{address}[/link]  (Ctrl-C ends it)")
    )


@contextmanager
def _kept(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        yield folder.expanduser().resolve()
        return
    with tempfile.TemporaryDirectory(prefix="gare-demo-") as temporary:
        yield Path(temporary).resolve()
