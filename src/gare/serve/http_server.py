"""Starting and ending the server."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType

import uvicorn
from fastapi import FastAPI

from gare.errors import ServeError
from gare.library.library import Library
from gare.serve.connection_limits import KEEP_ALIVE_S, make_protocol
from gare.serve.serve_options import ServeOptions
from gare.serve.service import Service

_GRACE_S = 10
_LEAVE_S = 10.0
_HEADER_BYTES = 32 * 1024


def bind(options: ServeOptions) -> socket.socket:
    """Open the port; if it is taken, raise an error that says what to do."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # else asyncio leaves Nagle on
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((options.host, options.port))
    except OSError as error:
        server.close()
        raise ServeError(
            f"cannot listen on {options.host} port {options.port}: {error.strerror or error}; another gare "
            "serve may run there: stop it, or choose another --port (0 takes a free one)"
        ) from None
    server.set_inheritable(False)
    return server


def serve(
    app: FastAPI, options: ServeOptions, bound: socket.socket, on_started: Callable[[], None] = lambda: None
) -> None:
    """Answer until Ctrl-C or SIGTERM; then finish what is in work."""
    service: Service = app.state.service
    config = uvicorn.Config(
        app,
        http=make_protocol(options),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
        h11_max_incomplete_event_size=_HEADER_BYTES,
        backlog=512,
    )
    with _unwinding():
        _Server(config, service, on_started).run(sockets=[bound])


def end_threads(seconds: float = _LEAVE_S) -> None:
    """Wait for threads that still read, then end the process without those that do not come back.

    They stop at their next piece. One that hangs in a storage which does not answer would keep the process.
    """
    until = time.monotonic() + seconds
    others = [thread for thread in threading.enumerate() if not thread.daemon]
    others = [thread for thread in others if thread is not threading.main_thread()]
    for thread in others:
        thread.join(max(0.0, until - time.monotonic()))
    if any(thread.is_alive() for thread in others):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def serve_library(library: Library, options: ServeOptions | None = None, *, port: int | None = None) -> None:
    """Serve a library that is open, from Python, until Ctrl-C; the address is printed.

    Args:
        options: who may use it, and how much; default: this machine alone.
        port: instead of that of the options; 0 takes a free one.
    """
    from gare.serve.app import create_app

    options = options or ServeOptions()
    options = options if port is None else replace(options, port=port)
    options.check()
    bound = bind(options)
    options = replace(options, port=bound.getsockname()[1])
    host = f"[{options.host}]" if ":" in options.host else options.host
    serve(
        create_app(library, options),
        options,
        bound,
        lambda: print(f"serving on http://{host}:{options.port}", flush=True),
    )


@contextmanager
def _unwinding() -> Iterator[None]:
    """uvicorn sends itself SIGTERM again when it is done; the library (and a demo's folder) is still open."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield
        return
    previous = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, service: Service, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._service, self._on_started = service, on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM first drains, where that is asked for; the second one ends the server, as Ctrl-C does."""
        seconds = self._service.options.drain_seconds
        if sig == signal.SIGTERM and seconds and self.started and not self._service.is_draining:
            self._service.is_draining = True
            loop = asyncio.get_running_loop()
            loop.call_soon_threadsafe(loop.call_later, seconds, self._end, sig, frame)
            return
        self._end(sig, frame)

    def _end(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        # Followers of a job would otherwise be waited for.
        with suppress(RuntimeError):  # the loop has ended already
            asyncio.get_running_loop().call_soon_threadsafe(self._service.jobs.stop_following)
