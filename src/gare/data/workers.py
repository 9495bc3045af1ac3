"""Work spread over processes that may crash, hang, eat memory or lie: such an item costs itself only.

Each process has one item at a time, so it is always clear which item took it down, and no other is run again.
It is shut in (`sandbox`) and gets a file as a descriptor; what it answers is read as `decoder_messages` and
never unpickled.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from gare.data.decoder_messages import (
    HEADER,
    Alive,
    Bounds,
    Done,
    Error,
    OutOfMemory,
    ProtocolError,
    Ready,
    Record,
    read_body,
    read_header,
    write_record,
)
from gare.data.fork_server import get_fork_server
from gare.data.sandbox import LAYERS, enter_box

Item = TypeVar("Item")
Result = TypeVar("Result")
Function = Callable[..., Iterable[Record]]
"""Takes an item, and the descriptors that its task opened; gives messages one by one."""

_ITEMS_PER_PROCESS = 500  # then a fresh one: decoders leak a little
_START_S = 600
_SEND_S = 60
_SLICE_S = 0.2  # how long a thread waits before it looks whether the pool was closed
_ITEM = struct.Struct("<I")
_SMALL = 1 << 16
_MOST_FILES = 2  # one to read, one to write
_MOST_ALIVE = 1_000_000  # of a file: ten times what its largest number of items takes
_TOO_LONG = "it took longer in all than a file of its size may take"


@dataclass(frozen=True)
class Limits:
    """What a process may use.

    Time is counted from one message to the next, and in total for a file. Time in which results wait, or the
    process waits for a processor, is not counted.
    """

    seconds: float = 120.0
    cpu_seconds: int = 120
    memory_bytes: int = 2 * 2**30
    """Memory beyond what the process has when it starts."""
    open_files: int = 128
    written_bytes: int = 2**20
    """The largest file it may write; a decoder has nothing to write."""
    file_seconds: float = 600.0
    """For a file, whatever is in it."""
    bytes_per_second: float = 20_000.0
    """A large file may take a second more for every so many bytes."""

    def total_seconds(self, num_bytes: int) -> float:
        """How long a file of this size may take.

        >>> Limits().total_seconds(2_000_000)
        700.0
        """
        return self.file_seconds + num_bytes / self.bytes_per_second


class WorkerLost(Exception):
    """The process of an item had to be given up."""

    def __init__(self, kind: Literal["timeout", "memory", "crashed", "misbehaved"], message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Refused(Exception):
    """An item that no process has to see: this is its result."""

    def __init__(self, result: Any) -> None:
        super().__init__(result)
        self.result = result


class Task(Generic[Item, Result]):
    """The parent's side of an item: what its process gets, and what it may say. This one takes any message.

    A task of another kind opens a file, sets bounds and makes results of messages, which it checks against
    what was asked.
    """

    bounds = Bounds()
    num_bytes = 0
    """The size of the file, which decides how long it may take."""

    def __init__(self, item: Item) -> None:
        self.item = item
        self.payload: Any = item
        """What the process gets; the item itself, unless `open` sets something else."""

    def open(self) -> int | tuple[int, int] | None:
        """The file that the process gets, as a descriptor; None for none. One that writes gets a second.

        Raises:
            Refused: there is nothing to decode.
        """
        return None

    def take(self, record: Record) -> Result | None:
        """A message of the process; what is to be delivered, if anything.

        Raises:
            ProtocolError: it is not what was asked for. The process is ended.
        """
        return record  # type: ignore[return-value]

    def close(self) -> None:
        """Close the file."""


@dataclass(frozen=True)
class Event(Generic[Item, Result]):
    """A result of an item. The last event has no result, or the reason why the process was lost."""

    item: Item
    result: Result | None = None
    lost: WorkerLost | None = None
    is_last: bool = False


class WorkerPool(Generic[Item, Result]):
    """Processes that each take an item, one after another, and send back its results one by one.

    Args:
        function: importable by name; gives messages about an item, one by one, and `Alive()` in between.
        num_workers: processes.
        task: what an item needs, and what becomes of the messages.
        limits: what each may use; None is no limit.
        results_ahead: finished results that may wait before processes do; default two per process.
        items_per_process: a process has so many items, one after another. With 1, what takes a process over
            never sees another item.
        boxed: shut the processes in. Only what decodes nothing may do without.
    """

    def __init__(
        self,
        function: Function,
        num_workers: int,
        *,
        task: Callable[[Item], Task[Item, Result]] = Task,
        limits: Limits | None = None,
        results_ahead: int | None = None,
        items_per_process: int = _ITEMS_PER_PROCESS,
        boxed: bool = True,
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, got {num_workers}")
        self.unfinished = 0
        """Items that were submitted and whose last event was not delivered yet."""
        self._task = task
        self._limits = limits
        self._items_per_process = items_per_process
        self._start = partial(_Worker, function, limits, boxed)
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
        """Queue an item."""
        self.unfinished += 1
        self._inbox.put(item)

    def next_event(self, timeout: float | None = None) -> Event[Item, Result] | None:
        """What came back next; None when nothing did in time. That no process starts is raised here."""
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
            task = self._task(item[0])
            try:
                descriptor = task.open()
                worker = worker or self._start()
                usable = self._run(worker, task, descriptor)
            except Refused as refused:
                self._deliver(Event(item[0], refused.result))
                self._deliver(Event(item[0], is_last=True))
                continue
            except Exception as error:
                self._deliver(error)
                usable = False
            finally:
                task.close()
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

    def _run(
        self, worker: _Worker, task: Task[Item, Result], descriptor: int | tuple[int, int] | None
    ) -> bool:
        """Everything that comes of one item; False when the process is not to be used again."""
        try:
            worker.send(task.payload, descriptor)
            clock = _Clock(worker, self._limits, task.num_bytes, self._closed)
            num_alive = 0
            while True:
                record = worker.receive(task.bounds, clock)
                if isinstance(record, Alive):
                    num_alive += 1
                    if num_alive > _MOST_ALIVE:
                        raise ProtocolError("it sent signs of life without end")
                    continue
                if isinstance(record, Done):
                    self._deliver(Event(task.item, is_last=True))
                    return worker.num_items < self._items_per_process
                result = task.take(record)
                if result is not None:
                    self._deliver(Event(task.item, result))
        except ProtocolError as error:
            lost = WorkerLost("misbehaved", f"{error}; its process was ended")
            self._deliver(Event(task.item, lost=lost, is_last=True))
        except WorkerLost as lost:
            self._deliver(Event(task.item, lost=lost, is_last=True))
        except _Closed:
            pass
        return False

    def _deliver(self, event: Event[Item, Result] | Exception) -> None:
        while not self._closed.is_set():
            try:
                return self._outbox.put(event, timeout=_SLICE_S)
            except queue.Full:
                pass


def map_in_processes(
    function: Function,
    items: Sequence[Item],
    *,
    num_workers: int,
    task: Callable[[Item], Task[Item, Result]] = Task,
    limits: Limits | None = None,
) -> Iterator[tuple[Item, Result | WorkerLost]]:
    """Each item with its results, in the order they finish; one that is lost comes with the reason.

    Only a few items per worker are in flight, so results never pile up.
    """
    if num_workers < 1:
        raise ValueError(f"num_workers must be at least 1, got {num_workers}")
    waiting = iter(items)
    num_workers = min(num_workers, max(1, len(items)))
    with WorkerPool(function, num_workers, task=task, limits=limits) as pool:
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
            elif event.result is not None:
                yield event.item, event.result


# --- one process, seen from the parent ---------------------------------------------------------------------


class _Closed(Exception):
    """The pool was closed while a thread waited."""


class _Clock:
    """How long a process may be waited for: for the next message, and for its whole file."""

    def __init__(
        self, worker: _Worker, limits: Limits | None, num_bytes: int, closed: threading.Event
    ) -> None:
        self._worker, self._closed = worker, closed
        self._allowed = limits.seconds if limits else float("inf")
        self._left = limits.total_seconds(num_bytes) if limits else float("inf")
        self.start()

    def start(self) -> None:
        """A message is waited for from now on."""
        self._begun = time.monotonic()
        self._starved: float | None = None

    def stop(self) -> None:
        """It is here, whole."""
        # Where it came soon, nobody looked how long it had no processor: that is counted as its own time.
        self._left -= time.monotonic() - self._begun if self._starved is None else self._waited()
        if self._left < 0:
            raise WorkerLost("timeout", _TOO_LONG)

    def check(self) -> None:
        """Nothing came for a while. It is called until something does.

        Raises:
            WorkerLost: it is too long.
        """
        if self._closed.is_set():
            raise _Closed
        waited = self._waited()
        if waited >= self._allowed:
            raise WorkerLost("timeout", f"no result within {self._allowed:g} seconds")
        if waited >= self._left:
            raise WorkerLost("timeout", _TOO_LONG)

    def _waited(self) -> float:
        # A machine with more work than processors is slow; the process on it does not hang.
        starved = self._worker.starved_seconds()
        if self._starved is None:
            self._starved = starved
        return time.monotonic() - self._begun - (starved - self._starved)


class _Worker:
    def __init__(self, function: Function, limits: Limits | None, boxed: bool) -> None:
        self.num_items = 0
        self._process = get_fork_server().fork(partial(_serve, function, limits, boxed))
        self._connection = self._process.connection
        self._connection.settimeout(_START_S)
        try:
            # What it takes to start and import is not counted against an item.
            ready = self.receive(Bounds(), None)
            if not isinstance(ready, Ready):
                raise WorkerLost("crashed", "a worker process did not start")
            self.layers = tuple(layer for bit, layer in enumerate(LAYERS) if ready.box >> bit & 1)
        except (TimeoutError, ProtocolError):
            raise WorkerLost("timeout", f"a worker process did not start within {_START_S} seconds") from None
        except WorkerLost:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, item: Any, descriptor: int | tuple[int, int] | None) -> None:
        self.num_items += 1
        order = pickle.dumps(item)
        descriptors = (
            [] if descriptor is None else [descriptor] if isinstance(descriptor, int) else [*descriptor]
        )
        try:
            self._connection.settimeout(_SEND_S)
            socket.send_fds(self._connection, [_ITEM.pack(len(order))], descriptors)
            self._connection.sendall(order)
            self._connection.settimeout(_SLICE_S)
        except OSError:
            raise self._reason() from None

    def receive(self, bounds: Bounds, clock: _Clock | None) -> Record:
        """The next message. The clock is looked at while it is not there, also where only a part of it is."""
        if clock is not None:
            clock.start()
        kind, length = read_header(self._read(HEADER.size, clock), bounds)
        record = read_body(kind, self._read(length, clock))
        if clock is not None:
            clock.stop()
        if isinstance(record, OutOfMemory):
            raise WorkerLost("memory", "more memory than the limit was asked for")
        if isinstance(record, Error):
            raise WorkerLost("crashed", f"the decoder failed ({record.message})")
        return record

    def _read(self, length: int, clock: _Clock | None) -> bytearray:
        buffer = bytearray(length)
        view = memoryview(buffer)
        while view:
            try:
                num_read = self._connection.recv_into(view)
            except TimeoutError:
                if clock is None:
                    raise
                clock.check()
                continue
            except OSError:
                num_read = 0
            if not num_read:
                raise self._reason()
            view = view[num_read:]
        return buffer

    def starved_seconds(self) -> float:
        """How long its main thread was ready to run and had no processor; 0 where the system does not say."""
        try:
            return int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[1]) / 1e9
        except (OSError, IndexError):
            return 0.0

    def kill(self) -> None:
        self._process.kill()

    def _reason(self) -> WorkerLost:
        code = self._process.exit_code(timeout=60)
        if code == -signal.SIGKILL:  # not ours: we would not have waited for an answer
            return WorkerLost("memory", "the system ended the process, most likely for want of memory")
        if hasattr(signal, "SIGXCPU") and code == -signal.SIGXCPU:
            return WorkerLost("timeout", "more processor time than the limit was used")
        name = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        return WorkerLost("crashed", f"the process crashed ({name})")


# --- in the process ----------------------------------------------------------------------------------------


def _serve(
    function: Function, limits: Limits | None, boxed: bool, connection: socket.socket, layers: tuple[str, ...]
) -> None:
    if limits is not None:
        _set_limits(limits)
    entered = enter_box(layers).layers if boxed else ()
    _send(connection, Ready(sum(1 << bit for bit, layer in enumerate(LAYERS) if layer in entered)))
    while (order := _receive_item(connection)) is not None:
        try:
            _renew_cpu(limits)
            for record in function(*order):
                _send(connection, record)
                _renew_cpu(limits)
            _send(connection, Done())
        except MemoryError:
            return _send(connection, OutOfMemory())
        except Exception as error:
            return _send(connection, Error(f"{type(error).__name__}: {error}"))
        for descriptor in order[1:]:
            os.close(descriptor)


def _receive_item(connection: socket.socket) -> tuple[Any, ...] | None:
    """An item, and the descriptors of its files if it has any; None when the parent is gone."""
    header, descriptors, _, _ = socket.recv_fds(connection, _ITEM.size, _MOST_FILES)
    if len(header) < _ITEM.size:
        return None
    (length,) = _ITEM.unpack(header)
    order = bytearray()
    while len(order) < length:
        part = connection.recv(min(length - len(order), 1 << 20))
        if not part:
            return None
        order += part
    return pickle.loads(order), *descriptors  # from the parent, who is trusted


def _send(connection: socket.socket, record: Record) -> None:
    parts = list(write_record(record))
    try:
        if sum(map(len, parts)) <= _SMALL:
            connection.sendall(b"".join(parts))
        else:
            for part in parts:
                connection.sendall(part)
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
