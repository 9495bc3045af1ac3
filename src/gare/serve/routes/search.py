"""Searching: words, pictures, clips, likeness, captions."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import Field, ValidationError

from gare.library.query import UNWANTED
from gare.library.query import Term as QueryTerm
from gare.serve import schemas
from gare.serve.batching import Search
from gare.serve.limits import UPLOAD_PATH
from gare.serve.problems import Problem
from gare.serve.service import Service, check_text, get_service

router = APIRouter(tags=["search"])
Shared = Annotated[Service, Depends(get_service)]


class SearchQuery(schemas.Filters):
    """The same as `SearchBody`, for an address."""

    q: schemas.Text | None = Field(
        default=None, description="Words: `a dog`, `dog ^2 + snow -people`.", examples=["a cat looks up"]
    )
    unwanted: list[schemas.Text] = Field(default=[], max_length=16, description="Words that are not wanted.")
    like: schemas.ItemId | None = Field(default=None, description="Id of an item: what resembles it.")
    upload: schemas.ItemId | None = Field(default=None, description="Name of an upload that is still kept.")
    limit: int = Field(default=24, ge=1, le=schemas.MOST_SHOWN)
    offset: int = Field(default=0, ge=0, le=schemas.MOST_REACHED - schemas.MOST_SHOWN)
    min_score: float | None = Field(default=None, ge=-10, le=10)
    candidates: int | None = Field(default=None, ge=1, le=4096)
    unique: bool = False
    explain: bool = False

    def to_body(self) -> tuple[schemas.SearchBody, tuple[QueryTerm, ...]]:
        values = self.model_dump(exclude={"q", "unwanted"})
        unwanted = tuple(QueryTerm(text.strip(), UNWANTED) for text in self.unwanted if text.strip())
        return schemas.SearchBody(query=self.q, **values), unwanted


@router.get("/search", response_model=schemas.Results, summary="Search with words, an item or an upload")
async def search(query: Annotated[SearchQuery, Query()], service: Shared) -> Response:
    body, more = query.to_body()
    return _answer(await service.search(body, more=more))


@router.post("/search", response_model=schemas.Results, summary="The same, with weighted terms")
async def search_terms(body: schemas.SearchBody, service: Shared) -> Response:
    return _answer(await service.search(body))


def _answer(results: schemas.Results) -> Response:
    """Written once: FastAPI would check again, field by field, what was just made."""
    return Response(results.model_dump_json(), media_type="application/json")


_UPLOAD_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {
                        "file": {"type": "string", "format": "binary", "description": "An image or a clip."},
                        "where": {"type": "string", "maxLength": 500},
                        "folder": {"type": "string", "maxLength": 500},
                        "limit": {"type": "integer", "minimum": 1, "maximum": schemas.MOST_SHOWN},
                        "unique": {"type": "boolean"},
                    },
                }
            }
        },
    }
}


@router.post(
    UPLOAD_PATH.removeprefix("/api/v1"),
    response_model=schemas.Results,
    summary="Search with an image or a clip",
    openapi_extra=_UPLOAD_FORM,
)
async def search_upload(request: Request, service: Shared) -> Response:
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise Problem(
            415, "not_a_form", "send multipart/form-data with the image or clip in the field 'file'"
        )
    async with service.uploads.received(request) as (kept, form):
        fields = {
            name: value
            for name, value in form.multi_items()
            if name in ("where", "folder", "limit", "unique")
        }
        try:
            body = schemas.SearchBody.model_validate({**fields, "upload": kept.id})
        except ValidationError as error:
            first = error.errors()[0]
            raise Problem(
                422, "invalid_request", f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            ) from None
        return _answer(await service.search(body))


@router.post("/captions/search", response_model=list[schemas.CaptionHits], summary="Videos for many captions")
async def search_captions(body: schemas.CaptionSearch, service: Shared) -> list[schemas.CaptionHits]:
    answers = []
    for caption in body.captions:
        check_text(caption)
    for caption in body.captions:
        hits = await service.engine.search(Search(terms=(QueryTerm(caption),), top=body.top))
        answers.append(schemas.CaptionHits(caption=caption, hits=[schemas.make_hit(hit) for hit in hits]))
    return answers
