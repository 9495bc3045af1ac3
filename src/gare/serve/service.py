"""What the routes share: the library and everything that works on it.

A route asks for it in its signature: `service: SharedService`, or `library: SharedLibrary` for the library
alone. The same works for a route that someone else adds to the app.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, TypeVar

from anyio import to_thread
from fastapi import Depends
from starlette.requests import Request

from gare.errors import LibraryError
from gare.library.filters import Filter
from gare.library.library import Library
from gare.library.search.file_heat import file_heat, frame_scores
from gare.library.search.search_hit import Hits, SearchHit
from gare.library.search.search_request import SearchRequest, StaleFeaturesError
from gare.library.store.read_deadline import checked
from gare.library.store.row_checksums import damaged_frame_columns
from gare.library.store.stored_pictures import picture_at, split_pictures
from gare.serve import api_schemas as schemas
from gare.serve.batching import Engine
from gare.serve.clips import Clips
from gare.serve.content_check import ContentChecks
from gare.serve.index_jobs import Jobs
from gare.serve.library_contents import Contents, ContentsList
from gare.serve.observability import Metrics
from gare.serve.problems import Problem
from gare.serve.serve_options import ServeOptions
from gare.serve.uploads import Uploads
from gare.types import VideoFeatures

Result = TypeVar("Result")
_log = logging.getLogger("gare.serve")
_ITEM_COLUMNS = [
    "id",
    "path",
    "start",
    "end",
    "file_duration",
    "width",
    "height",
    "modified",
    "tags",
    "content",
]
_COUNT_FOR_S = 1.0


@dataclass
class Service:
    """A library, and what a server does with it: searches in batches, uploads, jobs."""

    library: Library
    options: ServeOptions
    metrics: Metrics
    engine: Engine
    model_name: str | None = None
    is_draining: bool = False
    """It was asked to end: it still answers, but whoever can should ask another server."""
    _count: int = 0
    _counted_at: float = float("-inf")

    @cached_property
    def uploads(self) -> Uploads:
        """Pictures and clips that people search with."""
        return Uploads(self.engine, self.options, self.metrics)

    @cached_property
    def clips(self) -> Clips:
        """Parts of videos that people take along."""
        return Clips(self.options, self.metrics)

    @cached_property
    def jobs(self) -> Jobs:
        """Indexing and audits started from the page."""
        return Jobs(self.library, self.model_name, self.options, self.metrics)

    @cached_property
    def content_checks(self) -> ContentChecks:
        """Whether files are still those that were indexed."""
        return ContentChecks()

    @cached_property
    def contents_list(self) -> ContentsList:
        """What the page says about the library."""
        return ContentsList(self.library)

    @property
    def is_ready(self) -> bool:
        """Whether it can search, and will still be here a moment later."""
        return self.engine.is_ready and not self.is_draining

    def check_writable(self) -> None:
        """Refuse to change the library on one of several servers."""
        if self.options.is_replica:
            raise Problem(
                409, "replica", "this server is one of several that only search; change the library with gare"
            )

    # --- searching ------------------------------------------------------------------------------------------

    async def search(self, request: SearchRequest, *, upload: str | None = None) -> schemas.Results:
        """A page of hits; `upload` is the name of what was searched with, for later searches."""
        started = time.perf_counter()
        one_more = replace(request, top=request.top + 1)  # is there a next page?
        hits = await self.hits(one_more, upload=upload)
        has_more = len(hits) > request.top and request.reach <= _LAST_OFFSET
        return schemas.Results(
            hits=[schemas.make_hit(hit) for hit in hits[: request.top]],
            offset=request.offset,
            next_offset=request.reach if has_more else None,
            library_size=await self.count(),
            certificate=None if hits.certificate is None else schemas.Certificate(**vars(hits.certificate)),
            partial=hits.partial,
            missing=list(hits.missing),
            took_ms=round(1000 * (time.perf_counter() - started), 2),
            upload=upload,
            notices=[*self.library.searcher.notices(request), *_notice_of(hits)],
        )

    async def hits(self, request: SearchRequest, *, upload: str | None = None) -> Hits:
        """The hits alone."""
        with self._fresh(request, upload) as known:
            return await self.engine.search(known)

    async def heat(
        self, request: SearchRequest, item: dict[str, Any], num_parts: int, *, upload: str | None = None
    ) -> schemas.Heat:
        """How well every part of an item's file matches."""
        path, duration = item["path"], item["file_duration"]
        with self._fresh(request, upload) as known:
            scores = await self.engine.call(
                lambda: file_heat(self.library.searcher, known, path, duration, num_parts)
            )
        return schemas.Heat(duration=duration, step=duration / num_parts, scores=scores)

    async def frame_scores(
        self, request: SearchRequest, item_id: str, *, upload: str | None = None
    ) -> list[float]:
        """How well each frame that is stored with an item matches."""
        with self._fresh(request, upload) as known:
            return await self.engine.call(lambda: frame_scores(self.library.searcher, known, item_id))

    @contextmanager
    def _fresh(self, request: SearchRequest, upload: str | None) -> Iterator[SearchRequest]:
        """The request with the model of its upload; a problem, if the library has another by now."""
        try:
            yield request if upload is None else replace(request, made_by=self.uploads.get(upload).made_by)
        except StaleFeaturesError as error:
            raise Problem(410, "upload_gone", f"{error}; drop it again") from None

    async def find(
        self, request: SearchRequest, item_id: str, *, upload: str | None = None
    ) -> SearchHit | None:
        """The hit of a search that an item is, or another moment of. Most are near the top."""
        for most in (schemas.MOST_SHOWN, schemas.MOST_REACHED):
            hits = await self.hits(replace(request, offset=0, top=most + 1, explain=True), upload=upload)
            hit = next((hit for hit in hits if item_id in hit.moment_ids), None)
            if hit is not None or len(hits) <= most:
                return hit
        return None

    def features(self, upload: str | None) -> VideoFeatures | None:
        """The frame vectors of an upload that is still kept; None for no upload."""
        return None if upload is None else self.uploads.get(upload).features

    async def count(self) -> int:
        """Items of the library, as of a second ago: a database counts row by row."""
        now = time.monotonic()
        if now - self._counted_at > _COUNT_FOR_S:
            self._count = await to_thread.run_sync(self.library.__len__)
            self._counted_at = now
        return self._count

    async def contents(self) -> Contents:
        """How many videos and hours there are, and in which folders."""
        return await to_thread.run_sync(self.contents_list.get, await self.count())

    # --- contents -------------------------------------------------------------------------------------------

    def newest_videos(self, where: Filter | None, limit: int) -> list[dict[str, Any]]:
        """The files that were added last, each by the item that it begins with."""
        import pyarrow as pa
        import pyarrow.compute as pc

        columns = ["id", "added", "path", "start", "end"]
        batches = list(checked(self.library.store.scan(where=where, columns=columns)))
        if not batches:
            return []
        table = pa.Table.from_batches(batches)
        files = table.group_by("path").aggregate([("added", "max")])
        newest = files.sort_by([("added_max", "descending"), ("path", "ascending")])["path"][:limit]
        some = table.filter(pc.is_in(table["path"], value_set=newest.combine_chunks()))
        some = some.sort_by([("start", "descending"), ("end", "ascending")])
        first = dict(zip(some["path"].to_pylist(), some["id"].to_pylist(), strict=True))  # the last one stays
        ids = [first[path] for path in newest.to_pylist()]
        rows = {row["id"]: row for row in self.library.store.fetch(ids, _ITEM_COLUMNS).to_pylist()}
        return [rows[item] for item in ids if item in rows]

    def newest(self, where: Filter | None, offset: int, limit: int) -> tuple[list[dict[str, Any]], int]:
        """Items by the day they were added, the newest first, and how many there are."""
        import pyarrow as pa

        batches = list(checked(self.library.store.scan(where=where, columns=["id", "added"])))
        if not batches:
            return [], 0
        table = pa.Table.from_batches(batches)
        ordered = table.sort_by([("added", "descending"), ("id", "ascending")])
        ids = ordered["id"].slice(offset, limit).to_pylist()
        rows: list[dict[str, Any]] = self.library.store.fetch(ids, _ITEM_COLUMNS).to_pylist() if ids else []
        return rows, table.num_rows

    def item(self, item_id: str) -> dict[str, Any]:
        """An item as a row of plain values; 404 if there is none."""
        row = self._read(lambda: self.library.get(item_id))
        if row is None:
            raise Problem(404, "no_such_item", f"there is no item '{item_id}' in this library")
        return row

    def _read(self, read: Callable[[], Result | None]) -> Result | None:
        """Read something; again, if it was read from vectors that were forgotten meanwhile."""
        store = self.library.store
        try:
            found = read()
        except (LibraryError, OSError, ValueError):
            self.library.refresh()
            if self.library.store is store:
                raise
            return read()
        if found is None:
            self.library.refresh()
            return read() if self.library.store is not store else None
        return found

    def thumbnail(self, item_id: str) -> bytes:
        """JPEG of the frame that shows most."""
        return split_pictures(self._pictures(item_id, "thumbnail")["thumbnail"])[0]

    def frame(self, item_id: str, time: float) -> bytes:
        """JPEG of the frame that is on screen at a time, among those that are stored with the item."""
        row = self._pictures(item_id, "thumbnail", "times")
        return picture_at(row["thumbnail"], row["times"], time)

    def strip(self, item_id: str) -> bytes:
        """JPEG of the frames that are stored with the item, side by side."""
        strip: bytes = self._pictures(item_id, "strip")["strip"]
        return strip

    def _pictures(self, item_id: str, *columns: str) -> dict[str, Any]:
        """Columns of an item; 404 if there is none, or if they are damaged."""

        def read() -> dict[str, Any] | None:
            rows = self.library.store.fetch([item_id], ["frames_key", *columns]).to_pylist()
            return rows[0] if rows else None

        row = self._read(read)
        if row is None:
            raise Problem(404, "no_such_item", f"there is no item '{item_id}' in this library")
        if damaged := damaged_frame_columns(row["frames_key"], row):
            message = f"the {damaged[0]} of item '{item_id}' is damaged; 'gare check --repair' makes it anew"
            _log.warning(message)
            raise Problem(404, "damaged", message)
        if not all(row[name] for name in columns):
            raise Problem(404, "no_picture", f"item '{item_id}' has no pictures: only its vectors were added")
        return row

    def folders(self) -> list[schemas.Folder]:
        """What may be indexed: named when the server was started, or part of the library already."""
        paths = dict.fromkeys([*map(os.path.abspath, self.options.folders), *self.library.folders])
        return [
            schemas.Folder(id=folder_id(path), path=path, is_there=os.path.exists(path)) for path in paths
        ]


_LAST_OFFSET = schemas.MOST_REACHED - schemas.MOST_SHOWN


def _notice_of(hits: Hits) -> list[str]:
    if not hits.partial:
        return []
    ranges = ", ".join(hits.missing)
    return [f"These hits are not complete: shards did not answer ({ranges}). Search again in a minute."]


async def get_service(request: Request) -> Service:  # a plain function would be sent to another thread
    """The service of the app that a request came to."""
    service: Service = request.app.state.service
    return service


async def get_library(request: Request) -> Library:
    """The library of the app that a request came to. What needs its model goes through `Service.engine`."""
    return (await get_service(request)).library


SharedService = Annotated[Service, Depends(get_service)]
SharedLibrary = Annotated[Library, Depends(get_library)]


def folder_id(path: str) -> str:
    """A short name for a folder, to be used in addresses."""
    return hashlib.blake2b(path.encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()
