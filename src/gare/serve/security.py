"""Who may use the server: hosts, origins and the token."""

from __future__ import annotations

import hashlib
import hmac
from urllib.parse import quote, urlsplit

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gare.serve.problems import API, Problem, wants_page
from gare.serve.reverse_proxy import DIRECT_HOST
from gare.serve.serve_options import ServeOptions, is_loopback

COOKIE = "gare_session"
_PUBLIC = ("/login", "/api/v1/health", "/api/v1/ready", "/favicon.ico")


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
        return not self._options.token or is_public or is_known(request, self._options)

    def _check_host(self, request: Request) -> None:
        """A name that some web site points at this machine is not this machine (DNS rebinding).

        A page under such a name can write any header but Host, so a proxy's word does not replace it.
        """
        direct = request.scope.get(DIRECT_HOST, b"").decode("latin-1")
        given = [header for header in (direct, request.headers.get("host", "")) if header]
        for header in given:
            if not self._options.answers_to(host_name(header)):
                raise self._wrong_host()
        if not given and is_loopback(self._options.host):  # no browser leaves it out
            raise self._wrong_host()

    def _wrong_host(self) -> Problem:
        if self._options.is_local:
            advice = f"only for this machine: open http://localhost:{self._options.port}"
        else:
            advice = "not known under this name; the operator can add it with --trusted-host NAME"
        return Problem(421, "wrong_host", f"this server is {advice}")

    def _check_origin(self, request: Request) -> None:
        """Browsers say who asks: our own page, or no page at all.

        Another page could not read the answer, but an `<img src="…/api/v1/search?…">` in it would still cost
        a search. It may link to our pages, and that is all.
        """
        headers = request.headers
        origin = headers.get("origin")
        is_foreign = origin is not None and _place(origin) != headers.get("host", "")
        is_foreign |= headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
        if is_foreign and request.method != "OPTIONS" and not _is_link(request):
            raise Problem(403, "foreign_origin", "another web page asked for this; it was refused")


def is_known(request: Request, options: ServeOptions) -> bool:
    """Whether a request comes from somebody with the token."""
    if options.token is None:
        return False
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and is_token(given.strip(), options):
        return True
    return _same(request.cookies.get(COOKIE, ""), session_value(options))


def _is_link(request: Request) -> bool:
    """Whether somebody followed a link to one of our pages: a whole page is opened, not a part of another."""
    headers = request.headers
    is_opened = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return is_opened and request.method in ("GET", "HEAD") and not request.url.path.startswith(API)


def _show_the_door(request: Request) -> Response:
    """Send a person to the login page, and tell a program that it needs the token."""
    if not (wants_page(request) and request.method == "GET"):
        message = "send the token of this server as 'Authorization: Bearer …'"
        raise Problem(401, "token_needed", message, WWW_Authenticate="Bearer")
    path, query = request.url.path, request.url.query
    return RedirectResponse(f"/login?next={quote(f'{path}?{query}' if query else path)}", 303)


def is_token(given: str, options: ServeOptions) -> bool:
    """Whether this is the token of the server."""
    return options.token is not None and _same(given, options.token)


def session_value(options: ServeOptions) -> str:
    """What the cookie holds: not the token itself, but only its owner could have made it."""
    return hmac.new((options.token or "").encode(), b"gare session", hashlib.sha256).hexdigest()


def host_name(header: str) -> str:
    """The host of a Host header, without its port.

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
    """Whether both are equal, compared in constant time."""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), wanted.encode())
