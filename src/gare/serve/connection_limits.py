"""Connections: silent ones are ended, and nobody can take so many that others get none."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from gare.serve.serve_options import ServeOptions

KEEP_ALIVE_S = 15
_FILES_FOR_OTHERS = 256  # the library, videos that are shown, and processes need files as well


def most_connections(options: ServeOptions) -> int:
    """Four for each request that may be in work, as far as the system's limit on open files allows."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = 4 * options.max_requests
    return allowed if files == resource.RLIM_INFINITY else max(16, min(allowed, files - _FILES_FOR_OTHERS))


class OpenConnections:
    """Every connection by its client, the oldest first."""

    def __init__(self, options: ServeOptions) -> None:
        self._most, self._most_per_client = most_connections(options), options.max_connections_per_client
        self._by_client: dict[str, dict[ImpatientProtocol, None]] = {}
        self._count = 0

    def add(self, connection: ImpatientProtocol) -> None:
        """Note a new connection. If there are too many, an idle one of the client with the most must go."""
        own = self._by_client.setdefault(connection.client_address, {})
        own[connection] = None
        self._count += 1
        if len(own) > self._most_per_client and connection.has_limit:
            self._end_one([own], connection)
        elif self._count > self._most:
            self._end_one(sorted(self._by_client.values(), key=len, reverse=True), connection)

    def remove(self, connection: ImpatientProtocol) -> None:
        """Forget a connection that has ended."""
        own = self._by_client.get(connection.client_address, {})
        if connection in own:
            del own[connection]
            self._count -= 1
            if not own:
                del self._by_client[connection.client_address]

    def _end_one(self, groups: list[dict[ImpatientProtocol, None]], newest: ImpatientProtocol) -> None:
        idle = (one for group in groups for one in group if one.is_idle and one is not newest)
        ended = next(idle, newest)  # all others are being answered
        self.remove(ended)
        ended.transport.abort()


class ImpatientProtocol(H11Protocol):
    """Ends connections whose header does not come, and those that do not take what they asked for."""

    def __init__(self, options: ServeOptions, others: OpenConnections, **settings: Any) -> None:
        super().__init__(**settings)
        self._options, self._others = options, others

    @property
    def is_idle(self) -> bool:
        """Whether no request is in work."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def client_address(self) -> str:
        """The address at the other end: a proxy's, if there is one."""
        return self.client[0] if self.client else ""

    @property
    def has_limit(self) -> bool:
        """Whether the limit for one client applies. This machine, or a proxy, may speak for many people."""
        return not (self._options.is_local or self._options.is_proxy(self.client_address))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a header, for so long."""
        super().connection_made(transport)
        self._silence = self.loop.call_later(self._options.idle_seconds, self._close_if_silent)
        self._standstill: asyncio.TimerHandle | None = None
        self._others.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """End all waiting."""
        self._others.remove(self)
        self._silence.cancel()
        self._end_standstill()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Wait for the next header."""
        super().on_response_complete()
        self._silence.cancel()
        self._silence = self.loop.call_later(KEEP_ALIVE_S + self._options.idle_seconds, self._close_if_silent)

    def pause_writing(self) -> None:
        """The client does not take what it asked for; give it some time."""
        super().pause_writing()
        # Not closed but cut: closing would wait until the rest is taken.
        self._standstill = self.loop.call_later(self._options.idle_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """The client takes its answer again."""
        super().resume_writing()
        self._end_standstill()

    def _end_standstill(self) -> None:
        if self._standstill is not None:
            self._standstill.cancel()
            self._standstill = None

    def _close_if_silent(self) -> None:
        if self.is_idle:
            self.transport.close()


def make_protocol(options: ServeOptions) -> type[H11Protocol]:
    """The class that uvicorn makes an object of for each connection."""
    others = OpenConnections(options)

    class Protocol(ImpatientProtocol):
        def __init__(self, **settings: Any) -> None:
            super().__init__(options, others, **settings)

    return Protocol
