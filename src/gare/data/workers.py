"""Work spread over processes that may crash, hang or eat memory: such an item costs itself and nothing else.

Each process has one item at a time, so it is always clear which item took it down, and no other is run again.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, Literal, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_ITEMS_PER_PROCESS = 500  # then a fresh one: decoders leak a little
_START_S = 120
_SLICE_S = 0.2  # how long a thread waits before it looks whether the pool was closed


@dataclass(frozen=True)
class Limits:
    """What a process may use. Time is counted from one result to the next, and not while results wait."""

    seconds: float = 120.0
    cpu_seconds: int = 120
    memory_bytes: int = 2 * 2**30
    """More than the process has when it starts."""
    open_files: int = 128
    written_bytes: int = 2**20
    """The largest file it may write; a decoder has nothing to write."""


class Alive:
    """Given instead of a result by a function that needs long: it is not delivered, and time starts anew."""


class WorkerLost(Exception):
    """The process of an item had to be given up."""

    def __init__(self, kind: Literal["timeout", "memory", "crashed"], message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Event(Generic[Item, Result]):
    """Something that came back for an item. The last one has no result, or says how the process was lost."""

    item: Item
    result: Result | None = None
    lost: WorkerLost | None = None
    is_last: bool = False


class WorkerPool(Generic[Item, Result]):
    """Processes that each take an item, one after another, and send back its results one by one.

    Args:
        function: importable by name; gives the results of an item, one by one, and `Alive()` in between.
        num_workers: processes.
        limits: what each may use; None is no limit.
        results_ahead: finished results that may wait before processes do; default two per process.
    """

    def __init__(
        self,
        function: Callable[[Item], Iterable[Result]],
        num_workers: int,
        *,
        limits: Limits | None = None,
        results_ahead: int | None = None,
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, got {num_workers}")
        self.unfinished = 0
        """Items that were submitted and whose last event was not delivered yet."""
        self._function = function
        self._limits = limits
        self._context = _context(function)
        self._inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._outbox: queue.Queue[Event[Item, Result] | Exception] = queue.Queue(
            results_ahead or 2 * num_workers
        )
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._own_a_process, daemon=True) for _ in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> WorkerPool[Item, Result]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, item: Item) -> None:
        self.unfinished += 1
        self._inbox.put(item)

    def next_event(self, timeout: float | None = None) -> Event[Item, Result] | None:
        """What came back next; None when nothing did in time. An exception of the function is raised here."""
        try:
            event = self._outbox.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(event, Exception):
            raise event
        self.unfinished -= event.is_last
        return event

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        self._closed.set()
        for thread in self._threads:
            thread.join()

    def _own_a_process(self) -> None:
        """One thread per process: it hands out items, watches the clock and replaces what was lost."""
        worker: _Worker | None = None
        while (item := self._next_item()) is not None:
            try:
                worker = worker or _Worker(self._context, self._function, self._limits)
                usable = self._run(worker, item[0])
            except Exception as error:
                self._deliver(error)
                usable = False
            if worker is not None and not usable:
                worker.kill()
                worker = None
        if worker is not None:
            worker.kill()

    def _next_item(self) -> tuple[Item] | None:
        while not self._closed.is_set():
            try:
                return (self._inbox.get(timeout=_SLICE_S),)
            except queue.Empty:
                pass
        return None

    def _run(self, worker: _Worker, item: Item) -> bool:
        """Everything that comes of one item; False when the process is not to be used again."""
        try:
            worker.send(item)
            while True:
                kind, value = self._receive(worker)
                if kind == "result":
                    self._deliver(Event(item, value))
                elif kind == "done":
                    self._deliver(Event(item, is_last=True))
                    return worker.num_items < _ITEMS_PER_PROCESS
                elif kind == "error":
                    raise value
        except WorkerLost as lost:
            self._deliver(Event(item, lost=lost, is_last=True))
        except _Closed:
            pass
        return False

    def _receive(self, worker: _Worker) -> tuple[str, Any]:
        allowed = self._limits.seconds if self._limits else float("inf")
        deadline = time.monotonic() + allowed
        while not worker.connection.poll(max(0.0, min(_SLICE_S, deadline - time.monotonic()))):
            if self._closed.is_set():
                raise _Closed
            if time.monotonic() >= deadline:
                worker.kill()
                raise WorkerLost("timeout", f"no result within {allowed:g} seconds")
        return worker.receive()

    def _deliver(self, event: Event[Item, Result] | Exception) -> None:
        while not self._closed.is_set():
            try:
                return self._outbox.put(event, timeout=_SLICE_S)
            except queue.Full:
                pass


def map_in_processes(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    num_workers: int,
    limits: Limits | None = None,
) -> Iterator[tuple[Item, Result | WorkerLost]]:
    """Each item with its result, in the order they finish; one that is lost comes with the reason.

    Only a few items per worker are in flight, so results never pile up.
    """
    if num_workers < 1:
        raise ValueError(f"num_workers must be at least 1, got {num_workers}")
    waiting = iter(items)
    num_workers = min(num_workers, max(1, len(items)))
    with WorkerPool(partial(_once, function), num_workers, limits=limits) as pool:
        for item in items[: 2 * num_workers]:
            pool.submit(item)
            next(waiting)
        while pool.unfinished:
            event = pool.next_event()
            if event is None:
                continue
            if event.is_last:
                for item in waiting:
                    pool.submit(item)
                    break
            if event.lost is not None:
                yield event.item, event.lost
            elif not event.is_last:
                yield event.item, event.result  # type: ignore[misc]  # a result may itself be None


def _once(function: Callable[[Item], Result], item: Item) -> Iterator[Result]:
    yield function(item)


# --- one process, seen from the parent ---------------------------------------------------------------------


class _Closed(Exception):
    """The pool was closed while a thread waited."""


class _Worker:
    def __init__(
        self, context: BaseContext, function: Callable[[Any], Iterable[Any]], limits: Limits | None
    ) -> None:
        self.num_items = 0
        self.connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, function, limits), daemon=True)  # type: ignore[attr-defined]
        with _main_hidden():
            self._process.start()
        other.close()
        # What it takes to start and import is not counted against an item.
        if not self.connection.poll(_START_S):
            self.kill()
            raise WorkerLost("timeout", f"a worker process did not start within {_START_S} seconds")
        self.receive()

    def send(self, item: Any) -> None:
        self.num_items += 1
        try:
            self.connection.send(item)
        except OSError:
            raise self._reason() from None

    def receive(self) -> tuple[str, Any]:
        try:
            kind, value = self.connection.recv()
        except (EOFError, OSError):
            raise self._reason() from None
        if kind == "memory":
            raise WorkerLost("memory", "more memory than the limit was asked for")
        return kind, value

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()

    def _reason(self) -> WorkerLost:
        self._process.join(timeout=5)
        code = self._process.exitcode
        if code == -signal.SIGKILL:  # not ours: we would not have waited for an answer
            return WorkerLost("memory", "the system ended the process, most likely for want of memory")
        if hasattr(signal, "SIGXCPU") and code == -signal.SIGXCPU:
            return WorkerLost("timeout", "more processor time than the limit was used")
        name = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        return WorkerLost("crashed", f"the process crashed ({name})")


def _context(function: Callable[..., object]) -> BaseContext:
    # Not forked from here: this process may have threads (torch does), and a fork copies their locks. A fork
    # server has none; it imports the module once, and workers share that memory.
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    inner = function.args[0] if isinstance(function, partial) and function.args else function
    context.set_forkserver_preload([__name__, inner.__module__])
    return context


_main_lock = threading.Lock()


@contextmanager
def _main_hidden() -> Iterator[None]:
    """A worker would run the main script again: slow, and an error where it has no `__main__` guard."""
    with _main_lock:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


# --- in the process ----------------------------------------------------------------------------------------


def _serve(connection: Connection, function: Callable[[Any], Iterable[Any]], limits: Limits | None) -> None:
    _end_with_parent()
    if limits is not None:
        _set_limits(limits)
    _send(connection, "ready", None)
    while True:
        try:
            item = connection.recv()
        except (EOFError, OSError):
            return  # the pool was closed, or its process killed
        try:
            _renew_cpu(limits)
            for result in function(item):
                _send(connection, *(("alive", None) if isinstance(result, Alive) else ("result", result)))
                _renew_cpu(limits)
            _send(connection, "done", None)
        except MemoryError:
            _send(connection, "memory", None)
            return
        except Exception as error:
            _send(connection, "error", error)
            return


def _send(connection: Connection, kind: str, value: object) -> None:
    try:
        connection.send((kind, value))
    except (BrokenPipeError, ConnectionResetError):
        os._exit(1)  # the parent is gone, and nobody is left to tell


def _set_limits(limits: Limits) -> None:
    try:
        import resource
    except ImportError:  # Windows: time is still watched from outside
        return
    wanted = {resource.RLIMIT_NOFILE: limits.open_files, resource.RLIMIT_FSIZE: limits.written_bytes}
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        wanted[resource.RLIMIT_AS] = pages * resource.getpagesize() + limits.memory_bytes
    except OSError:
        pass  # not Linux
    wanted[resource.RLIMIT_CORE] = 0
    for kind, value in wanted.items():
        hard = resource.getrlimit(kind)[1]
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (least, least))


def _renew_cpu(limits: Limits | None) -> None:
    if limits is None or sys.platform == "win32":
        return
    import resource

    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    allowed = int(time.process_time()) + 1 + limits.cpu_seconds
    if hard == resource.RLIM_INFINITY or allowed < hard:
        resource.setrlimit(resource.RLIMIT_CPU, (allowed, hard))


def _end_with_parent() -> None:
    """Without this, workers outlive a parent that was killed. Ctrl-C is the parent's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
