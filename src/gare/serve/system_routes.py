"""How the server is, and what it is made of."""

from __future__ import annotations

import platform

from fastapi import APIRouter, Response

from gare import __version__
from gare.data.sandbox import probe_box
from gare.serve import api_schemas as schemas
from gare.serve.service import Service, SharedService

router = APIRouter(tags=["system"])
metrics_router = APIRouter()


@router.get("/health", response_model=schemas.Health, summary="Whether the process answers")
async def health() -> schemas.Health:
    return schemas.Health(status="ok")


@router.get(
    "/ready",
    response_model=schemas.Health,
    summary="Whether it can search",
    responses={503: {"model": schemas.Health, "description": "Not yet, or not any more."}},
)
async def ready(service: SharedService, response: Response) -> schemas.Health:
    engine = service.engine
    if service.is_ready:
        return schemas.Health(status="ok")
    response.status_code = 503
    response.headers["Retry-After"] = "2"
    if service.is_draining:
        return schemas.Health(status="draining", message="the server is shutting down; ask another one")
    if engine.problem:
        return schemas.Health(status="unavailable", message="the model could not be loaded; see the log")
    return schemas.Health(status="starting", message="the model is being loaded")


@router.get("/info", response_model=schemas.Info, summary="Library, model and versions")
def info(service: SharedService) -> schemas.Info:
    return get_info(service)


@metrics_router.get("/metrics", include_in_schema=False)
def metrics(service: SharedService) -> Response:
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

    service.metrics.items.set(len(service.library))
    service.metrics.ready.set(service.is_ready)
    service.metrics.draining.set(service.is_draining)
    return Response(generate_latest(service.metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


def get_info(service: Service) -> schemas.Info:
    import torch

    stamp = service.library.store.stamp
    num_items = len(service.library)
    contents = service.contents_list.get(num_items)
    return schemas.Info(
        version=__version__,
        library=service.library.home.uri,
        num_items=num_items,
        num_videos=contents.num_videos,
        seconds=contents.seconds,
        model=stamp.name,
        fingerprint=stamp.fingerprint,
        dim=stamp.dim,
        num_frames=stamp.num_frames,
        candidates=service.library.default_candidates,
        python=platform.python_version(),
        torch=torch.__version__,
        device=str(service.library.model.device) if service.engine.is_ready else "",
        store_repairs=list(service.library.store.repairs),
        decoder_box=probe_box().describe(),
    )
