"""Ctrl-C ends a run where nothing is half done. A file of its own, because training and indexing share it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def note_interrupt() -> Iterator[threading.Event]:
    """Set an event on the first Ctrl-C, so that the caller can stop well; a second one stops at once."""
    interrupted = threading.Event()

    def note(*_: object) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield interrupted
        return
    previous = signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
