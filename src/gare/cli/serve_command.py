"""`gare serve`: the library as a page and an API."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from gare.cli.options import choose_device
from gare.extras import require

if TYPE_CHECKING:
    from gare.library.library import Library
    from gare.serve.serve_options import ServeOptions

_DRAIN_S = 10.0
_stderr = Console(stderr=True, highlight=False, soft_wrap=True)


def serve(
    library: Annotated[
        str | None,
        typer.Option(help="The library; default: $GARE_LIBRARY, or .gare here or in a folder above."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Where the library's model is now, if it moved.")] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than this machine need a token.")
    ] = ("127.0.0.1"),
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8080,
    token: Annotated[
        str | None,
        typer.Option(envvar="GARE_TOKEN", help="What everyone must send; better set as $GARE_TOKEN."),
    ] = None,
    without_token: Annotated[
        bool, typer.Option("--without-token", help="Let everyone on the network in without a token.")
    ] = False,
    trusted_host: Annotated[
        list[str] | None,
        typer.Option(help="A name that people may open the server under; give it once for each."),
    ] = None,
    behind_proxy: Annotated[
        bool,
        typer.Option("--behind-proxy", help="A proxy with TLS stands in front; believe its X-Forwarded-*."),
    ] = False,
    proxy_address: Annotated[
        list[str] | None,
        typer.Option(help="Address or network that the proxy speaks from; default: this machine."),
    ] = None,
    folder: Annotated[
        list[str] | None,
        typer.Option(help="A folder that may be indexed from the page, besides those of the library."),
    ] = None,
    replica: Annotated[
        bool,
        typer.Option("--replica", help="One of several servers of this library: it only searches."),
    ] = False,
    drain: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds after SIGTERM in which it answers but is not ready; default: 10 with --replica.",
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(help="Hold the cards of exact search on this Ray cluster: HOST:PORT, auto or local."),
    ] = None,
    shards: Annotated[
        int | None, typer.Option(min=1, help="With --ray: in how many parts; default: 2.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    batch: Annotated[int, typer.Option(min=1, help="Searches answered together; 1 switches that off.")] = 16,
    upload_mb: Annotated[
        int, typer.Option(min=1, help="Largest picture or clip to search with, in MB.")
    ] = 64,
    log_queries: Annotated[bool, typer.Option("--log-queries", help="Log what people search for.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the address as JSON.")] = False,
) -> None:
    """Serve the search page and the REST API until Ctrl-C.

    Examples:

        gare serve --library ~/Videos/.gare

        GARE_TOKEN=… gare serve --host 0.0.0.0 --port 8000

        GARE_TOKEN=… gare serve --behind-proxy --trusted-host videos.example.org

        gare serve --library s3://bucket/videos --replica

        gare serve --library s3://bucket/videos --ray 10.0.0.5:6379 --shards 8
    """
    require("serve", "gare serve")
    if shards is not None and ray is None:
        raise typer.BadParameter("goes with --ray", param_hint="--shards")
    from gare.data.sandbox import probe_box
    from gare.library.library import Library, find_library
    from gare.serve.app import create_app
    from gare.serve.http_server import bind, end_threads
    from gare.serve.http_server import serve as run
    from gare.serve.observability import set_up_logs
    from gare.serve.serve_options import ServeOptions

    os.environ.pop("GARE_TOKEN", None)  # jobs inherit the environment, and need no token
    if warning := probe_box().warning:
        _stderr.print(warning, style="yellow", markup=False)
    for missing in (each for each in folder or () if not os.path.isdir(each)):
        _stderr.print(f"--folder {missing}: there is no such folder now", style="yellow", markup=False)
    options = ServeOptions(
        host=host,
        port=port,
        token=token,
        without_token=without_token,
        trusted_hosts=tuple(trusted_host or ()),
        behind_proxy=behind_proxy,
        folders=tuple(folder or ()),
        log_queries=log_queries,
        is_replica=replica,
        drain_seconds=(_DRAIN_S if replica else 0.0) if drain is None else drain,
        max_batch=batch,
        upload_bytes=upload_mb * 2**20,
    )
    if proxy_address:
        options = replace(options, proxies=tuple(proxy_address))
    options.check()
    bound = bind(options)
    options = replace(options, port=bound.getsockname()[1])
    set_up_logs(queries=log_queries)
    with Library.open(
        library or find_library(),
        model=model,
        device=choose_device(device, or_cpu=True),
        create=False,
        read_only=replica,
    ) as opened:
        for repair in opened.store.repairs:
            _stderr.print(f"repaired: {repair}", style="yellow", markup=False)
        app = create_app(opened, options, model_name=model)
        with _shards_on(ray, opened, shards or 2):
            run(app, options, bound, lambda: _print_address(options, as_json))
    end_threads()


@contextmanager
def _shards_on(ray: str | None, library: Library, num_shards: int) -> Iterator[None]:
    """Exact searches go to shards on a cluster, where one is named."""
    if ray is None:
        yield
        return
    from gare.cluster.ray_link import connected
    from gare.cluster.sharded_search import sharded

    with connected(ray, user="gare serve --ray", num_cpus=num_shards), sharded(library, num_shards):
        yield


def _print_address(options: ServeOptions, as_json: bool) -> None:
    shown = f"[{options.host}]" if ":" in options.host else options.host
    url = f"http://{shown}:{options.port}"
    typer.echo(json.dumps({"url": url}) if as_json else f"{url}  (Ctrl-C ends it)")
