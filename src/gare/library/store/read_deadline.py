"""An end for reading: when nobody waits for an answer any more, the reading that was done for it stops.

A call into a database or a file format cannot be interrupted. So stores read in pieces and look at the
deadline between two of them. It travels in the context of a thread or task and not as an argument, so that
stores which others write keep their signatures. Without one, nothing is ever ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from gare.errors import TimeLimitError

Part = TypeVar("Part")


class Deadline:
    """The end of one request: after some seconds, when it is cancelled, or whichever comes first.

    >>> with Deadline(seconds=0).active():
    ...     check_deadline()
    Traceback (most recent call last):
    ...
    gare.errors.TimeLimitError: this took too long, and was ended; try again in a few seconds
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._cancelled = threading.Event()
        self._at = None if seconds is None else time.monotonic() + seconds

    def cancel(self) -> None:
        """End whatever still reads for this request. Any thread may call it, several times."""
        self._cancelled.set()

    @property
    def is_over(self) -> bool:
        """Whether reading has to stop."""
        return self._cancelled.is_set() or (self._at is not None and time.monotonic() >= self._at)

    def check(self) -> None:
        """Go on, or raise.

        Raises:
            TimeLimitError: the deadline is over.
        """
        if self.is_over:
            raise TimeLimitError("this took too long, and was ended; try again in a few seconds")

    @contextmanager
    def active(self) -> Iterator[None]:
        """Everything that is read inside, by this thread or task and those it starts, has this deadline."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


_current: ContextVar[Deadline | None] = ContextVar("gare_deadline", default=None)


def current_deadline() -> Deadline | None:
    """The deadline of this thread or task, if it has one: to be handed to another thread."""
    return _current.get()


def check_deadline() -> None:
    """Raise `TimeLimitError` if the deadline of this thread or task is over: for stores, between pieces."""
    deadline = _current.get()
    if deadline is not None:
        deadline.check()


def checked(parts: Iterable[Part]) -> Iterator[Part]:
    """The parts one after the other, with a look at the deadline before each: for whoever reads a `scan`."""
    for part in parts:
        check_deadline()
        yield part


@contextmanager
def unlimited() -> Iterator[None]:
    """What is done inside is done whole, whoever waits: writing, above all."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)
