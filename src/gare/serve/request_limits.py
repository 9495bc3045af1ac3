"""Around every request: a number, a log line, metrics, and bounds on bytes, time and how many at once."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gare import __version__
from gare.library.store.read_deadline import Deadline
from gare.serve.observability import Metrics
from gare.serve.problems import Problem, answer
from gare.serve.security import is_known
from gare.serve.serve_options import ServeOptions

UPLOAD_PATH = "/api/v1/search/upload"
_API = "/api/v1"
_ALWAYS = ("/api/v1/health", "/metrics")  # an operator must see in when all is busy
_METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")  # anyone can make up others
_BODY_HEADERS = (b"content-length", b"transfer-encoding")
_OWN_HEAD = ("/video", "/events")  # files are not read for it, and streams have no end to wait for
_log = logging.getLogger("gare.serve")
_HEADERS = [
    (b"x-gare-version", __version__.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
]
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; media-src 'self'; "
    b"connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)


class LimitRequests:
    """ASGI middleware, the outermost one."""

    def __init__(
        self,
        app: ASGIApp,
        options: ServeOptions,
        metrics: Metrics,
        *,
        is_draining: Callable[[], bool] = lambda: False,
    ) -> None:
        self._app, self._options, self._metrics = app, options, metrics
        self._is_draining = is_draining
        self._in_work = 0
        self._places = _Places(options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_head = scope["method"] == "HEAD" and not scope["path"].endswith(_OWN_HEAD)
        # Whatever can be read can be asked about: it is made, and its body left out.
        scope = {**scope, "request_id": secrets.token_hex(6), **({"method": "GET"} if is_head else {})}
        send = _without_body(send) if is_head else send
        send = _last_one(send) if self._is_draining() else send
        exchange = _Exchange(scope, receive, send, self._options)
        self._in_work += 1
        self._metrics.in_work.set(self._in_work)
        try:
            await self._answer(scope, exchange)
        finally:
            self._in_work -= 1
            self._metrics.in_work.set(self._in_work)
            self._note(scope, exchange)

    async def _answer(self, scope: Scope, exchange: _Exchange) -> None:
        reading = Deadline()
        try:
            async with asyncio.timeout(self._options.answer_seconds) as limit:
                exchange.limit = limit
                with self._place(scope), reading.active():
                    exchange.check_length()
                    await exchange.expect_body()
                    await self._app(scope, exchange.receive, exchange.send)
        except Problem as problem:
            await exchange.refuse(problem)
        except TimeoutError:
            self._metrics.ended.labels("client_gone" if exchange.is_abandoned else "timeout").inc()
            if exchange.is_abandoned:
                return
            await exchange.refuse(
                Problem(503, "timeout", "this took too long; try again in a few seconds", retry_after=5)
            )
        except _ClientGone:
            pass  # nobody is left to tell; the server closes the connection
        except Exception:
            # Its answer was sent by the handler of the app; here it is written down.
            _log.exception("bug", extra={"fields": {"request_id": scope["request_id"]}})
            if not exchange.has_started:
                raise
        finally:
            reading.cancel()  # threads that still read for this request stop at their next piece
            exchange.close()

    def _place(self, scope: Scope) -> AbstractContextManager[None]:
        if scope["path"] in _ALWAYS:
            return nullcontext()
        client = (scope.get("client") or ("",))[0]
        taken = self._places.take(client, is_known=is_known(Request(scope), self._options))
        if taken is None:
            self._metrics.refused.labels("requests").inc()
            raise Problem(503, "busy", "too many requests at once; try again in a second", retry_after=1)
        return taken

    def _note(self, scope: Scope, exchange: _Exchange) -> None:
        route, method = _route(scope), scope["method"] if scope["method"] in _METHODS else "other"
        seconds = (exchange.answered or time.perf_counter()) - exchange.begun
        self._metrics.requests.labels(method, route, str(exchange.status)).inc()
        self._metrics.seconds.labels(route).observe(seconds)
        fields: dict[str, Any] = {
            "request_id": scope["request_id"],
            "client": (scope.get("client") or ("",))[0],
            "method": method,
            "route": route,
            "status": exchange.status,
            "ms": round(1000 * seconds, 1),
            "bytes": exchange.sent_bytes,
        }
        if self._options.log_queries:
            fields["path"], fields["query"] = scope["path"], scope["query_string"].decode("latin-1")
        _log.info("request", extra={"fields": fields})


class _Places:
    """Places for requests in work. With a token, strangers have a few of them, and each address fewer."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._taken = 0
        self._by_client: Counter[str] = Counter()

    def take(self, client: str, *, is_known: bool) -> AbstractContextManager[None] | None:
        """A place, to be left again; None if there is none."""
        options = self._options
        if self._taken >= options.max_requests:
            return None
        if is_known:
            return self._counted(None)
        most_each = options.max_requests if options.is_local else options.max_requests_per_client
        if options.token is not None:
            most_each = options.max_strangers_per_client
            if self._by_client.total() >= options.max_strangers:
                return None
        return self._counted(client) if self._by_client[client] < most_each else None

    @contextmanager
    def _counted(self, client: str | None) -> Iterator[None]:
        self._taken += 1
        if client is not None:
            self._by_client[client] += 1
        try:
            yield
        finally:
            self._taken -= 1
            if client is not None:
                self._by_client[client] -= 1
                self._by_client += Counter()  # forgets those with none


