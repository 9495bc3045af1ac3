"""Moments to take along: a part of an item's file, and the hits of a search as a list for other programs."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

from anyio import to_thread
from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from gare.data.boxed_cut import container_for
from gare.errors import ClipError
from gare.library.editing.clip_files import clip_name
from gare.library.editing.list_formats import FORMATS, ListName, WrittenList, write_list
from gare.library.editing.moments import LENGTH_S, Moment, moments_of, part_around
from gare.serve import api_schemas as schemas
from gare.serve.clips import clip_response
from gare.serve.item_routes import ItemId
from gare.serve.problems import Problem
from gare.serve.service import SharedService
from gare.serve.video_bytes import open_video

router = APIRouter(tags=["clips"])
_MOST_NOTICES = 1000


class ClipQuery(BaseModel):
    """Which part: both times, or none for the item's own."""

    model_config = ConfigDict(extra="forbid")
    start: float | None = Field(default=None, ge=0, le=1e7, description="Seconds into the file.")
    end: float | None = Field(default=None, ge=0, le=1e7)
    exact: bool = Field(default=False, description="Encode anew: the first and last frame are right.")


class ExportQuery(schemas.SearchQuery):
    """A search, and what its hits become."""

    format: ListName
    length: float = Field(
        default=LENGTH_S, ge=0.1, le=1e6, description="Longest part of a hit, around its best second."
    )


@router.get(
    "/items/{item_id}/clip",
    summary="A part of the file as a file of its own, with its sound",
    description="`X-Clip-Start` and `X-Clip-End` say where it really begins and ends.",
    response_class=Response,
)
def get_clip(item_id: ItemId, query: Annotated[ClipQuery, Query()], service: SharedService) -> Response:
    row = service.item(item_id)
    start, end = _times(query, row["start"], row["end"])
    moment = Moment(row["path"], start, end, item_id)
    suffix = container_for(row["path"], exact=query.exact)
    with service.clips.place():
        video = open_video(row, service.content_checks)
        try:
            made = service.clips.cut(video.handle, moment, suffix, exact=query.exact)
        finally:
            video.close()
    return clip_response(made, clip_name(moment, suffix))


def _times(query: ClipQuery, start: float, end: float) -> tuple[float, float]:
    if query.start is None and query.end is None:
        return part_around(start, end, start)
    if query.start is None or query.end is None:
        raise Problem(422, "invalid_request", "send both start and end, or none of them")
    return query.start, query.end


@router.get("/search/export", summary="The hits of a search as a list", response_class=Response)
async def export_search(query: Annotated[ExportQuery, Query()], service: SharedService) -> Response:
    results = await service.hits(query.to_request(service.features(query.upload)), upload=query.upload)
    moments = moments_of(results[: query.limit], query.length)
    title = query.q or "gare"

    def write() -> WrittenList:
        with service.clips.place():
            return write_list(moments, query.format, title, limits=service.clips.limits)

    try:
        written = await to_thread.run_sync(write)
    except ClipError as error:
        raise Problem(422, "cannot_export", str(error)) from None
    chosen = FORMATS[query.format]
    headers = {"Content-Disposition": f"attachment; filename=hits{chosen.suffix}"}
    if written.notices:
        headers["X-Notices"] = quote("; ".join(written.notices)[:_MOST_NOTICES], safe=" ,;:/.()")
    content = written.text.encode("utf-8", "surrogateescape")
    return Response(content, media_type=chosen.media_type, headers=headers)
