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
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from gare.errors import LibraryError, QueryError, TimeLimitError
from gare.library.library import Library
from gare.library.search.ranked_items import Ranking
from gare.library.search.search_hit import Hits
from gare.library.search.search_request import SearchRequest
from gare.library.search.searcher import Searcher
from gare.library.search.stage1 import DEFAULT_CANDIDATES
from gare.library.store.read_deadline import Deadline, current_deadline
from gare.serve.observability import LoggedProgress, Metrics
from gare.serve.problems import Problem, log_library_error
from gare.serve.serve_options import ServeOptions
from gare.types import TextFeatures

Result = TypeVar("Result")
_CANDIDATES_FOR_S = 5.0
_CLOSE_S = 10.0
_FOLLOW_S = 1.0
_FOLLOW_AGAIN_S = 30.0  # a model that cannot be loaded will not be there a second later
_log = logging.getLogger("gare.serve")


@dataclass(eq=False)
class _Task:
    work: SearchRequest | Callable[[], Any]
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop
    deadline: Deadline

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
    """Why the server cannot search; None while it can."""
    _waiting: deque[_Task] = field(default_factory=deque)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _is_closed: bool = False
    _is_loaded: bool = False
    _num_busy: int = 0
    _candidates: int = DEFAULT_CANDIDATES
    _candidates_read: float = float("-inf")

    def __post_init__(self) -> None:
        self._num_cores = torch.get_num_threads()
        self._closing = threading.Event()
        self._until_closed = Deadline()
        self._follower = threading.Thread(target=self._follow, name="gare-follow", daemon=True)
        self._threads = [
            threading.Thread(target=self._run, args=(number == 0,), name=f"gare-{number}", daemon=True)
            for number in range(2 * self._num_cores if self.options.max_batch > 1 else 1)
        ]  # twice the cores: whoever reads from the library or waits for the encoder needs none

    @property
    def is_ready(self) -> bool:
        """Whether the model is loaded and searches are answered."""
        return self._is_loaded and not self.problem

    def start(self) -> None:
        """Start the threads; the first one loads the model, another one looks whether it is changed."""
        self.library.is_followed = True
        for thread in (*self._threads, self._follower):
            thread.start()

    def close(self) -> None:
        """Refuse new searches and wait a little for the threads."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._closing.set()
        self._until_closed.cancel()
        deadline = time.monotonic() + _CLOSE_S
        for thread in (*self._threads, self._follower):
            if thread.is_alive():
                thread.join(timeout=max(0.0, deadline - time.monotonic()))

    async def search(self, request: SearchRequest) -> Hits:
        """The hits of one request, as soon as a thread has answered it."""
        hits: Hits = await self._submit(request)
        return hits

    async def call(self, function: Callable[[], Result]) -> Result:
        """Run something else that needs the model."""
        result: Result = await self._submit(function)
        return result

    async def _submit(self, work: SearchRequest | Callable[[], Any]) -> Any:
        loop = asyncio.get_running_loop()
        task = _Task(work, loop.create_future(), loop, current_deadline() or Deadline())
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
        try:
            return await task.future
        except asyncio.CancelledError:
            task.deadline.cancel()  # nobody waits: a thread that is at it stops
            with self._changed, suppress(ValueError):
                self._waiting.remove(task)  # nobody has it yet
            raise

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
                    self.metrics.searching.set(self._num_busy)

    def _load(self) -> None:
        try:
            self.library.searcher.encoder.texts.get(["a warm-up"])
        except Exception as error:
            self.problem = str(error) or type(error).__name__
            _log.error("model", extra={"fields": {"problem": str(error)}})
        with self._changed:
            self._is_loaded = True
            self._changed.notify_all()

    def _follow(self) -> None:
        """Take up a change of model: the new one is loaded here, while searches go on with the old one."""
        said, known = "", self.library.store
        self._warm_up()
        while not self._closing.wait(_FOLLOW_AGAIN_S if said else _FOLLOW_S):
            try:
                if self._is_loaded:
                    self.library.refresh()
                if self.library.store is not known:  # here, or by who went back from the page
                    known = self.library.store
                    self._took_up_a_model()
                said = ""
            except Exception as error:  # the old vectors are still there
                if said != str(error):
                    _log.error("model", extra={"fields": {"problem": f"not changed: {error}"}})
                said = str(error) or type(error).__name__

    def _warm_up(self) -> None:
        """Make ahead what exact searches keep in memory: the library on a GPU. The log says how far it is."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_loaded or self._is_closed)
        if not self.is_ready or self._is_closed:
            return
        try:
            proven = self.library.searcher.proven
            proven.on_progress = LoggedProgress("bounds of exact search")
            with self._until_closed.active():
                proven.warm_up()
        except TimeLimitError:  # the server is closed
            pass
        except LibraryError as error:  # an exact search will meet it again, and tell who asked
            log_library_error(error)

    def _took_up_a_model(self) -> None:
        self._candidates_read = float("-inf")
        if self.problem:
            self.problem = ""
            self._load()
        _log.info("model", extra={"fields": {"changed_to": self.library.store.stamp.name}})
        self._warm_up()

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
                and all(isinstance(task.work, SearchRequest) for task in (batch[0], self._waiting[0]))
            ):
                batch.append(self._waiting.popleft())
            self.metrics.waiting.set(len(self._waiting))
            self._num_busy += 1
            self.metrics.searching.set(self._num_busy)
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
        elif batch and not isinstance(batch[0].work, SearchRequest):
            with self.library.searcher.encoder.texts.encoding, batch[0].deadline.active():
                batch[0].finish(batch[0].work())
        elif batch:
            self._search([(task, task.work) for task in batch if isinstance(task.work, SearchRequest)])

    def _search(self, batch: Sequence[tuple[_Task, SearchRequest]], *, is_again: bool = False) -> None:
        """One failure is that search's own, unless it is of what they share: that is raised."""
        searcher = self.library.searcher
        failed: list[tuple[_Task, SearchRequest, Exception]] = []
        try:
            self._search_with(searcher, batch, failed, is_again=is_again)
        except Exception:
            if is_again or not self._was_changed(searcher):
                raise
            return self._search(batch, is_again=True)
        if failed and not is_again and self._was_changed(searcher):
            return self._search([(task, request) for task, request, _ in failed], is_again=True)
        for task, _, error in failed:
            task.finish(error=error)

    def _was_changed(self, searcher: Searcher) -> bool:
        """Whether the model was changed: its vectors may have been forgotten in the middle of a search."""
        with suppress(Exception):
            self.library.refresh()
        return self.library.searcher is not searcher

    def _search_with(
        self,
        searcher: Searcher,
        batch: Sequence[tuple[_Task, SearchRequest]],
        failed: list[tuple[_Task, SearchRequest, Exception]],
        *,
        is_again: bool,
    ) -> None:
        started = time.perf_counter()
        self.metrics.batch.observe(len(batch))
        rankings: list[tuple[_Task, SearchRequest, Ranking]] = []
        texts = self._encode(searcher, [request for _, request in batch])
        candidates = self._default_candidates()
        for task, request in batch:
            try:
                with task.deadline.active():
                    ranking = searcher.find(request, texts=texts, default_candidates=candidates)
                rankings.append((task, request, ranking))
            except (QueryError, TimeLimitError) as error:
                if request.like is not None and not is_again and self._was_changed(searcher):
                    failed.append((task, request, error))  # the item is there, among other vectors
                else:
                    task.finish(error=error)
            except Exception as error:
                failed.append((task, request, error))
        shown = searcher.show([ranking for _, _, ranking in rankings])
        # First counted, then answered: whoever has an answer finds it in the numbers.
        self.metrics.search_seconds.observe(time.perf_counter() - started)
        for (task, request, ranking), hits in zip(rankings, shown, strict=True):
            has_lost = not hits or len(hits) < len(ranking.choices)  # items that were there a moment ago
            if has_lost and not is_again and self._was_changed(searcher):
                failed.append((task, request, LibraryError("these vectors are gone")))
            else:
                task.finish(hits)

    def _encode(self, searcher: Searcher, requests: Sequence[SearchRequest]) -> dict[str, TextFeatures]:
        """Every text of the batch, and in the same call of the encoder what is asked next."""

        def ahead() -> list[str]:
            with self._changed:
                return _texts_of(task.work for task in self._waiting if isinstance(task.work, SearchRequest))

        return searcher.encoder.texts.get(_texts_of(requests), ahead=ahead, at_once=self.options.max_batch)

    def _default_candidates(self) -> int:
        """What the library says, as of a few seconds ago: an audit is rare, and the note has to be read."""
        now = time.monotonic()
        if now - self._candidates_read > _CANDIDATES_FOR_S:
            self._candidates, self._candidates_read = self.library.default_candidates, now
        return self._candidates


def _texts_of(requests: Iterable[SearchRequest]) -> list[str]:
    return [term.text for request in requests for term in request.all_terms]
