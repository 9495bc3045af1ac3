"""What a server may be told: who may use it, and how much."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from gare.errors import ServeError

LEAST_TOKEN = 16


@dataclass(frozen=True)
class ServeOptions:
    host: str = "127.0.0.1"
    port: int = 8080
    token: str | None = None
    """Asked of everyone, in a bearer header or once on the login page."""
    without_token: bool = False
    """Serve a network without a token, knowingly."""
    folders: tuple[str, ...] = ()
    """May be indexed from the page, besides those the library was made of."""
    log_queries: bool = False
    max_batch: int = 16
    """Searches that are answered together; 1 switches batching off."""
    max_waiting: int = 64
    """Searches that may wait; more are told to come back."""
    max_requests: int = 256
    """Requests in work at once, streams included."""
    max_uploads: int = 2
    """Decoded at once; as many again may wait."""
    max_uploads_per_client: int = 2
    max_streams: int = 32
    """Followers of an indexing job."""
    upload_bytes: int = 64 * 2**20
    body_bytes: int = 64 * 2**10
    """Of any other request."""
    body_seconds: float = 30.0
    """To send a body. A slower client is cut off."""
    idle_seconds: float = 30.0
    """Without a header, or without taking a byte of the answer."""
    answer_seconds: float = 30.0
    decode_seconds: float = 20.0
    decode_bytes: int = 2**30

    @property
    def is_local(self) -> bool:
        return is_loopback(self.host)

    def check(self) -> None:
        """Refuse what would open a library to a network by accident."""
        if self.token is not None and (len(self.token) < LEAST_TOKEN or not _is_plain(self.token)):
            raise ServeError(
                f"a token needs at least {LEAST_TOKEN} characters, none blank and all ASCII; make one "
                "with: python -c 'import secrets; print(secrets.token_urlsafe())'"
            )
        if not self.is_local and self.token is None and not self.without_token:
            raise ServeError(
                f"{self.host} can be reached from other machines; pass --token (or set GARE_TOKEN), or "
                "--without-token if everyone there may see these videos"
            )


def is_loopback(host: str) -> bool:
    """
    >>> is_loopback("localhost"), is_loopback("::1"), is_loopback("0.0.0.0"), is_loopback("example.org")
    (True, True, False, False)
    """
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _is_plain(token: str) -> bool:
    return token.isascii() and token.isprintable() and not any(map(str.isspace, token))
