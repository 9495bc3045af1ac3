"""Index jobs, folders, failed files, audits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Path
from fastapi.responses import StreamingResponse

from gare.library.search.stage1 import AUDIT_NOTE
from gare.serve import api_schemas as schemas
from gare.serve.index_jobs import Job
from gare.serve.model_routes import check_model
from gare.serve.problems import Problem
from gare.serve.service import SharedService

router = APIRouter(tags=["library"])
JobId = Annotated[str, Path(pattern=schemas.ITEM_ID)]
_ALIVE_S = 15.0


@router.get("/folders", response_model=list[schemas.Folder], summary="Folders that may be indexed")
def list_folders(service: SharedService) -> list[schemas.Folder]:
    return service.folders()


@router.get("/failures", response_model=list[schemas.Failure], summary="Files that could not be indexed")
def list_failures(service: SharedService) -> list[schemas.Failure]:
    return [
        schemas.Failure(path=failure.path, kind=failure.kind, message=failure.message)
        for failure in service.library.failures()
    ]


@router.get("/jobs", response_model=list[schemas.JobState], summary="Jobs of this server, the newest first")
async def list_jobs(service: SharedService) -> list[dict[str, Any]]:
    return [asdict(job) for job in service.jobs.all()]


@router.post(
    "/jobs",
    response_model=schemas.JobState,
    status_code=202,
    summary="Start indexing, a change of model, or an audit",
)
async def start_job(order: schemas.JobOrder, service: SharedService) -> dict[str, Any]:
    service.check_writable()
    if order.kind == "change":
        model = await asyncio.to_thread(check_model, service, order.model)
        return asdict(await service.jobs.start("change", [], model=model))
    folders = await asyncio.to_thread(service.folders)
    chosen = [folder.path for folder in folders if order.folder in (None, folder.id)]
    if order.kind == "index" and not chosen:
        raise Problem(
            404,
            "no_such_folder",
            "there is no folder with this id"
            if order.folder
            else "no folder is known; name one with --folder",
        )
    starting = service.jobs.start(
        order.kind, chosen if order.kind == "index" else [], retry_failed=order.retry_failed
    )
    job = await asyncio.shield(starting)  # whole, even if whoever asked goes away
    return asdict(job)


@router.get("/jobs/{job_id}", response_model=schemas.JobState, summary="Where a job is")
async def get_job(job_id: JobId, service: SharedService) -> dict[str, Any]:
    return asdict(service.jobs.get(job_id))


@router.post(
    "/jobs/{job_id}/cancel", response_model=schemas.JobState, summary="End a job; what is done stays"
)
async def cancel_job(job_id: JobId, service: SharedService) -> dict[str, Any]:
    return asdict(await service.jobs.cancel(job_id))


@router.get(
    "/jobs/{job_id}/events",
    summary="Its progress as server-sent events",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "`event: progress` or `event: end`; `data` is a JobState.",
            "content": {"text/event-stream": {}},
        }
    },
)
async def follow_job(job_id: JobId, service: SharedService) -> StreamingResponse:
    service.jobs.get(job_id)
    following = service.jobs.follow(job_id)
    first = await anext(following)  # refused before the answer begins
    return StreamingResponse(
        _events(first, following), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"}
    )


async def _events(first: Job, following: AsyncIterator[Job]) -> AsyncIterator[str]:
    """An event per change, at most ten a second, and a sign of life now and then."""
    yield _event(first)
    pending: asyncio.Future[Job] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(anext(following))
            done, _ = await asyncio.wait([pending], timeout=_ALIVE_S)
            if not done:
                yield ": still here\n\n"
                continue
            try:
                job, pending = pending.result(), None
            except StopAsyncIteration:
                return
            yield _event(job)
            await asyncio.sleep(0.1)
    finally:
        if pending is not None:
            pending.cancel()


def _event(job: Job) -> str:
    kind = "end" if job.is_over else "progress"
    return f"event: {kind}\ndata: {json.dumps(asdict(job))}\n\n"


@router.get("/audit", summary="The last audit: how well two-stage search does on this library")
def last_audit(service: SharedService) -> dict[str, Any]:
    note = service.library.store.get_notes().get(AUDIT_NOTE)
    if not note:
        raise Problem(
            404, "no_audit", "there was no audit yet; start one with POST /api/v1/jobs, kind 'audit'"
        )
    found: dict[str, Any] = json.loads(note)
    return found