def _route(scope: Scope) -> str:
    """The pattern that fitted, for a label that takes few values."""
    path = getattr(scope.get("route"), "path", None) or "other"
    is_short = scope["path"].startswith(_API) and not path.startswith(_API)
    return f"{_API}{path}" if is_short and path != "other" else path


def _without_body(send: Send) -> Send:
    async def send_head(message: Message) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return send_head


def _last_one(send: Send) -> Send:
    """Tell a client not to ask again over this connection: it will soon be gone."""

    async def send_last(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await send(message)

    return send_last


class _ClientGone(Exception):
    """It went away, or did not take its answer."""


class _Exchange:
    """A request and its answer, counted and timed."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, options: ServeOptions) -> None:
        self._scope, self._receive, self._send, self._options = scope, receive, send, options
        self.begun = time.perf_counter()
        self.answered: float | None = None
        self.limit: asyncio.Timeout | None = None
        self.is_abandoned = False
        """The client went away before its answer began."""
        self._gone = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._first: Message | None = None
        self.status, self.sent_bytes, self._received = 0, 0, 0
        is_upload = scope["path"] == UPLOAD_PATH
        self._most = options.upload_bytes + 2**16 if is_upload else options.body_bytes
        self._body_deadline = time.monotonic() + options.body_seconds
        if is_upload:  # sending, waiting and decoding each have limits of their own
            self._extra = options.body_seconds + options.decode_seconds
        else:
            self._extra = 0.0

    @property
    def has_started(self) -> bool:
        return self.status != 0

    def check_length(self) -> None:
        if self._extra and self.limit is not None and (when := self.limit.when()) is not None:
            self.limit.reschedule(when + self._extra)
        for name, value in self._scope["headers"]:
            if name == b"content-length" and (not value.isdigit() or int(value) > self._most):
                raise self._too_large()

    async def expect_body(self) -> None:
        """Take in an empty body, which nobody may ask for: from then on it is seen when the client leaves."""
        lengths = {name: value for name, value in self._scope["headers"] if name in _BODY_HEADERS}
        if lengths in ({}, {b"content-length": b"0"}):
            self._first = await self.receive()

    async def receive(self) -> Message:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        if self._watcher is not None:
            await self._gone.wait()
            return {"type": "http.disconnect"}
        try:
            message = await asyncio.wait_for(
                self._receive(), max(0.01, self._body_deadline - time.monotonic())
            )
        except TimeoutError:
            raise Problem(
                408,
                "too_slow",
                f"the body did not arrive within {self._options.body_seconds:g} seconds",
                Connection="close",
            ) from None
        self._received += len(message.get("body", b""))
        if self._received > self._most:
            raise self._too_large()
        if not message.get("more_body", False):
            self._watcher = asyncio.create_task(self._watch(message))
        return message

    async def _watch(self, last: Message) -> None:
        """Wait until the client goes away, and end the request if its answer has not begun."""
        while last["type"] != "http.disconnect":
            last = await self._receive()
        self._gone.set()
        if not self.has_started and self.limit is not None:
            self.is_abandoned = True
            with suppress(RuntimeError):  # its time is up already
                self.limit.reschedule(asyncio.get_running_loop().time())

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.answered = message["status"], time.perf_counter()
            if self.limit is not None:
                self.limit.reschedule(None)  # an answer has begun; from here on only standstill counts
            message = {**message, "headers": [*message["headers"], *self._headers(message)]}
        try:
            # Our own server cuts such a connection earlier; another one may not.
            async with asyncio.timeout(2 * self._options.idle_seconds):
                await self._send(message)
        except TimeoutError:
            raise _ClientGone from None
        self.sent_bytes += len(message.get("body", b""))

    def _headers(self, message: Message) -> list[tuple[bytes, bytes]]:
        names = {name.lower() for name, _ in message["headers"]}
        more = [*_HEADERS, (b"x-request-id", self._scope["request_id"].encode())]
        if b"content-security-policy" not in names:
            more.append((b"content-security-policy", _POLICY))
        if b"cache-control" not in names:
            is_ours = self._scope["path"].startswith("/static/")  # kept, and asked for again by its ETag
            more.append((b"cache-control", b"no-cache" if is_ours else b"no-store"))
        return more

    async def refuse(self, problem: Problem) -> None:
        if self.has_started:
            raise problem  # half an answer cannot become another one; the server cuts the connection
        self.limit = None  # it is over already
        request = Request(self._scope)
        response = answer(
            request,
            problem.status_code,
            problem.code,
            str(problem),
            headers={**(problem.headers or {}), "Connection": "close"},
        )
        with suppress(_ClientGone):
            await response(self._scope, self._receive, self.send)

    def _too_large(self) -> Problem:
        megabytes = self._most / 2**20
        return Problem(413, "too_large", f"the body is larger than {megabytes:.3g} MB", Connection="close")
