"""What goes in and out of the API, with examples.

What comes in becomes a `SearchRequest`, which checks it; a `SearchHit` goes out as a `Hit`.
"""

from __future__ import annotations

from datetime import date
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from gare.library.filters import And, DurationBetween, Filter, InFolder, ModifiedBetween, parse_filter
from gare.library.search import query_language
from gare.library.search.file_heat import MOST_PARTS
from gare.library.search.search_hit import SearchHit
from gare.library.search.search_request import By, SearchRequest, check_text
from gare.types import VideoFeatures

ITEM_ID = r"^[0-9A-Za-z_-]{1,64}$"
MOST_SHOWN = 100
MOST_REACHED = 1000
Text = Annotated[str, StringConstraints(max_length=500)]
Caption = Annotated[str, StringConstraints(min_length=1, max_length=500, strip_whitespace=True)]
ItemId = Annotated[str, StringConstraints(pattern=ITEM_ID)]


class Frame(BaseModel):
    time: float = Field(description="Seconds into the file.")
    score: float = Field(description="Cosine of the query with this frame.")
    weight: float = Field(description="Its share in the score; the shares add up to one.")


class Explanation(BaseModel):
    rank: int = Field(description="Where GARE put it.")
    plain_rank: int = Field(description="Where the same towers without increments would have put it.")
    move: int = Field(description="Places gained (or lost, if negative) by the increment.")
    plain_score: float
    radius: float | None = Field(description="Length of the increment; null for a model without.")


class Links(BaseModel):
    video: str
    thumbnail: str
    strip: str
    page: str


class Item(BaseModel):
    id: str
    name: str
    folder: str
    path: str
    start: float = Field(description="Seconds into the file where the item begins.")
    end: float
    duration: float = Field(description="Seconds of the whole file.")
    width: int
    height: int
    modified: str
    tags: list[str]
    links: Links


class Moment(BaseModel):
    """A part of the file that matches too, but less than the hit's own."""

    id: str = Field(description="Of the item that it was found by.")
    score: float
    start: float = Field(description="Seconds into the file.")
    end: float
    moment: float = Field(description="The second that matches best.")
    picture: str = Field(description="Address of the frame at that second.")


class Hit(Item):
    """A file with its best moment or, by moment, one of them: `start`, `end` and `moment` are seconds."""

    score: float
    moment: float = Field(description="Seconds into the file where it matches best.")
    picture: str = Field(description="Address of the frame at that second, a JPEG.")
    others: list[Moment] = Field(
        default=[], description="Further moments of the file, best first; none of them overlap."
    )
    frames: list[Frame]
    duplicates: list[str] = Field(description="Ids of near-copies folded into this hit.")
    explanation: Explanation | None = None


class Heat(BaseModel):
    """How well every part of a file matches."""

    duration: float = Field(description="Seconds of the file.")
    step: float = Field(description="Seconds of a part.")
    scores: list[float] = Field(description="For each part the best cosine of the query with a frame.")


class Certificate(BaseModel):
    """Why the hits are the true best ones: no item that was not scored can be among them."""

    num_items: int = Field(description="Items that could have been hits.")
    num_scored: int = Field(description="Items whose exact score was computed.")
    last_score: float | None = Field(description="The lowest score needed; null when all were scored.")
    next_bound: float | None = Field(description="What no other item can reach; null when all were scored.")
    num_refined: int = Field(default=0, description="Items whose second, narrower bound was needed.")


class Results(BaseModel):
    hits: list[Hit]
    offset: int
    next_offset: int | None = Field(description="Where the next page begins; null on the last one.")
    library_size: int
    took_ms: float
    certificate: Certificate | None = Field(
        default=None, description="The proof that no other item belongs among the hits, where there is one."
    )
    partial: bool = Field(default=False, description="Items were left out: a shard did not answer.")
    missing: list[str] = Field(
        default=[], description="Ranges of item ids that were left out, as FIRST-LAST; LAST is not in it."
    )
    upload: str | None = Field(
        default=None, description="Name of the upload, for `upload=` in later searches."
    )
    notices: list[str] = Field(
        default=[], description="What a person should know, such as a language that the model does not read."
    )


class Items(BaseModel):
    items: list[Item]
    offset: int
    next_offset: int | None
    total: int


class Term(BaseModel):
    model_config = ConfigDict(extra="forbid")
    text: Caption
    weight: float = Field(default=1.0, ge=-10, le=10, description="Negative: not wanted.")


