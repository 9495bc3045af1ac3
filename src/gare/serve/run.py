"""Starting and ending the server."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from gare.errors import ServeError
from gare.serve.options import ServeOptions
from gare.serve.service import Service

_KEEP_ALIVE_S = 15
_GRACE_S = 10
_HEADER_BYTES = 32 * 1024


def bind(options: ServeOptions) -> socket.socket:
    """Take the port, or say who may have it."""
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
        http=_protocol(options.idle_seconds),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
        h11_max_incomplete_event_size=_HEADER_BYTES,
        limit_concurrency=4 * options.max_requests,
        backlog=512,
    )
    with _unwinding():
        _Server(config, service, on_started).run(sockets=[bound])


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
        super().handle_exit(sig, frame)
        # Followers of a job would otherwise be waited for.
        with suppress(RuntimeError):  # the loop has ended already
            asyncio.get_running_loop().call_soon_threadsafe(self._service.jobs.stop_following)


def _protocol(idle_seconds: float) -> type[H11Protocol]:
    class ImpatientProtocol(H11Protocol):
        """Ends connections whose header does not come, and those that do not take what they asked for."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._silence = self.loop.call_later(idle_seconds, self._close_if_silent)
            self._standstill: asyncio.TimerHandle | None = None

        def connection_lost(self, exc: Exception | None) -> None:
            self._silence.cancel()
            self._end_standstill()
            super().connection_lost(exc)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._silence.cancel()
            self._silence = self.loop.call_later(_KEEP_ALIVE_S + idle_seconds, self._close_if_silent)

        def pause_writing(self) -> None:
            super().pause_writing()
            # Not closed but cut: closing would wait until the rest is taken.
            self._standstill = self.loop.call_later(idle_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._end_standstill()

        def _end_standstill(self) -> None:
            if self._standstill is not None:
                self._standstill.cancel()
                self._standstill = None

        def _close_if_silent(self) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()

    return ImpatientProtocol
