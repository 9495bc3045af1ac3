"""Searching: words, pictures, clips, likeness, captions."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import ValidationError

from gare.library.search.query_language import Term
from gare.library.search.search_request import SearchRequest
from gare.serve import api_schemas as schemas
from gare.serve.problems import Problem
from gare.serve.request_limits import UPLOAD_PATH
from gare.serve.service import Service, SharedService

router = APIRouter(tags=["search"])


@router.get("/search", response_model=schemas.Results, summary="Search with words, an item or an upload")
async def search(query: Annotated[schemas.SearchQuery, Query()], service: SharedService) -> Response:
    return await _answer(query, service)


@router.post("/search", response_model=schemas.Results, summary="The same, with weighted terms")
async def search_terms(body: schemas.SearchBody, service: SharedService) -> Response:
    return await _answer(body, service)


async def _answer(asked: schemas.SearchBody | schemas.SearchQuery, service: Service) -> Response:
    """Written once: FastAPI would check again, field by field, what was just made."""
    results = await service.search(asked.to_request(service.features(asked.upload)), upload=asked.upload)
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
                        "by": {"type": "string", "enum": ["file", "moment"]},
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
async def search_upload(request: Request, service: SharedService) -> Response:
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise Problem(
            415, "not_a_form", "send multipart/form-data with the image or clip in the field 'file'"
        )
    async with service.uploads.received(request) as (kept, form):
        fields = {
            name: value
            for name, value in form.multi_items()
            if name in ("where", "folder", "limit", "by", "unique")
        }
        try:
            body = schemas.SearchBody.model_validate({**fields, "upload": kept.id})
        except ValidationError as error:
            first = error.errors()[0]
            raise Problem(
                422, "invalid_request", f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            ) from None
        try:
            return await _answer(body, service)
        except Problem as problem:
            if problem.code != "upload_gone":
                raise
            again = await service.uploads.take_again(form)
            return await _answer(body.model_copy(update={"upload": again.id}), service)


@router.post("/captions/search", response_model=list[schemas.CaptionHits], summary="Videos for many captions")
async def search_captions(body: schemas.CaptionSearch, service: SharedService) -> list[schemas.CaptionHits]:
    requests = [SearchRequest(terms=(Term(caption),), top=body.top) for caption in body.captions]
    answers = []
    for caption, request in zip(body.captions, requests, strict=True):
        hits = await service.engine.search(request)
        answers.append(schemas.CaptionHits(caption=caption, hits=[schemas.make_hit(hit) for hit in hits]))
    return answers
