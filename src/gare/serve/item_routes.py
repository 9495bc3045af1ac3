"""Single items: facts, pictures, bytes, captions."""

from __future__ import annotations

from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from gare.library.search.search_request import SearchRequest
from gare.library.store.read_deadline import unlimited
from gare.serve import api_schemas as schemas
from gare.serve.problems import Problem
from gare.serve.service import SharedService
from gare.serve.video_bytes import open_video, video_response

router = APIRouter(prefix="/items", tags=["items"])
ItemId = Annotated[str, Path(pattern=schemas.ITEM_ID, examples=["b2dfb3a0f077c5f81304"])]


class ListQuery(schemas.Filters):
    limit: int = Field(default=50, ge=1, le=500)
    offset: int = Field(default=0, ge=0, le=2**31)


@router.get("", response_model=schemas.Items, summary="List items, the newest first")
def list_items(query: Annotated[ListQuery, Query()], service: SharedService) -> schemas.Items:
    rows, total = service.newest(query.to_filter(), query.offset, query.limit)
    reached = query.offset + query.limit
    return schemas.Items(
        items=[schemas.make_item(row) for row in rows],
        offset=query.offset,
        next_offset=reached if reached < total else None,
        total=total,
    )


@router.get("/{item_id}", response_model=schemas.Item, summary="One item")
def get_item(item_id: ItemId, service: SharedService) -> schemas.Item:
    return schemas.make_item(service.item(item_id))


@router.delete("/{item_id}", status_code=204, summary="Take an item out of the library; its file stays")
def delete_item(
    item_id: ItemId,
    service: SharedService,
    whole: Annotated[bool, Query(description="All items of its file, as where they are ranges.")] = False,
) -> Response:
    service.check_writable()
    with unlimited():
        ids = sorted(service.library.store.items_of([service.item(item_id)["path"]])) if whole else [item_id]
        num_deleted = service.library.delete(ids)
    if not num_deleted:
        raise Problem(404, "no_such_item", f"there is no item '{item_id}' in this library")
    service.contents_list.forget()
    return Response(status_code=204)


@router.post(
    "/{item_id}/captions", response_model=list[schemas.RankedCaption], summary="Which captions fit this video"
)
async def rank_captions(
    item_id: ItemId, body: schemas.Captions, service: SharedService
) -> list[schemas.RankedCaption]:
    await to_thread.run_sync(service.item, item_id)  # 404 where there is none
    ranked = await service.engine.call(
        lambda: service.library.describe(body.captions, like=item_id, top=body.top)
    )
    return [schemas.RankedCaption(caption=caption, score=score) for caption, score in ranked]


@router.get("/{item_id}/thumbnail", summary="A JPEG of the frame that shows most", response_class=Response)
def get_thumbnail(item_id: ItemId, service: SharedService) -> Response:
    return _picture(service.thumbnail(item_id))


class FrameQuery(BaseModel):
    """Which frame."""

    model_config = ConfigDict(extra="forbid")
    time: float = Field(ge=0, le=1e7, description="Seconds into the file.")
    v: str = Field(default="", max_length=64, description="Anything: another one is another address.")


@router.get(
    "/{item_id}/frame",
    summary="A JPEG of the frame on screen at a second",
    description="Of the frames that are stored with the item; the one that shows most, in an older library.",
    response_class=Response,
)
def get_frame(item_id: ItemId, query: Annotated[FrameQuery, Query()], service: SharedService) -> Response:
    return _picture(service.frame(item_id, query.time))


@router.get(
    "/{item_id}/heat", response_model=schemas.Heat, summary="How well every part of its file matches a query"
)
async def get_heat(
    item_id: ItemId, query: Annotated[schemas.HeatQuery, Query()], service: SharedService
) -> schemas.Heat:
    request = SearchRequest(
        words=query.q,
        unwanted=tuple(query.unwanted),
        like=query.like,
        features=service.features(query.upload),
    )
    row = await to_thread.run_sync(service.item, item_id)
    return await service.heat(request, row, query.parts, upload=query.upload)


@router.get("/{item_id}/strip", summary="A JPEG of its frames side by side", response_class=Response)
def get_strip(item_id: ItemId, service: SharedService) -> Response:
    return _picture(service.strip(item_id))


@router.head("/{item_id}/video", include_in_schema=False)
@router.get(
    "/{item_id}/video",
    summary="The file, whole or in ranges",
    response_class=Response,
    responses={206: {"description": "The part that was asked for."}},
)
def get_video(item_id: ItemId, request: Request, service: SharedService) -> Response:
    row = service.item(item_id)
    return video_response(open_video(row, service.content_checks), request.headers, request.method)


def _picture(content: bytes) -> Response:
    """Addresses of pictures change with their content, so that they may be kept."""
    return Response(content, media_type="image/jpeg", headers={"Cache-Control": "private, max-age=86400"})