class Filters(BaseModel):
    """All of them must hold."""

    model_config = ConfigDict(extra="forbid")
    where: Text | None = Field(default=None, description="As in `gare search --where`.")
    folder: Text | None = Field(default=None, description="A folder, or the end of its path.")
    shortest: float | None = Field(default=None, ge=0, le=1e7, description="Seconds.")
    longest: float | None = Field(default=None, ge=0, le=1e7, description="Seconds.")
    after: date | None = Field(default=None, description="Changed on this day or later.")
    before: date | None = Field(default=None, description="Changed on this day or earlier.")

    def to_filter(self) -> Filter | None:
        parts: list[Filter] = []
        if self.where and self.where.strip():
            parts.append(parse_filter(self.where))
        if self.folder:
            parts.append(InFolder(check_text(self.folder)))
        if self.shortest is not None or self.longest is not None:
            parts.append(DurationBetween(self.shortest, self.longest))
        if self.after is not None or self.before is not None:
            parts.append(ModifiedBetween(self.after, self.before))
        if not parts:
            return None
        return parts[0] if len(parts) == 1 else And(tuple(parts))


class SearchBody(Filters):
    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "terms": [
                        {"text": "a dog", "weight": 2},
                        {"text": "snow"},
                        {"text": "people", "weight": -0.5},
                    ],
                    "shortest": 5,
                    "limit": 10,
                    "explain": True,
                }
            ]
        },
    )
    query: Text | None = Field(default=None, description="Words, as typed: `dog ^2 + snow -people`.")
    terms: list[Term] = Field(default=[], max_length=16, description="Instead of `query`.")
    like: ItemId | None = Field(default=None, description="Instead of words: what resembles this item.")
    upload: ItemId | None = Field(default=None, description="Instead of words: an upload that is still kept.")
    limit: int = Field(default=24, ge=1, le=MOST_SHOWN)
    offset: int = Field(default=0, ge=0, le=MOST_REACHED - MOST_SHOWN)
    min_score: float | None = Field(default=None, ge=-10, le=10)
    candidates: int | None = Field(default=None, ge=1, le=4096, description="Items that are scored exactly.")
    exact: bool = Field(default=False, description="The true best, with a proof.")
    by: By = Field(default="file", description="A hit is a file with its best moment, or every moment is.")
    unique: bool = Field(default=False, description="Fold near-copies into one hit.")
    explain: bool = Field(default=False, description="Tell what the increment changed.")

    def to_request(self, features: VideoFeatures | None) -> SearchRequest:
        """The request; `features` are those of the upload, if it names one."""
        terms = tuple(query_language.Term(term.text, term.weight) for term in self.terms)
        return SearchRequest(words=self.query, terms=terms, features=features, **_common(self))


class SearchQuery(Filters):
    """The same as `SearchBody`, for an address."""

    q: Text | None = Field(
        default=None, description="Words: `a dog`, `dog ^2 + snow -people`.", examples=["a cat looks up"]
    )
    unwanted: list[Text] = Field(default=[], max_length=16, description="Words that are not wanted.")
    like: ItemId | None = Field(default=None, description="Id of an item: what resembles it.")
    upload: ItemId | None = Field(default=None, description="Name of an upload that is still kept.")
    limit: int = Field(default=24, ge=1, le=MOST_SHOWN)
    offset: int = Field(default=0, ge=0, le=MOST_REACHED - MOST_SHOWN)
    min_score: float | None = Field(default=None, ge=-10, le=10)
    candidates: int | None = Field(default=None, ge=1, le=4096)
    exact: bool = Field(default=False, description="The true best, with a proof.")
    by: By = Field(default="file", description="A hit is a file with its best moment, or every moment is.")
    unique: bool = False
    explain: bool = False

    def to_request(self, features: VideoFeatures | None) -> SearchRequest:
        """The request; `features` are those of the upload, if it names one."""
        return SearchRequest(words=self.q, unwanted=tuple(self.unwanted), features=features, **_common(self))


class HeatQuery(BaseModel):
    """What to look for, as in a search."""

    model_config = ConfigDict(extra="forbid")
    q: Text | None = Field(default=None, description="Words.", examples=["a cat looks up"])
    unwanted: list[Text] = Field(default=[], max_length=16, description="Words that are not wanted.")
    like: ItemId | None = Field(default=None, description="Id of an item.")
    upload: ItemId | None = Field(default=None, description="Name of an upload that is still kept.")
    parts: int = Field(default=200, ge=1, le=MOST_PARTS, description="How many scores.")


def _common(asked: SearchBody | SearchQuery) -> dict[str, Any]:
    """The fields that have the same meaning in a body and in an address."""
    return {
        "like": asked.like,
        "where": asked.to_filter(),
        "top": asked.limit,
        "offset": asked.offset,
        "candidates": asked.candidates,
        "exact": asked.exact,
        "min_score": asked.min_score,
        "by": asked.by,
        "unique": asked.unique,
        "explain": asked.explain,
    }


class CaptionSearch(BaseModel):
    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"captions": ["a dog", "a rocket starts"], "top": 3}]}
    )
    captions: list[Caption] = Field(min_length=1, max_length=32)
    top: int = Field(default=5, ge=1, le=50)


class CaptionHits(BaseModel):
    caption: str
    hits: list[Hit]


class Captions(BaseModel):
    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"captions": ["a cat looks up", "a rocket starts"]}]}
    )
    captions: list[Caption] = Field(min_length=1, max_length=256)
    top: int = Field(default=10, ge=1, le=256)


