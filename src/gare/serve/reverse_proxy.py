"""What a proxy in front of the server says of a request: under which name it came, how, and from whom.

Anyone can write these headers, so they count only from the addresses that the operator named, and a host name
in them must be one that the server answers to, like any other.
"""

from __future__ import annotations

import ipaddress

from starlette.types import ASGIApp, Receive, Scope, Send

from gare.serve.serve_options import ServeOptions

DIRECT_HOST = "gare.direct_host"
"""In a scope: the host name that the proxy used, where it passed on another one."""


class ReadProxyHeaders:
    """ASGI middleware, outside of all others: scheme, host and client are then those that the proxy saw."""

    def __init__(self, app: ASGIApp, options: ServeOptions) -> None:
        self._app, self._options = app, options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._options.is_proxy((scope.get("client") or ("",))[0]):
            scope = self._seen_by_proxy(scope)
        await self._app(scope, receive, send)

    def _seen_by_proxy(self, scope: Scope) -> Scope:
        seen = dict(scope)
        protocols, hosts = _values(scope, b"x-forwarded-proto"), _values(scope, b"x-forwarded-host")
        if protocols and protocols[-1] in ("http", "https"):
            seen["scheme"] = protocols[-1]
        if hosts:
            seen[DIRECT_HOST] = next((value for name, value in scope["headers"] if name == b"host"), b"")
            others = [(name, value) for name, value in scope["headers"] if name != b"host"]
            seen["headers"] = [(b"host", hosts[-1].encode("latin-1")), *others]
        client = self._client(_values(scope, b"x-forwarded-for"))
        if client is not None:
            seen["client"] = (client, 0)
        return seen

    def _client(self, addresses: list[str]) -> str | None:
        """The last address that is no proxy: each proxy appends the one it heard from."""
        for address in reversed(addresses):
            try:
                plain = str(ipaddress.ip_address(address))
            except ValueError:
                return None
            if not self._options.is_proxy(plain):
                return plain
        return None


def _values(scope: Scope, wanted: bytes) -> list[str]:
    """The parts of a header that may be given several times, or as a list."""
    lines = [value.decode("latin-1") for name, value in scope["headers"] if name == wanted]
    return [part.strip() for line in lines for part in line.split(",") if part.strip()]
