"""Hashes of many files, computed a few files ahead in threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from threading import Event

from gare.library.content import hash_file
from gare.library.walk import FoundFile

_NUM_THREADS = 2
_AHEAD = 16


class HashQueue:
    """Gives files with their hash in the order they are ready: a huge file does not hold up small ones."""

    def __init__(self, files: Iterable[FoundFile]) -> None:
        self._waiting = deque(files)
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="gare-hash")
        self._running: dict[Future[str], FoundFile] = {}
        self._closed = Event()
        self._fill()

    def __bool__(self) -> bool:
        """Whether there is more to come."""
        return bool(self._running or self._waiting)

    def next(self, timeout: float) -> tuple[FoundFile, str | OSError] | None:
        """A file and its hash, or why it cannot be read; None when none is ready in time."""
        done = wait(self._running, timeout=timeout, return_when=FIRST_COMPLETED).done
        if not done:
            return None
        future = next(iter(done))
        file = self._running.pop(future)
        self._fill()
        error = future.exception()
        if error is not None and not isinstance(error, OSError):
            raise error
        return file, error if error is not None else future.result()

    def close(self) -> None:
        """Stop at once, even in the middle of a huge file: Python does not end before its threads do."""
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _fill(self) -> None:
        while self._waiting and len(self._running) < _AHEAD:
            file = self._waiting.popleft()
            self._running[self._pool.submit(hash_file, file.path, self._closed.is_set)] = file
