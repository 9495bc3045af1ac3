"""What an operator sees of a server: numbers for Prometheus, and one JSON object a line on stderr.

What people search for is not written down unless asked.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
import traceback
from datetime import UTC, datetime
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_WARNING = re.compile(r".*?:\d+: \w+")  # where it is from and of which kind, without its message
_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 30)


class Metrics:
    """One registry per app, so that several may live in a process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "gare_requests",
            "Requests by route and status.",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "gare_request_seconds",
            "Time to the first byte of an answer.",
            ["route"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.ready = Gauge("gare_ready", "1 while it can search and stays.", registry=self.registry)
        self.draining = Gauge("gare_draining", "1 once it was asked to end.", registry=self.registry)
        self.in_work = Gauge("gare_requests_in_work", "Requests being answered.", registry=self.registry)
        self.waiting = Gauge("gare_searches_waiting", "Searches in the queue.", registry=self.registry)
        self.searching = Gauge(
            "gare_searches_in_work", "Threads that answer searches now.", registry=self.registry
        )
        self.ended = Counter(
            "gare_requests_ended", "Requests ended before an answer, by reason.", ["reason"],
            registry=self.registry,
        )  # fmt: skip
        self.batch = Histogram(
            "gare_search_batch",
            "Searches answered together.",
            buckets=(1, 2, 4, 8, 16, 32, 64),
            registry=self.registry,
        )
        self.search_seconds = Histogram(
            "gare_search_seconds", "Time of a batch.", buckets=_SECONDS, registry=self.registry
        )
        self.refused = Counter(
            "gare_refused", "Requests refused, by reason.", ["reason"], registry=self.registry
        )
        self.uploads = Counter("gare_uploads", "Uploads by outcome.", ["outcome"], registry=self.registry)
        self.items = Gauge("gare_library_items", "Items of the library.", registry=self.registry)
        self.job_running = Gauge("gare_job_running", "1 while a job runs.", registry=self.registry)


class JsonLines(logging.Formatter):
    """A log record as one JSON object.

    Args:
        queries: whether what people search for may stand in it. The message of an unforeseen error may quote
            it (a database's does); without this, only its type and the lines that raised it are shown.
    """

    def __init__(self, *, queries: bool = False) -> None:
        super().__init__()
        self._queries = queries

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": self._event(record),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            told = self.formatException if self._queries else _without_messages
            line["traceback"] = told(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)

    def _event(self, record: logging.LogRecord) -> str:
        """What happened. Of a message from elsewhere, only what it says every time: the rest may quote."""
        if self._queries or record.name.startswith(("gare.serve", "uvicorn")):
            return record.getMessage()
        if record.name == "py.warnings" and (found := _WARNING.match(record.getMessage())):
            return found[0]
        return f"{record.name}: {str(record.msg).partition(chr(10))[0]}"


def _without_messages(exc_info: Any) -> str:
    """Types and places of an error and of those that led to it, the first one first."""
    told: list[str] = []
    error: BaseException | None = exc_info[1]
    while error is not None:
        told.insert(0, "".join(traceback.format_tb(error.__traceback__)) + type(error).__qualname__)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n\n".join(told)


def set_up_logs(*, quiet: bool = False, queries: bool = False) -> None:
    """Write the log to stderr.

    Args:
        quiet: keep requests out of a terminal that shows something else.
        queries: log what people search for.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(queries=queries))
    for name, level in (
        ("gare.serve", logging.WARNING if quiet else logging.INFO),
        ("gare.library", logging.WARNING),
        ("uvicorn", logging.WARNING),
        ("", logging.WARNING),  # of all others
    ):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
    logging.captureWarnings(True)
    threading.excepthook = _log_thread


class LoggedProgress:
    """Tells the log how far something is that takes minutes, now and then."""

    def __init__(self, name: str, *, every_s: float = 10.0) -> None:
        self._name, self._every_s = name, every_s
        self._started = self._told = time.monotonic()
        self._done = 0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done <= self._done:  # it begins anew
            self._started = self._told = now
        self._done = done
        if now - self._told < self._every_s:
            return
        self._told = now
        left_s = round((now - self._started) / done * (total - done))
        fields = {"done": done, "of": total, "seconds_left": left_s}
        logging.getLogger("gare.serve").info(self._name, extra={"fields": fields})


def _log_thread(ended: Any) -> None:
    """Write down what ended a thread as any other error; Python would print its message."""
    error = (ended.exc_type, ended.exc_value, ended.exc_traceback)
    logging.getLogger("gare.serve").error("thread", exc_info=error)
