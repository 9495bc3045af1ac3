"""The pages for people. They are made here and work without JavaScript; scripts make them quick."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import date
from typing import Annotated, Any, Literal

from anyio import to_thread
from fastapi import APIRouter, Form, Path, Query, Request, Response
from pydantic import (
    BaseModel,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from starlette.responses import FileResponse, RedirectResponse

from gare.errors import EncoderError, GareError, LibraryError, TimeLimitError
from gare.library.editing.moments import part_around
from gare.library.filters import Filter
from gare.library.index.extract import strip_size
from gare.library.search.search_request import SearchRequest
from gare.serve import api_schemas as schemas
from gare.serve.model_routes import describe_models
from gare.serve.page_templates import (
    STATIC,
    address,
    heat_level,
    heat_levels,
    level_runs,
    moments_in_time,
    render,
)
from gare.serve.problems import ENCODER_FAILED, Problem, log_encoder_error, log_library_error
from gare.serve.security import COOKIE, is_token, local_target, session_value
from gare.serve.service import Service, SharedService
from gare.serve.system_routes import get_info

router = APIRouter()
ItemId = Annotated[str, Path(pattern=schemas.ITEM_ID)]
EXAMPLES = ("a cat looking at the camera", "a cup of coffee", "a smiling woman", "a red ball")
DURATIONS = (
    ("0-10", "under 10 seconds"),
    ("10-60", "10 to 60 seconds"),
    ("60-600", "1 to 10 minutes"),
    ("600-", "over 10 minutes"),
)
_MOST_TYPED = 500
_MOST_UNWANTED = 16
_PAGE = 24
_RECENT = 12
_SHOWN_FAILURES = 200
FILM_PARTS = 200
"""How many parts the line of heat under the player has."""
_LEAST_SPREAD = 0.02  # of cosines: a film that matches equally everywhere is not hot anywhere
_WEEKS_S = 30 * 24 * 3600
HINTS = {
    "zero_length": "Copy or download it again.",
    "truncated": "Copy or download it again.",
    "corrupt": "Copy or download it again.",
    "unreadable": "Not a video that can be decoded.",
    "no_video": "It has sound only.",
    "no_permission": "Change its permissions.",
    "missing": "A link that leads nowhere.",
    "bad_name": "Rename it: its name is not UTF-8.",
    "timeout": "The decoder hung.",
    "out_of_memory": "The decoder needed too much memory.",
    "decoder_crashed": "The decoder crashed.",
    "decoder_misbehaved": "The decoder answered what it should not, and was ended.",
    "too_many_items": "Use longer segments (--split).",
}


class PageQuery(BaseModel):
    """What the address of the search page says. What makes no sense is left out, never an error."""

    q: str = ""
    unwanted: list[str] = Field(default=[], alias="not")
    like: schemas.ItemId | Literal[""] = ""
    upload: schemas.ItemId | Literal[""] = ""
    folder: str = Field(default="", max_length=500)
    duration: str = ""
    after: date | None = None
    before: date | None = None
    unique: bool = False
    exact: bool = False
    offset: int = Field(default=0, ge=0, le=schemas.MOST_REACHED - schemas.MOST_SHOWN)

    @field_validator("*", mode="wrap")
    @classmethod
    def _or_default(cls, value: Any, check: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        try:
            return check(value)
        except ValidationError:
            return cls.model_fields[str(info.field_name)].get_default()

    @field_validator("q", "folder")
    @classmethod
    def _text(cls, value: str) -> str:
        return value.replace("\0", "")[:_MOST_TYPED]

    @field_validator("unwanted")
    @classmethod
    def _texts(cls, value: list[str]) -> list[str]:
        texts = (text.replace("\0", "")[:_MOST_TYPED].strip() for text in value)
        return [text for text in texts if text][:_MOST_UNWANTED]

    @field_validator("duration")
    @classmethod
    def _known(cls, value: str) -> str:
        return value if value in dict(DURATIONS) else ""

    @property
    def has_query(self) -> bool:
        return bool(self.q.strip() or self.like or self.upload)

    @property
    def num_filters(self) -> int:
        return sum(map(bool, (self.folder, self.duration, self.after, self.before)))

    def parameters(self, **changes: str) -> list[tuple[str, str]]:
        """The parameters as they stand in an address."""
        values = {
            "q": self.q,
            "like": self.like,
            "upload": self.upload,
            "folder": self.folder,
            "duration": self.duration,
            "after": str(self.after or ""),
            "before": str(self.before or ""),
            "unique": "true" if self.unique else "",
            "exact": "true" if self.exact else "",
        }
        return [*(values | changes).items(), *(("not", text) for text in self.unwanted)]

    @property
    def kept_upload(self) -> str | None:
        """The name of the upload to search with, if any."""
        return None if self.like else self.upload or None

    def to_filter(self) -> Filter | None:
        shortest, _, longest = self.duration.partition("-")
        filters = schemas.Filters(
            folder=self.folder or None,
            shortest=float(shortest) if shortest else None,
            longest=float(longest) if longest else None,
            after=self.after,
            before=self.before,
        )
        return filters.to_filter()

    def to_request(self, service: Service) -> SearchRequest:
        is_words = not (self.like or self.upload)
        return SearchRequest(
            words=self.q if is_words else None,
            unwanted=tuple(self.unwanted) if is_words else (),
            like=self.like or None,
            features=service.features(self.kept_upload),
            where=self.to_filter(),
            top=_PAGE,
            offset=self.offset,
            unique=self.unique,
            exact=self.exact,
            explain=is_words,
        )


Asked = Annotated[PageQuery, Query()]


# --- search ------------------------------------------------------------------------------------------------


@router.get("/")
async def search_page(asked: Asked, request: Request, service: SharedService) -> Response:
    context = await _results(asked, service)
    context["durations"], context["examples"] = DURATIONS, EXAMPLES
    return render(request, "search.html", context, status=context["status"])


@router.get("/results")
async def results_part(asked: Asked, request: Request, service: SharedService) -> Response:
    """The part of the page that changes while someone types."""
    context = await _results(asked, service)
    name = "_more.html" if asked.offset and context["results"] else "_results.html"
    return render(request, name, context, status=context["status"])


async def _results(asked: PageQuery, service: Service) -> dict[str, Any]:
    context: dict[str, Any] = {
        "asked": asked,
        "contents": await service.contents(),
        "results": None,
        "problem": None,
        "status": 200,
        "recent": [],
        "levels": {},
        "liked": None,
    }
    if not asked.has_query:
        where = asked.to_filter()
        rows = await to_thread.run_sync(service.newest_videos, where, _PAGE if where else _RECENT)
        context["recent"] = [schemas.make_item(row) for row in rows]
        return context
    try:
        if asked.like:
            context["liked"] = schemas.make_item(await to_thread.run_sync(service.item, asked.like))
        context["results"] = await service.search(asked.to_request(service), upload=asked.kept_upload)
        context["levels"] = heat_levels(context["results"].hits)
    except Problem as problem:
        context["problem"], context["status"] = str(problem), problem.status_code
    except LibraryError as error:
        log_library_error(error)
        context["problem"], context["status"] = str(error), 503
    except EncoderError as error:
        log_encoder_error(error)
        context["problem"], context["status"] = ENCODER_FAILED, 503
    except TimeLimitError as error:
        context["problem"], context["status"] = str(error), 503
    except GareError as error:
        context["problem"], context["status"] = str(error), 422
    return context


# --- one video ---------------------------------------------------------------------------------------------


@router.get("/watch/{item_id}")
async def watch_page(item_id: ItemId, asked: Asked, request: Request, service: SharedService) -> Response:
    return render(request, "watch.html", await _watch(item_id, asked, service))


@router.get("/watch/{item_id}/part")
async def watch_part(item_id: ItemId, asked: Asked, request: Request, service: SharedService) -> Response:
    return render(request, "_watch.html", await _watch(item_id, asked, service))


async def _watch(item_id: str, asked: PageQuery, service: Service) -> dict[str, Any]:
    row = await to_thread.run_sync(service.item, item_id)
    alike, hit = await asyncio.gather(
        service.search(SearchRequest(like=item_id, top=6)), _find(item_id, asked, service)
    )
    times = await to_thread.run_sync(service.library.store.fetch, [item_id], ["times"])
    moments = moments_in_time(hit) if hit else []
    shown = next((moment for moment in moments if moment.id == item_id), None)
    cut = (shown.start, shown.end, shown.moment) if shown else (row["start"], row["end"], row["start"])
    start, end = part_around(*cut)
    return {
        "item": schemas.make_item(row),
        "hit": hit,
        "moments": moments,
        "shown": shown,
        "strip_size": strip_size(row["width"], row["height"], len(times["times"][0]) if len(times) else 0),
        "cut": [("start", f"{start:.3f}"), ("end", f"{end:.3f}")],
        "times": [float(time) for time in times["times"][0].as_py()] if len(times) else [],
        **await _heat(row, asked, service, hit is not None),
        "similar": alike.hits,
        "asked": asked,
        "back": address("/", asked.parameters()),
    }


async def _heat(row: dict[str, Any], asked: PageQuery, service: Service, is_hit: bool) -> dict[str, Any]:
    """How well each part of the film and each frame of the strip match, on one scale."""
    if not is_hit:
        return {"film": [], "levels": []}
    request, upload = asked.to_request(service), asked.kept_upload
    heat, frames = await asyncio.gather(
        service.heat(request, row, FILM_PARTS, upload=upload),
        service.frame_scores(request, row["id"], upload=upload),
    )
    low, high = sorted(heat.scores)[len(heat.scores) // 2], max(heat.scores)
    low = min(low, high - _LEAST_SPREAD)
    return {
        "film": level_runs([heat_level(score, low, high) for score in heat.scores]),
        "levels": [heat_level(score, low, high) for score in frames],
    }


async def _find(item_id: str, asked: PageQuery, service: Service) -> schemas.Hit | None:
    """The video as a hit of the search it was opened from. It is shown even if that search fails."""
    if not asked.has_query or asked.like == item_id:
        return None
    try:
        found = await service.find(asked.to_request(service), item_id, upload=asked.kept_upload)
    except (GareError, Problem):
        return None
    return schemas.make_hit(found) if found else None


# --- the library, settings, logging in ---------------------------------------------------------------------


@router.get("/library")
def library_page(request: Request, service: SharedService) -> Response:
    num_items = len(service.library)
    failures = sorted(service.library.failures(), key=lambda failure: (failure.kind, failure.path))
    context = {
        "contents": service.contents_list.get(num_items),
        "folders": service.folders(),
        "failures": failures[:_SHOWN_FAILURES],
        "num_failures": len(failures),
        "kinds": Counter(failure.kind for failure in failures).most_common(),
        "hints": HINTS,
        "job": next(iter(service.jobs.all()), None),
        "uri": service.library.home.uri,
    }
    return render(request, "library.html", context)


@router.get("/settings")
def settings_page(request: Request, service: SharedService) -> Response:
    context = {
        "info": get_info(service),
        "models": describe_models(service),
        "job": next((job for job in service.jobs.all() if job.kind == "change"), None),
        "options": service.options,
        "is_ready": service.engine.is_ready,
        "problem": service.engine.problem,
    }
    return render(request, "settings.html", context)


@router.get("/login")
def login_page(request: Request, next: str = "/") -> Response:
    return render(request, "login.html", {"target": local_target(next), "wrong": False})


@router.post("/login")
async def log_in(
    request: Request,
    service: SharedService,
    token: Annotated[str, Form(max_length=500)],
    next: Annotated[str, Form(max_length=2000)] = "/",
) -> Response:
    if not is_token(token.strip(), service.options):
        await asyncio.sleep(0.5)
        return render(request, "login.html", {"target": local_target(next), "wrong": True}, status=401)
    response = RedirectResponse(local_target(next), 303)
    response.set_cookie(
        COOKIE,
        session_value(service.options),
        max_age=_WEEKS_S,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return response


@router.get("/favicon.ico")
def favicon() -> Response:
    return FileResponse(
        STATIC / "mark.svg", media_type="image/svg+xml", headers={"Cache-Control": "max-age=86400"}
    )
