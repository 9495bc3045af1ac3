"""Who may use the server: hosts, origins and the token."""

from __future__ import annotations

import hashlib
import hmac
from urllib.parse import quote, urlsplit

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gare.serve.options import ServeOptions, is_loopback
from gare.serve.problems import Problem, wants_page

COOKIE = "gare_session"
_PUBLIC = ("/login", "/api/v1/health", "/api/v1/ready", "/favicon.ico")
_SAFE = ("GET", "HEAD", "OPTIONS")


class GuardRequests:
    """ASGI middleware: refuses what another web page, another host name or a stranger sends."""

    def __init__(self, app: ASGIApp, options: ServeOptions) -> None:
        self._app, self._options = app, options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            return  # there are none; an unaccepted socket is closed
        if scope["type"] == "http":
            request = Request(scope)
            self._check_host(request)
            self._check_origin(request)
            if not self._may_enter(request):
                await _show_the_door(request)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _may_enter(self, request: Request) -> bool:
        path = request.url.path
        is_public = path in _PUBLIC or path.startswith("/static/")
        return not self._options.token or is_public or self._is_known(request)

    def _check_host(self, request: Request) -> None:
        """A name that some web site points at this machine is not this machine (DNS rebinding)."""
        if not self._options.is_local:
            return
        if not is_loopback(host_name(request.headers.get("host", ""))):
            raise Problem(
                421,
                "wrong_host",
                f"this server is only for this machine: open {request.url.scheme}"
                f"://localhost:{self._options.port}",
            )

    def _check_origin(self, request: Request) -> None:
        """Browsers say who asks. Changes come from our own page, or from no page at all."""
        if request.method in _SAFE:
            return
        origin = request.headers.get("origin")
        is_foreign = origin is not None and _place(origin) != request.headers.get("host", "")
        if is_foreign or request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise Problem(403, "foreign_origin", "another web page asked for this; it was refused")

    def _is_known(self, request: Request) -> bool:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and is_token(given.strip(), self._options):
            return True
        return _same(request.cookies.get(COOKIE, ""), session_value(self._options))


def _show_the_door(request: Request) -> Response:
    """To the login page for people; a program is told what is missing."""
    if not (wants_page(request) and request.method == "GET"):
        message = "send the token of this server as 'Authorization: Bearer …'"
        raise Problem(401, "token_needed", message, WWW_Authenticate="Bearer")
    path, query = request.url.path, request.url.query
    return RedirectResponse(f"/login?next={quote(f'{path}?{query}' if query else path)}", 303)


def is_token(given: str, options: ServeOptions) -> bool:
    return options.token is not None and _same(given, options.token)


def session_value(options: ServeOptions) -> str:
    """What the cookie holds: not the token itself, but only its owner could have made it."""
    return hmac.new((options.token or "").encode(), b"gare session", hashlib.sha256).hexdigest()


def host_name(header: str) -> str:
    """
    >>> host_name("localhost:8080"), host_name("[::1]:8080"), host_name("127.0.0.1")
    ('localhost', '::1', '127.0.0.1')
    """
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def _place(origin: str) -> str | None:
    """Host and port of an origin; None where there is none ("null", or what is no address at all)."""
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None


def local_target(target: str) -> str:
    """Where to go after logging in: a path here, never another site.

    >>> local_target("/library?x=1"), local_target("//evil.example"), local_target("https://evil.example")
    ('/library?x=1', '/', '/')
    """
    is_local = target.startswith("/") and not target.startswith(("//", "/\\")) and target.isprintable()
    return target if is_local else "/"


def _same(given: str, wanted: str) -> bool:
    """In the same time, however much of it is right."""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), wanted.encode())
