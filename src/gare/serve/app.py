"""The application: `create_app(library)` does no work until it is started."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from gare import __version__
from gare.library.library import Library
from gare.serve import api_schemas as schemas
from gare.serve import (
    clip_routes,
    item_routes,
    job_routes,
    model_routes,
    page_routes,
    search_routes,
    system_routes,
)
from gare.serve.batching import Engine
from gare.serve.observability import Metrics
from gare.serve.page_templates import STATIC
from gare.serve.problems import add_handlers
from gare.serve.request_limits import LimitRequests
from gare.serve.reverse_proxy import ReadProxyHeaders
from gare.serve.security import GuardRequests
from gare.serve.serve_options import ServeOptions
from gare.serve.service import Service

_ABOUT = """Search a library of videos. Every error has the shape of `Error`; 429 and 503 say in
`Retry-After` when to come back. With a token, send `Authorization: Bearer …`."""


class App(FastAPI):
    """Limits and guards are outside of everything, errors included."""

    def build_middleware_stack(self) -> ASGIApp:
        """Put the limits and guards around FastAPI's own middleware."""
        service: Service = self.state.service
        inner = super().build_middleware_stack()
        guarded = GuardRequests(inner, service.options)
        limited = LimitRequests(
            guarded, service.options, service.metrics, is_draining=lambda: service.is_draining
        )
        return ReadProxyHeaders(limited, service.options)


def create_app(
    library: Library, options: ServeOptions | None = None, *, model_name: str | None = None
) -> FastAPI:
    """The server of a library. Add to it with `app.include_router(router)`.

    Access, limits, metrics and the shape of errors apply to routes that are added, too; they get at the
    library by `gare.serve.service.SharedService` or `SharedLibrary` in their signatures.

    Args:
        library: open, and left open.
        options: who may use it, and how much.
        model_name: what `--model` said, for the processes of jobs.
    """
    options = options or ServeOptions()
    options.check()
    metrics = Metrics()
    app = App(
        title="gare",
        version=__version__,
        description=_ABOUT,
        openapi_url="/api/v1/openapi.json",
        docs_url=None,  # it would come from another server
        redoc_url=None,
        lifespan=_lifespan,
    )
    app.state.service = Service(library, options, metrics, Engine(library, options, metrics), model_name)
    api = APIRouter(prefix="/api/v1", responses=_error_responses())
    for routes in (search_routes, clip_routes, item_routes, job_routes, model_routes, system_routes):
        api.include_router(routes.router)
    app.include_router(api)
    app.include_router(system_routes.metrics_router)
    app.include_router(page_routes.router, include_in_schema=False)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    add_handlers(app)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.service
    service.engine.start()
    if not service.options.is_replica:  # another one may be at it
        await service.jobs.resume()
    try:
        yield
    finally:
        await service.jobs.close()
        await asyncio.to_thread(service.engine.close)
        if "clips" in vars(service):  # nobody may have asked for one
            service.clips.close()
        if "content_checks" in vars(service):  # nobody may have asked for a video
            service.content_checks.close()
        if "uploads" in vars(service):  # nobody may have uploaded anything
            await asyncio.to_thread(service.uploads.close)


def _error_responses() -> dict[int | str, dict[str, Any]]:
    described = {
        "4XX": "The request cannot be answered as it is; the message says why.",
        "5XX": "Not now; `Retry-After` says when to try again.",
    }
    return {status: {"model": schemas.Error, "description": text} for status, text in described.items()}
