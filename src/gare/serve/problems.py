"""One shape for every error: `{"error": {"code", "message", "status", "details", "request_id"}}`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi import HTTPException as ApiException
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from gare.errors import EncoderError, GareError, LibraryError, QueryError, TimeLimitError, VideoError
from gare.library.search.search_request import BadTextError
from gare.serve.page_templates import render

_log = logging.getLogger("gare.serve")
API = "/api/"


class Problem(ApiException):  # of that kind: others are turned into a 400 while a body is read
    """An answer that is an error; the message says what to do."""

    def __init__(
        self, status: int, code: str, message: str, *, retry_after: int | None = None, **headers: str
    ) -> None:
        shown = {name.replace("_", "-"): value for name, value in headers.items()}
        if retry_after is not None:
            shown["Retry-After"] = str(retry_after)
        super().__init__(status, message, shown)
        self.code = code

    def __str__(self) -> str:
        return str(self.detail)


def problem_body(
    status: int, code: str, message: str, *, request_id: str = "", details: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """The JSON of an error."""
    return {
        "error": {
            "code": code,
            "message": message,
            "status": status,
            "details": list(details),
            "request_id": request_id,
        }
    }


ENCODER_FAILED = "the encoder of this library failed; the server's log says more"


def add_handlers(app: FastAPI) -> None:
    """Give every error of an app the shape of `Error`."""
    app.add_exception_handler(Problem, _on_problem)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(GareError, _on_gare_error)
    app.add_exception_handler(Exception, _on_bug)


def answer(
    request: Request,
    status: int,
    code: str,
    message: str,
    *,
    headers: Mapping[str, str] | None = None,
    details: Sequence[Mapping[str, Any]] = (),
) -> Response:
    """JSON for programs, a page for people."""
    if wants_page(request):
        context = {"status": status, "phrase": HTTPStatus(status).phrase, "message": message}
        return render(request, "error.html", context, status=status, headers=headers)
    body = problem_body(
        status, code, message, request_id=request.scope.get("request_id", ""), details=details
    )
    return JSONResponse(body, status, headers=dict(headers or {}))


def wants_page(request: Request) -> bool:
    """Whether a browser asked for a page: an error is then shown as one."""
    return not request.url.path.startswith(API) and "text/html" in request.headers.get("accept", "")


async def _on_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return answer(request, error.status_code, error.code, str(error), headers=error.headers)


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    details = [
        {"where": ".".join(map(str, problem["loc"])), "message": problem["msg"]} for problem in error.errors()
    ]
    first = f": {details[0]['where']}: {details[0]['message']}" if details else ""
    return answer(request, 422, "invalid_request", f"the request does not fit{first}", details=details)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    phrase = HTTPStatus(error.status_code).phrase
    known = {
        404: f"there is nothing at {request.url.path}",
        405: f"{request.method} is not possible here",
    }
    message = known.get(error.status_code, str(error.detail))
    code = phrase.lower().replace(" ", "_").replace("-", "_")
    return answer(request, error.status_code, code, message, headers=error.headers)


async def _on_gare_error(request: Request, error: Exception) -> Response:
    if isinstance(error, TimeLimitError):
        return answer(request, 503, "timeout", str(error), headers={"Retry-After": "5"})
    if isinstance(error, LibraryError):
        log_library_error(error, request.scope.get("request_id", ""))
        return answer(request, 503, "library_unavailable", str(error), headers={"Retry-After": "5"})
    if isinstance(error, EncoderError):
        log_encoder_error(error, request.scope.get("request_id", ""))
        return answer(request, 503, "encoder_failed", ENCODER_FAILED)
    code = "bad_query" if isinstance(error, QueryError) else "bad_request"
    code = "bad_text" if isinstance(error, BadTextError) else code
    code = "unreadable_upload" if isinstance(error, VideoError) else code
    return answer(request, 422, code, str(error))


def log_library_error(error: LibraryError, request_id: str = "") -> None:
    """Tell the operator what kind of trouble the library is in, and where; the message went to who asked."""
    fields = {"request_id": request_id, "kind": type(error).__name__, "problem": error.logged}
    _log.error("library", exc_info=error, extra={"fields": fields})


def log_encoder_error(error: EncoderError, request_id: str = "") -> None:
    """Tell the operator what an encoder of their own raised; who asked hears only that it failed."""
    fields = {"request_id": request_id, "kind": type(error.__cause__).__name__}
    _log.error("encoder", exc_info=error, extra={"fields": fields})


async def _on_bug(request: Request, error: Exception) -> Response:
    request_id = request.scope.get("request_id", "")
    message = f"something went wrong here; the server's log has more under {request_id}"
    return answer(request, 500, "internal_error", message)
