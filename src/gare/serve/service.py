"""What the routes share: the library and everything that works on it."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from anyio import to_thread
from starlette.requests import Request

from gare.library.filters import And, DurationBetween, Filter, InFolder, ModifiedBetween, parse_filter
from gare.library.library import Library
from gare.library.query import Term, parse_query
from gare.library.search import SearchHit
from gare.serve import schemas
from gare.serve.batching import Engine, Search
from gare.serve.jobs import Jobs
from gare.serve.metrics import Metrics
from gare.serve.options import ServeOptions
from gare.serve.problems import Problem
from gare.serve.uploads import Uploads

_ITEM_COLUMNS = ["id", "path", "start", "end", "width", "height", "modified", "tags", "content"]
_FOLDERS_FOR_S = 20.0
_COUNT_FOR_S = 1.0


@dataclass
class Service:
    library: Library
    options: ServeOptions
    metrics: Metrics
    engine: Engine
    model_name: str | None = None
    _count: int = 0
    _counted_at: float = float("-inf")

    @cached_property
    def uploads(self) -> Uploads:
        return Uploads(self.engine, self.options, self.metrics)

    @cached_property
    def jobs(self) -> Jobs:
        return Jobs(self.library, self.model_name, self.options, self.metrics)

    @cached_property
    def folder_list(self) -> FolderList:
        return FolderList(self.library)

    # --- searching ------------------------------------------------------------------------------------------

    async def search(self, body: schemas.SearchBody, *, more: tuple[Term, ...] = ()) -> schemas.Results:
        """A page of hits; `more` are further terms, such as the negative chips of the page."""
        started = time.perf_counter()
        search = self._make_search(body, more)
        hits = await self.engine.search(search)
        shown = hits[body.offset : body.offset + body.limit]
        reached = body.offset + body.limit
        return schemas.Results(
            hits=[schemas.make_hit(hit) for hit in shown],
            offset=body.offset,
            next_offset=reached if len(hits) > reached and reached <= _LAST_OFFSET else None,
            library_size=await self.count(),
            took_ms=round(1000 * (time.perf_counter() - started), 2),
            upload=body.upload,
        )

    def _make_search(self, body: schemas.SearchBody, more: tuple[Term, ...]) -> Search:
        given = [body.query is not None, bool(body.terms), body.like is not None, body.upload is not None]
        if sum(given) != 1:
            raise Problem(422, "bad_query", "search for one thing: query, terms, like or upload")
        if more and body.query is None:
            raise Problem(422, "bad_query", "unwanted words go with a query; pictures and items have none")
        terms: tuple[Term, ...] = ()
        if body.query is not None:
            terms = (*parse_query(body.query), *more)
        elif body.terms:
            terms = (*(Term(term.text, term.weight) for term in body.terms if term.weight), *more)
            if not any(term.weight > 0 for term in terms):
                raise Problem(422, "bad_query", "only says what is not wanted; say what is, too")
        for term in terms:
            check_text(term.text)
        return Search(
            terms=terms,
            video=self.uploads.get(body.upload).features if body.upload is not None else None,
            like=body.like,
            top=body.offset + body.limit + 1,
            where=make_filter(body),
            min_score=body.min_score,
            unique=body.unique,
            explain=body.explain,
            candidates=body.candidates,
        )

    async def find(self, body: schemas.SearchBody, more: tuple[Term, ...], item_id: str) -> SearchHit | None:
        """An item among the hits of a search, with its explanation. Most are near the top."""
        for limit in (schemas.MOST_SHOWN, schemas.MOST_REACHED):
            wide = body.model_copy(update={"offset": 0, "limit": limit, "explain": True})
            hits = await self.engine.search(self._make_search(wide, more))
            hit = next((hit for hit in hits if hit.id == item_id), None)
            if hit is not None or len(hits) <= limit:
                return hit
        return None

    async def count(self) -> int:
        """Items of the library, as of a second ago: a database counts row by row."""
        now = time.monotonic()
        if now - self._counted_at > _COUNT_FOR_S:
            self._count = await to_thread.run_sync(self.library.__len__)
            self._counted_at = now
        return self._count

    # --- contents -------------------------------------------------------------------------------------------

    def newest(self, where: Filter | None, offset: int, limit: int) -> tuple[list[dict[str, Any]], int]:
        """Items by the day they were added, the newest first, and how many there are."""
        import pyarrow as pa

        batches = list(self.library.store.scan(where=where, columns=["id", "added"]))
        if not batches:
            return [], 0
        table = pa.Table.from_batches(batches)
        ordered = table.sort_by([("added", "descending"), ("id", "ascending")])
        ids = ordered["id"].slice(offset, limit).to_pylist()
        rows: list[dict[str, Any]] = self.library.store.fetch(ids, _ITEM_COLUMNS).to_pylist() if ids else []
        return rows, table.num_rows

    def item(self, item_id: str) -> dict[str, Any]:
        row = self.library.get(item_id)
        if row is None:
            raise Problem(404, "no_such_item", f"there is no item '{item_id}' in this library")
        return row

    def picture(self, item_id: str, column: str) -> bytes:
        rows = self.library.store.fetch([item_id], [column])
        if not len(rows):
            raise Problem(404, "no_such_item", f"there is no item '{item_id}' in this library")
        content: bytes = rows[column][0].as_py()
        return content

    def folders(self) -> list[schemas.Folder]:
        """What may be indexed: named when the server was started, or part of the library already."""
        paths = dict.fromkeys([*map(os.path.abspath, self.options.folders), *self.library.folders])
        return [
            schemas.Folder(id=folder_id(path), path=path, is_there=os.path.exists(path)) for path in paths
        ]


_LAST_OFFSET = schemas.MOST_REACHED - schemas.MOST_SHOWN


async def get_service(request: Request) -> Service:  # a plain function would be sent to another thread
    service: Service = request.app.state.service
    return service


def folder_id(path: str) -> str:
    return hashlib.blake2b(path.encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()


def make_filter(filters: schemas.Filters) -> Filter | None:
    parts: list[Filter] = []
    if filters.where and filters.where.strip():
        parts.append(parse_filter(filters.where))
    if filters.folder:
        check_text(filters.folder)
        parts.append(InFolder(filters.folder))
    if filters.shortest is not None or filters.longest is not None:
        parts.append(DurationBetween(filters.shortest, filters.longest))
    if filters.after is not None or filters.before is not None:
        parts.append(ModifiedBetween(filters.after, filters.before))
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else And(tuple(parts))


def check_text(text: str) -> None:
    """Refuse what no text can contain: it would fail deep inside a tokeniser or a database."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Problem(422, "bad_text", "characters that no text can contain") from None
    if "\0" in text:
        raise Problem(422, "bad_text", "characters that no text can contain")


class FolderList:
    """The folders that hold items, for the filter of the page. Read again when it is old."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._mutex = threading.Lock()
        self._read_at = -_FOLDERS_FOR_S
        self._folders: list[tuple[str, int]] = []

    def get(self) -> list[tuple[str, int]]:
        """Path and number of items, by path."""
        with self._mutex:
            if time.monotonic() - self._read_at > _FOLDERS_FOR_S:
                counts: dict[str, int] = {}
                for batch in self._library.store.scan(columns=["path"]):
                    for path in batch.column("path").to_pylist():
                        folder = path.rpartition("/")[0] or "/"
                        counts[folder] = counts.get(folder, 0) + 1
                self._folders = sorted(counts.items())
                self._read_at = time.monotonic()
            return self._folders

    def forget(self) -> None:
        self._read_at = -_FOLDERS_FOR_S
