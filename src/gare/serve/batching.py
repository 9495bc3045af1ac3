"""Searches of many people, answered together.

Nobody waits for a batch to fill: what came in while the last one was computed is the next. A single client is
answered at once, with all cores; a crowd is shared out among as many threads, and each of them encodes its
share in one call and reads what is shown of it in one go.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from gare.library.filters import Filter
from gare.library.library import Library
from gare.library.query import Term
from gare.library.search import DEFAULT_CANDIDATES, Found, SearchHit, SearchRules
from gare.serve.metrics import Metrics
from gare.serve.options import ServeOptions
from gare.serve.problems import Problem
from gare.types import TextFeatures, VideoFeatures

Result = TypeVar("Result")
_CACHED_TEXTS = 1024
_CANDIDATES_FOR_S = 5.0
_CLOSE_S = 10.0
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
        with suppress(RuntimeError):  # the loop has ended, and with it whoever waited
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
    """The threads that take searches from the queue. Everything that needs the model goes through them."""

    library: Library
    options: ServeOptions
    metrics: Metrics
    problem: str = ""
    """Why it cannot search, when it cannot."""
    _waiting: deque[_Task] = field(default_factory=deque)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _is_closed: bool = False
    _is_loaded: bool = False
    _num_busy: int = 0
    _encoding: threading.Lock = field(default_factory=threading.Lock)
    """Tokenisers are not made for two threads."""
    _texts: dict[str, TextFeatures] = field(default_factory=dict)
    _candidates: int = DEFAULT_CANDIDATES
    _candidates_read: float = float("-inf")

    def __post_init__(self) -> None:
        self._num_cores = torch.get_num_threads()
        self._threads = [
            threading.Thread(target=self._run, args=(number == 0,), name=f"gare-{number}", daemon=True)
            for number in range(2 * self._num_cores if self.options.max_batch > 1 else 1)
        ]  # twice the cores: whoever reads from the library or waits for the encoder needs none

    @property
    def is_ready(self) -> bool:
        return self._is_loaded and not self.problem

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=max(0.0, deadline - time.monotonic()))

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
            self._changed.notify_all()
        return await task.future

    # --- in the threads -------------------------------------------------------------------------------------

    def _run(self, is_first: bool) -> None:
        if is_first:
            self._load()
        while (batch := self._take(is_first)) is not None:
            try:
                self._answer([task for task in batch if not task.future.cancelled()])
            except Exception as error:  # here, for all of it: a thread that ends would leave people waiting
                for task in batch:
                    task.finish(error=error)
            finally:
                with self._changed:
                    self._num_busy -= 1

    def _load(self) -> None:
        try:
            self.library.searcher.text_probe([Term("a warm-up")])
        except Exception as error:
            self.problem = str(error) or type(error).__name__
            _log.error("model", extra={"fields": {"problem": str(error)}})
        with self._changed:
            self._is_loaded = True
            self._changed.notify_all()

    def _take(self, is_first: bool) -> list[_Task] | None:
        """The next searches, this thread's share of them and at most a batch; anything else comes alone.

        A single client is always answered by the first thread, whose caches are warm.
        """
        with self._changed:
            while not (self._is_loaded and self._waiting and (is_first or self._num_busy)):
                if self._is_closed:
                    return None
                self._changed.wait()
            share = min(self.options.max_batch, math.ceil(len(self._waiting) / self._num_cores))
            batch = [self._waiting.popleft()]
            while (
                self._waiting
                and len(batch) < share
                and all(isinstance(task.work, Search) for task in (batch[0], self._waiting[0]))
            ):
                batch.append(self._waiting.popleft())
            self.metrics.waiting.set(len(self._waiting))
            self._num_busy += 1
            if self._waiting:
                self._changed.notify_all()
            # Alone it may have every core; matrix products on all of them at once get in each other's way.
            is_alone = len(self._threads) == 1 or (self._num_busy == 1 and not self._waiting)
            torch.set_num_threads(self._num_cores if is_alone else 1)
            return batch

    def _answer(self, batch: Sequence[_Task]) -> None:
        if self.problem:
            for task in batch:
                task.finish(error=Problem(503, "not_ready", self.problem, retry_after=30))
        elif batch and not isinstance(batch[0].work, Search):
            with self._encoding:
                batch[0].finish(batch[0].work())
        elif batch:
            self._search([(task, task.work) for task in batch if isinstance(task.work, Search)])

    def _search(self, batch: Sequence[tuple[_Task, Search]]) -> None:
        """One failure is that search's own, unless it is of what they share: that is raised."""
        started = time.perf_counter()
        self.metrics.batch.observe(len(batch))
        found: list[tuple[_Task, list[Found]]] = []
        texts = self._encode([search for _, search in batch])
        candidates = self._default_candidates()
        for task, search in batch:
            try:
                found.append((task, self._find(search, texts, candidates)))
            except Exception as error:
                task.finish(error=error)
        shown = self.library.searcher.show([items for _, items in found])
        for (task, _), hits in zip(found, shown, strict=True):
            task.finish(hits)
        self.metrics.search_seconds.observe(time.perf_counter() - started)

    def _encode(self, searches: Sequence[Search]) -> dict[str, TextFeatures]:
        """Every text of the batch, and in the same call of the encoder what is asked next."""
        wanted = _texts_of(searches)
        found = {text: known for text in wanted if (known := self._texts.get(text)) is not None}
        if len(found) == len(wanted):
            return found  # without waiting for whoever has the encoder, with a clip maybe
        with self._encoding:
            texts = [text for text in wanted if text not in self._texts]
            if texts:
                with self._changed:
                    ahead = _texts_of(task.work for task in self._waiting if isinstance(task.work, Search))
                more = [text for text in ahead if text not in self._texts and text not in wanted]
                texts += more[: max(0, self.options.max_batch - len(texts))]
                features = self.library.model.encode_text(texts)
                for row, text in enumerate(texts):
                    self._texts[text] = _row(features, row)
            num_over = max(0, len(self._texts) - _CACHED_TEXTS)
            for text in [text for text in self._texts if text not in wanted][:num_over]:
                del self._texts[text]
            return {text: self._texts[text] for text in wanted}

    def _default_candidates(self) -> int:
        """What the library says, as of a few seconds ago: an audit is rare, and the note has to be read."""
        now = time.monotonic()
        if now - self._candidates_read > _CANDIDATES_FOR_S:
            self._candidates, self._candidates_read = self.library.default_candidates, now
        return self._candidates

    def _find(self, search: Search, texts: Mapping[str, TextFeatures], candidates: int) -> list[Found]:
        searcher = self.library.searcher
        skip: frozenset[str] = frozenset()
        if search.terms:
            text = _joined([texts[term.text] for term in search.terms])
            probe = searcher.text_probe(search.terms, text)
        else:
            video = search.video if search.video is not None else self.library.features(like=search.like)
            probe = searcher.video_probe(video)
            skip = frozenset([search.like] if search.like else [])
        rules = SearchRules(
            top=search.top,
            candidates=search.candidates or candidates,
            where=search.where,
            min_score=search.min_score,
            unique=search.unique,
            explain=search.explain,
            skip=skip,
        )
        return searcher.find(probe, rules)


def _texts_of(searches: Iterable[Search]) -> dict[str, None]:
    return dict.fromkeys(term.text for search in searches for term in search.terms)


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
