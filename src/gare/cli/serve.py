"""`gare serve`: the library as a page and an API."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from gare.cli.options import choose_device

_stderr = Console(stderr=True, highlight=False, soft_wrap=True)


def serve(
    library: Annotated[
        str | None, typer.Option(help="Default: $GARE_LIBRARY, or .gare here or in a folder above.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Where the library's model is now, if it moved.")] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than this machine need a token.")
    ] = ("127.0.0.1"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8080,
    token: Annotated[
        str | None, typer.Option(envvar="GARE_TOKEN", help="Asked of everyone; better set as $GARE_TOKEN.")
    ] = None,
    without_token: Annotated[
        bool, typer.Option("--without-token", help="Let everyone on the network in, knowingly.")
    ] = False,
    folder: Annotated[
        list[str] | None, typer.Option(help="May be indexed from the page, besides those of the library.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    batch: Annotated[int, typer.Option(min=1, help="Searches answered together; 1 switches that off.")] = 16,
    upload_mb: Annotated[int, typer.Option(min=1, help="Largest picture or clip to search with.")] = 64,
    log_queries: Annotated[
        bool, typer.Option("--log-queries", help="Write down what people search for.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the address as JSON.")] = False,
) -> None:
    """Serve the search page and the REST API until Ctrl-C.

    Examples:

        gare serve --library ~/Videos/.gare

        GARE_TOKEN=… gare serve --host 0.0.0.0 --port 8000
    """
    from gare.library.library import Library, find_library
    from gare.serve.app import create_app
    from gare.serve.logs import set_up_logs
    from gare.serve.options import ServeOptions
    from gare.serve.run import bind
    from gare.serve.run import serve as run

    options = ServeOptions(
        host=host,
        port=port,
        token=token,
        without_token=without_token,
        folders=tuple(folder or ()),
        log_queries=log_queries,
        max_batch=batch,
        upload_bytes=upload_mb * 2**20,
    )
    options.check()
    bound = bind(options)
    options = ServeOptions(**{**vars(options), "port": bound.getsockname()[1]})
    set_up_logs()
    with Library.open(
        library or find_library(), model=model, device=choose_device(device), create=False
    ) as opened:
        for repair in opened.store.repairs:
            _stderr.print(f"repaired: {repair}", style="yellow", markup=False)
        app = create_app(opened, options, model_name=model)
        run(app, options, bound, lambda: _print_address(options, as_json))


def _print_address(options: object, as_json: bool) -> None:
    from gare.serve.options import ServeOptions

    assert isinstance(options, ServeOptions)
    shown = f"[{options.host}]" if ":" in options.host else options.host
    url = f"http://{shown}:{options.port}"
    typer.echo(json.dumps({"url": url}) if as_json else f"{url}  (Ctrl-C ends it)")