class RankedCaption(BaseModel):
    caption: str
    score: float


class Folder(BaseModel):
    id: str
    path: str
    is_there: bool = Field(description="Whether it can be read now.")


class Failure(BaseModel):
    path: str
    kind: str
    message: str


class JobOrder(BaseModel):
    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"kind": "index"}]})
    kind: Literal["index", "audit", "change"] = "index"
    folder: ItemId | None = Field(default=None, description="Id of a folder; default: all of them.")
    retry_failed: bool = False
    model: Text | None = Field(
        default=None, description="For `change`: the model to change to, one of those at `/models`."
    )


class JobState(BaseModel):
    id: str
    kind: Literal["index", "audit", "change"]
    folders: list[str]
    retry_failed: bool
    model: str = Field(description="The model to change to; empty for other kinds.")
    state: Literal["running", "done", "cancelled", "interrupted", "failed"]
    done: int
    total: int | None
    failed: int
    path: str
    started: str
    finished: str | None
    resumed: bool
    message: str
    report: dict[str, Any] | None


class SetState(BaseModel):
    """The vectors that one model made of the library."""

    set: str = Field(description="Its name.")
    model: str
    fingerprint: str
    dim: int
    state: Literal["complete", "building", "leaving"]
    is_current: bool = Field(description="Whether searches use it.")
    num_items: int
    num_bytes: int | None = Field(description="Null where the store cannot tell.")


class AvailableModel(BaseModel):
    name: str
    dim: int | None
    languages: list[str] = Field(description="Codes of ISO 639-1, or `many`; empty where it is not known.")
    licence: str


class Models(BaseModel):
    sets: list[SetState]
    available: list[AvailableModel] = Field(
        description="Models on this machine that the library may change to, with a job of kind `change`."
    )


class ChosenSet(BaseModel):
    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"set": "0123456789abcdef"}]})
    set: ItemId


class Info(BaseModel):
    version: str
    library: str
    num_items: int
    num_videos: int = Field(description="Files; a film has many items.")
    seconds: float = Field(description="Of all videos.")
    model: str
    fingerprint: str
    dim: int
    num_frames: int
    candidates: int
    python: str
    torch: str
    device: str
    store_repairs: list[str]
    decoder_box: str
    """Which layers hold the processes that decode uploads, and why others do not."""


class Health(BaseModel):
    status: Literal["ok", "starting", "draining", "unavailable"]
    message: str = ""


class ErrorDetail(BaseModel):
    where: str
    message: str


class ErrorInside(BaseModel):
    code: str
    message: str
    status: int
    details: list[ErrorDetail]
    request_id: str


class Error(BaseModel):
    """Every error has this shape."""

    error: ErrorInside


def item_links(item_id: str, content: str) -> Links:
    base = f"/api/v1/items/{item_id}"
    return Links(
        video=f"{base}/video",
        thumbnail=f"{base}/thumbnail?v={content[:8]}",
        strip=f"{base}/strip?v={content[:8]}",
        page=f"/watch/{item_id}",
    )


def frame_address(item_id: str, content: str, time: float) -> str:
    """Where the frame of an item at a second is. It changes with the file, so that a browser may keep it."""
    return f"/api/v1/items/{item_id}/frame?time={time:.3f}&v={content[:8]}"


def make_item(row: dict[str, Any]) -> Item:
    return Item(
        id=row["id"],
        **_names(row["path"]),
        start=row["start"],
        end=row["end"],
        duration=row["file_duration"],
        width=row["width"],
        height=row["height"],
        modified=row["modified"].isoformat(timespec="seconds"),
        tags=row["tags"],
        links=item_links(row["id"], row["content"]),
    )


def make_hit(hit: SearchHit) -> Hit:
    why = hit.explanation
    return Hit(
        id=hit.id,
        **_names(hit.path),
        start=hit.start,
        end=hit.end,
        duration=hit.file_duration,
        width=hit.width,
        height=hit.height,
        modified=hit.modified,
        tags=list(hit.tags),
        links=item_links(hit.id, hit.content),
        score=hit.score,
        moment=hit.moment,
        picture=frame_address(hit.id, hit.content, hit.moment),
        others=[
            Moment(
                id=other.id,
                score=other.score,
                start=other.start,
                end=other.end,
                moment=other.moment,
                picture=frame_address(other.id, hit.content, other.moment),
            )
            for other in hit.others
        ],
        frames=[
            Frame(time=time, score=score, weight=weight)
            for time, score, weight in zip(hit.frame_times, hit.frame_scores, hit.frame_weights, strict=True)
        ],
        duplicates=list(hit.duplicates),
        explanation=None
        if why is None
        else Explanation(
            rank=why.rank,
            plain_rank=why.plain_rank,
            move=why.plain_rank - why.rank,
            plain_score=why.plain_score,
            radius=why.radius,
        ),
    )


def _names(path: str) -> dict[str, str]:
    pure = PurePosixPath(path)
    return {"path": path, "name": pure.name, "folder": str(pure.parent)}
