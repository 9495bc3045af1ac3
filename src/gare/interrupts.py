"""Ctrl-C ends a run where nothing is half done. A file of its own, because every command shares it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""
_SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it


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


@contextmanager
def interrupts_end_imports() -> Iterator[None]:
    """End the process on a Ctrl-C that comes while a module is imported; anywhere else it is as ever.

    An import that is interrupted does not always end with KeyboardInterrupt: a compiled module makes another
    error of it, and callbacks of Python's import system print a traceback and go on. What is left undone is
    what a power cut leaves, and every command can take that.

    After the block there is nothing left but to take the interpreter apart: Ctrl-C ends that in silence.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield
        return
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # who started us has other plans
        yield
        return
    signal.signal(signal.SIGINT, _end_an_import)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end_an_import(number: int, frame: FrameType | None) -> None:
    running = frame
    while running is not None:
        if running.f_code.co_filename.startswith("<frozen importlib."):
            if os.isatty(2):
                os.write(2, _SHOW_CURSOR)
            os._exit(INTERRUPTED)
        running = running.f_back
    signal.default_int_handler(number, frame)
