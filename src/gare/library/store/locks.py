"""One writer at a time in a folder. The system lets go of the lock when a process dies, however it dies."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows: there Lance's own conflict checks must do
    fcntl = None  # type: ignore[assignment]


class FolderLock:
    """A lock between processes, and between the threads of one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._threads = threading.RLock()
        self._handle: int | None = None
        self._depth = 0

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Wait for the lock, then hold it; a thread that holds it may take it again."""
        with self._threads:
            self._acquire(block=True)
            try:
                yield
            finally:
                self._release()

    @contextlib.contextmanager
    def held_if_free(self) -> Iterator[bool]:
        """Hold the lock if nobody else does; says whether."""
        with self._threads:
            acquired = self._acquire(block=False)
            try:
                yield acquired
            finally:
                if acquired:
                    self._release()

    def _acquire(self, *, block: bool) -> bool:
        if self._depth == 0:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                if fcntl is not None:
                    fcntl.flock(handle, fcntl.LOCK_EX | (0 if block else fcntl.LOCK_NB))
            except BlockingIOError:
                os.close(handle)
                return False
            except BaseException:
                os.close(handle)
                raise
            self._handle = handle
        self._depth += 1
        return True

    def _release(self) -> None:
        self._depth -= 1
        if self._depth == 0 and self._handle is not None:
            os.close(self._handle)
            self._handle = None
