"""The settings of a server: who may use it, and how much."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass

from gare.errors import ServeError

LEAST_TOKEN = 16
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?|[0-9A-Fa-f:.]+")


@dataclass(frozen=True)
class ServeOptions:
    """Where a server listens, who may use it, and the most it does at once."""

    host: str = "127.0.0.1"
    port: int = 8080
    token: str | None = None
    """The token that everyone must send, in a bearer header or once on the login page."""
    without_token: bool = False
    """Serve a network without a token, knowingly."""
    trusted_hosts: tuple[str, ...] = ()
    """Names that people may open the server under, besides those that are always its own."""
    behind_proxy: bool = False
    """Believe what a proxy says of scheme, host and client, if it speaks from one of `proxies`."""
    proxies: tuple[str, ...] = ("127.0.0.0/8", "::1")
    """Addresses and networks of proxies."""
    folders: tuple[str, ...] = ()
    """Folders that may be indexed from the page, besides those the library was made of."""
    log_queries: bool = False
    is_replica: bool = False
    """One of several servers of the library: it changes nothing there, and starts and takes up no jobs."""
    drain_seconds: float = 0.0
    """After SIGTERM, seconds in which it still answers but is not ready: balancers look elsewhere first."""
    max_batch: int = 16
    """Searches that are answered together; 1 switches batching off."""
    max_waiting: int = 64
    """Searches that may wait; more are told to come back."""
    max_requests: int = 256
    """Requests in work at once, streams included."""
    max_requests_per_client: int = 128
    """From one address, where there is no token and other machines can ask."""
    max_strangers: int = 64
    """Requests in work at once without the token, where there is one: the rest is for those who have it."""
    max_strangers_per_client: int = 16
    max_connections_per_client: int = 128
    """Beyond it, the oldest idle connection of that address is ended."""
    max_uploads: int = 2
    """Uploads decoded at once; as many again may wait."""
    max_uploads_per_client: int = 2
    max_clips: int = 2
    """Clips cut, and lists of hits written, at once."""
    clip_seconds: float = 600.0
    """The longest clip."""
    clip_bytes: int = 512 * 2**20
    max_streams: int = 32
    """Followers of an indexing job."""
    upload_bytes: int = 64 * 2**20
    body_bytes: int = 64 * 2**10
    """The largest body of any other request."""
    body_seconds: float = 30.0
    """Seconds a client may take to send a body; a slower one is cut off."""
    idle_seconds: float = 30.0
    """Seconds a client may be silent: before its header, or without taking a byte of the answer."""
    answer_seconds: float = 30.0
    decode_seconds: float = 20.0
    decode_bytes: int = 2**30

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.host) and not self.behind_proxy

    def answers_to(self, name: str) -> bool:
        """Whether a host name is the server's own, and not one that a web site points at it (DNS rebinding).

        Where a token is asked for and no name was given, any name will do:
        a page under another name has neither the token nor the cookie.

        >>> ServeOptions(host="0.0.0.0", without_token=True).answers_to("evil.example")
        False
        """
        name = name.lower().rstrip(".")
        if is_loopback(name) or name in self._names():
            return True
        if is_loopback(self.host):
            return False
        has_door = self.token is not None and not self.trusted_hosts and not self.behind_proxy
        return has_door or _is_address(name) or name in own_names()

    def is_proxy(self, address: str) -> bool:
        """Whether the proxy speaks from this address."""
        if not self.behind_proxy:
            return False
        try:
            found = ipaddress.ip_address(address)
        except ValueError:
            return False
        found = getattr(found, "ipv4_mapped", None) or found
        return any(found in read_network(proxy) for proxy in self.proxies)

    def _names(self) -> set[str]:
        return {name.lower().rstrip(".") for name in (*self.trusted_hosts, self.host)}

    def check(self) -> None:
        """Refuse options that would open a library to a network by accident."""
        if self.token is not None and (len(self.token) < LEAST_TOKEN or not _is_plain(self.token)):
            raise ServeError(
                f"a token needs at least {LEAST_TOKEN} characters, none blank and all ASCII; make one "
                "with: python -c 'import secrets; print(secrets.token_urlsafe())'"
            )
        for name in self.trusted_hosts:
            if not _NAME.fullmatch(name):
                raise ServeError(f"--trusted-host takes a host name without scheme and port, not '{name}'")
        for address in self.proxies:
            read_network(address)
        if self.behind_proxy and not self.trusted_hosts:
            raise ServeError(
                "--behind-proxy needs the name that people open: pass --trusted-host videos.example.org"
            )
        if not self.is_local and self.token is None and not self.without_token:
            place = "a proxy" if self.behind_proxy else self.host
            raise ServeError(
                f"{place} can be reached from other machines; pass --token (or set GARE_TOKEN), or "
                "--without-token if everyone there may see these videos"
            )


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine alone.

    >>> is_loopback("localhost"), is_loopback("::1"), is_loopback("0.0.0.0"), is_loopback("example.org")
    (True, True, False, False)
    """
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def own_names() -> set[str]:
    """What this machine is called in its own network: by its host name, alone and with `.local`."""
    name = socket.gethostname().lower()
    short = name.partition(".")[0]
    return {name, short, f"{short}.local"}


def read_network(address: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    """The network of an address such as 10.0.0.5 or 10.0.0.0/24."""
    try:
        return ipaddress.ip_network(address, strict=False)
    except ValueError:
        raise ServeError(
            f"--proxy-address takes an IP address or network, such as 10.0.0.5, not '{address}'"
        ) from None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _is_plain(token: str) -> bool:
    return token.isascii() and token.isprintable() and not any(map(str.isspace, token))
