"""Hashes of whole files, which recognise a file under any name; computed a few files ahead in threads."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from threading import Event

from gare.data.object_storage import is_remote
from gare.library.index.object_files import Scratch
from gare.library.index.scan import FoundFile, Identity, file_identity

DIGEST_BYTES = 16
_BLOCK_BYTES = 2**20
_NUM_THREADS = 2
_AHEAD = 16


@dataclass(frozen=True)
class Hashed:
    """The content of a file, and which file it was that had it."""

    content: str
    """Hex digits; none if cancelled."""
    identity: Identity
    is_steady: bool
    """It did not change while it was read."""
    local: str = ""
    """Where the bytes are, of a file on object storage: a copy that is to be released."""


def hash_file(path: str, is_cancelled: Callable[[], bool] = lambda: False) -> Hashed:
    """Hash the whole content. It reads about 1 GB/s; other threads go on meanwhile."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    block = memoryview(bytearray(_BLOCK_BYTES))
    with open(path, "rb", buffering=0) as file:
        identity = file_identity(os.fstat(file.fileno()))
        while size := file.readinto(block):
            if is_cancelled():
                return Hashed("", identity, is_steady=False)
            digest.update(block[:size])
        is_steady = file_identity(os.fstat(file.fileno())) == identity
    return Hashed(digest.hexdigest(), identity, is_steady)


class HashQueue:
    """Gives files with their hash in the order they are ready: a huge file does not hold up small ones.

    Args:
        scratch: where objects are fetched to.
    """

    def __init__(self, files: Iterable[FoundFile], scratch: Scratch | None = None) -> None:
        self._scratch = scratch or Scratch()
        self._waiting = deque(files)
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="gare-hash")
        self._running: dict[Future[Hashed], FoundFile] = {}
        self._closed = Event()
        self._fill()

    def __bool__(self) -> bool:
        """Whether there is more to come."""
        return bool(self._running or self._waiting)

    def add(self, file: FoundFile) -> None:
        """One more file, or one that changed since it was hashed."""
        self._waiting.append(file)
        self._fill()

    def next(self, timeout: float) -> tuple[FoundFile, Hashed | OSError] | None:
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
        self._scratch.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _fill(self) -> None:
        while self._waiting and len(self._running) < _AHEAD:
            file = self._waiting.popleft()
            self._running[self._pool.submit(self._hash, file)] = file

    def _hash(self, file: FoundFile) -> Hashed:
        if not is_remote(file.path):
            return hash_file(file.path, self._closed.is_set)
        place = self._scratch.fetch(file)
        return replace(hash_file(place, self._closed.is_set), local=place)
