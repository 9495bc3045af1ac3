"""Whether a file is still the one that was indexed, although something was done to it since.

A date can be set to any value. The time of the last change of an inode cannot: the system sets it when a file
is written, renamed, linked or copied into its place. A file that was not touched after it was indexed is the
one that was indexed. One that was (moved back, restored from a copy, or swapped) is read once, and its hash
decides. Reading goes on when the request that began it has ended, so that a huge file is ready for the next.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime

from gare.library.index.content_hash import DIGEST_BYTES
from gare.library.index.scan import Identity, file_identity
from gare.library.store.read_deadline import check_deadline

_BLOCK_BYTES = 2**20
_LOOK_S = 0.1
_KEPT = 4096


class ContentChecks:
    """Compares files with what was indexed, each version of a file once."""

    def __init__(self) -> None:
        self._hashes: OrderedDict[Identity, Future[str]] = OrderedDict()
        self._mutex = threading.Lock()
        self._closed = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="gare-content")

    def close(self) -> None:
        """Stop reading, even in the middle of a huge file."""
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def is_same(self, handle: int, *, content: str, added: datetime) -> bool:
        """Whether an open file has this content, which it had when it was added to the library."""
        status = os.fstat(handle)
        if status.st_ctime_ns < added.timestamp() * 1e9:
            return True
        hashed = self._hash(handle, file_identity(status))
        while True:
            try:
                return hashed.result(timeout=_LOOK_S) == content
            except TimeoutError:
                check_deadline()

    def _hash(self, handle: int, identity: Identity) -> Future[str]:
        with self._mutex:
            known = self._hashes.get(identity)
            if known is None or known.cancelled() or (known.done() and known.exception()):
                known = self._hashes[identity] = self._pool.submit(self._read, os.dup(handle))
            self._hashes.move_to_end(identity)
            while len(self._hashes) > _KEPT:
                self._hashes.popitem(last=False)
            return known

    def _read(self, handle: int) -> str:
        try:
            digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
            at = 0
            while (block := os.pread(handle, _BLOCK_BYTES, at)) and not self._closed.is_set():
                digest.update(block)
                at += len(block)
            return digest.hexdigest() if not block else ""
        finally:
            os.close(handle)
