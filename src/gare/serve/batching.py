"""Searches of many people, answered together.

Nobody waits for a batch to fill: what came in while the last batch was computed is the next one. A single
client is answered at once; a crowd shares one call of the encoder, and all cores.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from gare.library.filters import Filter
from gare.library.library import Library
from gare.library.query import Term
from gare.library.search import DEFAULT_CANDIDATES, Found, Probe, SearchHit, SearchRules
from gare.serve.metrics import Metrics
from gare.serve.options import ServeOptions
from gare.serve.problems import Problem
from gare.types import TextFeatures, VideoFeatures

Result = TypeVar("Result")
_CACHED_TEXTS = 1024
_log = logging.getLogger("gare.serve")


@dataclass(frozen=True)
class Search:
    """What to look for (one of the three), and among what."""

    terms: tuple[Term, ...] = ()
    video: VideoFeatures | None = None
    like: str | None = None
    top: int = 24
    where: Filter | None = None
    min_score: float | None = None
    unique: bool = False
    explain: bool = False
    candidates: int | None = None


@dataclass
class _Task:
    work: Search | Callable[[], Any]
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        self.loop.call_soon_threadsafe(self._set, result, error)

    def _set(self, result: Any, error: BaseException | None) -> None:
        if self.future.done():
            return  # nobody waits any more
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


@dataclass
class Engine:
    """The thread that takes searches from the queue. Everything that needs the model goes through it."""

    library: Library
    options: ServeOptions
    metrics: Metrics
    problem: str = ""
    """Why it cannot search, when it cannot."""
    _waiting: deque[_Task] = field(default_factory=deque)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _is_closed: bool = False
    _is_ready: bool = False
    _texts: dict[str, TextFeatures] = field(default_factory=dict)
    _candidates: int = DEFAULT_CANDIDATES

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name="gare-engine", daemon=True)
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="gare-search")

    @property
    def is_ready(self) -> bool:
        return self._is_ready

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout=10)
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def search(self, search: Search) -> list[SearchHit]:
        hits: list[SearchHit] = await self._submit(search)
        return hits

    async def call(self, function: Callable[[], Result]) -> Result:
        """Run something else that needs the model."""
        result: Result = await self._submit(function)
        return result

    async def _submit(self, work: Search | Callable[[], Any]) -> Any:
        loop = asyncio.get_running_loop()
        task = _Task(work, loop.create_future(), loop)
        with self._changed:
            if self.problem:
                raise Problem(503, "not_ready", self.problem, retry_after=30)
            if self._is_closed:
                raise Problem(503, "closing", "the server is shutting down", retry_after=5)
            if len(self._waiting) >= self.options.max_waiting:
                self.metrics.refused.labels("searches").inc()
                raise Problem(503, "busy", "too many searches at once; try again in a second", retry_after=1)
            self._waiting.append(task)
            self.metrics.waiting.set(len(self._waiting))
            self._changed.notify()
        return await task.future

    # --- in the thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self.library.searcher.text_probe([Term("a warm-up")])
        except Exception as error:
            self.problem = str(error)
            _log.error("model", extra={"fields": {"problem": str(error)}})
        self._is_ready = not self.problem
        while (batch := self._take()) is not None:
            if self.problem:
                for task in batch:
                    task.finish(error=Problem(503, "not_ready", self.problem, retry_after=30))
                continue
            self._answer([task for task in batch if not task.future.cancelled()])

    def _take(self) -> list[_Task] | None:
        """The next searches, at most a batch; anything else comes alone."""
        with self._changed:
            while not self._waiting:
                if self._is_closed:
                    return None
                self._changed.wait()
            batch = [self._waiting.popleft()]
            while (
                self._waiting
                and len(batch) < self.options.max_batch
                and all(isinstance(task.work, Search) for task in (batch[0], self._waiting[0]))
            ):
                batch.append(self._waiting.popleft())
            self.metrics.waiting.set(len(self._waiting))
            return batch

    def _answer(self, batch: Sequence[_Task]) -> None:
        if not batch:
            return
        if not isinstance(batch[0].work, Search):
            return _finish(batch[0], batch[0].work)
        started = time.perf_counter()
        self.metrics.batch.observe(len(batch))
        searches = [task.work for task in batch if isinstance(task.work, Search)]
        try:
            self._encode(searches)
            self._candidates = self.library.default_candidates
        except Exception as error:
            for task in batch:
                task.finish(error=error)
            return
        found = list(self._pool.map(self._find, batch)) if len(batch) > 1 else [self._find(batch[0])]
        answered = [(task, items) for task, items in zip(batch, found, strict=True) if items is not None]
        try:
            shown = self.library.searcher.show([items for _, items in answered])
        except Exception as error:
            for task, _ in answered:
                task.finish(error=error)
            return
        for (task, _), hits in zip(answered, shown, strict=True):
            task.finish(hits)
        self.metrics.search_seconds.observe(time.perf_counter() - started)

    def _find(self, task: _Task) -> list[Found] | None:
        """None when it failed: whoever asked has been told."""
        assert isinstance(task.work, Search)
        try:
            return self._search(task.work)
        except Exception as error:
            task.finish(error=error)
            return None

    def _encode(self, searches: Sequence[Search]) -> None:
        """Every text of the batch that is new, in one call of the encoder."""
        wanted = dict.fromkeys(term.text for search in searches for term in search.terms)
        texts = [text for text in wanted if text not in self._texts]
        if texts:
            features = self.library.model.encode_text(texts)
            for row, text in enumerate(texts):
                self._texts[text] = _row(features, row)
        num_over = max(0, len(self._texts) - _CACHED_TEXTS)
        for text in [text for text in self._texts if text not in wanted][:num_over]:
            del self._texts[text]

    def _search(self, search: Search) -> list[Found]:
        probe, skip = self._probe(search)
        rules = SearchRules(
            top=search.top,
            candidates=search.candidates or self._candidates,
            where=search.where,
            min_score=search.min_score,
            unique=search.unique,
            explain=search.explain,
            skip=skip,
        )
        return self.library.searcher.find(probe, rules)

    def _probe(self, search: Search) -> tuple[Probe, frozenset[str]]:
        searcher = self.library.searcher
        if search.terms:
            text = _joined([self._texts[term.text] for term in search.terms])
            return searcher.text_probe(search.terms, text), frozenset()
        video = search.video if search.video is not None else self.library.features(like=search.like)
        return searcher.video_probe(video), frozenset([search.like] if search.like else [])


def _finish(task: _Task, function: Callable[[], Any]) -> None:
    try:
        task.finish(function())
    except Exception as error:
        task.finish(error=error)


def _row(features: TextFeatures, row: int) -> TextFeatures:
    """One text without the padding that its batch mates made necessary."""
    length = int(features.mask_TW[row].nonzero().max()) + 1
    return TextFeatures(
        features.text_TD[row : row + 1].clone(),
        features.words_TWD[row : row + 1, :length].clone(),
        features.mask_TW[row : row + 1, :length].clone(),
    )


def _joined(rows: Sequence[TextFeatures]) -> TextFeatures:
    width = max(row.mask_TW.shape[1] for row in rows)
    padded = [torch.nn.functional.pad(row.words_TWD, (0, 0, 0, width - row.mask_TW.shape[1])) for row in rows]
    masks = [torch.nn.functional.pad(row.mask_TW, (0, width - row.mask_TW.shape[1])) for row in rows]
    return TextFeatures(torch.cat([row.text_TD for row in rows]), torch.cat(padded), torch.cat(masks))
