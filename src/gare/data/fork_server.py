"""Processes that begin with everything imported, and with neither secrets nor open files.

Python's own fork server hands the environment on, tokens and passwords included. This one is a new program
with an environment of a few names. It imports what the workers need once; each worker is a fork that shares
that memory. The parent keeps a socket per worker: closing it ends the worker, and over it comes the worker's
exit code.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import pickle
import re
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from gare.errors import GareError

Work = Callable[[socket.socket, tuple[str, ...]], None]
"""What a worker does with its end of the socket to its parent, in these layers of `sandbox`."""

_LENGTH, _NUMBER = struct.Struct("<I"), struct.Struct("<i")
_WORKER_FD = 3
_KEPT = re.compile(
    "PATH|LANG|LANGUAGE|LC_.*|TZ|LD_LIBRARY_PATH|DYLD_(FALLBACK_)?LIBRARY_PATH|(OMP|MKL|OPENBLAS|NUMEXPR)_NUM_THREADS"
)
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # files are decoded side by side
_PR_SET_PDEATHSIG = 1


def clean_environment() -> dict[str, str]:
    """The few variables that a decoder needs: where libraries are, and in which language it speaks."""
    return _ONE_THREAD | {name: value for name, value in os.environ.items() if _KEPT.fullmatch(name)}


# --- in the parent ------------------------------------------------------------------------------------------


class ForkedProcess:
    """A worker, seen from its parent."""

    def __init__(self, connection: socket.socket, status: socket.socket) -> None:
        self.connection = connection
        self._status = status
        self._exit_code: int | None = None
        pid = self._read_number(None)
        if pid is None:
            raise GareError("the process that starts decoders has ended; its own message is above")
        self.pid = pid

    def kill(self) -> None:
        """End it, whatever it is doing."""
        with contextlib.suppress(OSError):
            self._status.shutdown(socket.SHUT_WR)
        self.exit_code(None)
        self._status.close()
        self.connection.close()

    def exit_code(self, timeout: float | None) -> int | None:
        """As `subprocess` has it: minus the signal that ended it. None: it runs, or nobody knows."""
        if self._exit_code is None:
            self._exit_code = self._read_number(timeout)
        return self._exit_code

    def _read_number(self, timeout: float | None) -> int | None:
        try:
            self._status.settimeout(timeout)
            said = self._status.recv(_NUMBER.size)
        except OSError:
            return None
        return int(_NUMBER.unpack(said)[0]) if len(said) == _NUMBER.size else None


class ForkServer:
    """The process that workers are forked from. It ends with this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control, other = socket.socketpair()
        # Not the whole package: its top imports torch, which takes seconds, and no decoder needs it.
        package = str(Path(__file__).resolve().parents[1])
        code = (
            f"import sys, types; sys.path[:] = {sys.path!r}; gare = types.ModuleType('gare'); "
            f"gare.__path__ = [{package!r}]; sys.modules['gare'] = gare; "
            f"from gare.data.fork_server import serve; serve({other.fileno()})"
        )
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", code],
                env=clean_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                process_group=0,  # Ctrl-C is the parent's to handle
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it can still fork."""
        return self._process.poll() is None

    def fork(self, work: Work) -> ForkedProcess:
        """Start a worker; `work` is importable by name, with arguments that can be pickled."""
        ours, connection = socket.socketpair()
        status, other = socket.socketpair()
        with connection, other:
            order = pickle.dumps((sys.path, work))
            try:
                with self._lock:
                    descriptors = [connection.fileno(), other.fileno()]
                    socket.send_fds(self._control, [_LENGTH.pack(len(order))], descriptors)
                    self._control.sendall(order)
            except OSError:
                pass  # it has ended: so the worker's status says
        return ForkedProcess(ours, status)

    def close(self) -> None:
        """End it, and with it all its workers."""
        self._control.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_server: tuple[int, ForkServer] | None = None
_server_lock = threading.Lock()


def get_fork_server() -> ForkServer:
    """The one of this process, started when it is first needed."""
    global _server
    if not hasattr(socket, "send_fds") or not hasattr(os, "fork"):
        raise GareError("decoding in processes of its own needs Linux or macOS; on Windows, use WSL")
    with _server_lock:
        if _server is None or _server[0] != os.getpid() or not _server[1].is_alive:
            server = ForkServer()
            _server = (os.getpid(), server)
            atexit.register(_close_if_ours, os.getpid(), server)
        return _server[1]


def _close_if_ours(owner: int, server: ForkServer) -> None:
    if owner == os.getpid():
        server.close()


# --- in the server ------------------------------------------------------------------------------------------


def serve(control_fd: int) -> None:
    """Fork a worker for every order, until the parent closes the socket or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from gare.data.box_rehearsal import find_usable_layers

    _Server(socket.socket(fileno=control_fd), find_usable_layers()).run()


class _Server:
    """Waits for orders, for the parent to give a worker up, and for workers to end."""

    def __init__(self, control: socket.socket, layers: tuple[str, ...]) -> None:
        self._control, self._layers = control, layers
        self._workers: dict[int, socket.socket] = {}
        self._waking, wake = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for source in (self._control, self._waking):
            self._selector.register(source, selectors.EVENT_READ)
        self._waking.setblocking(False)
        wake.setblocking(False)
        self._wake = wake
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._waking:
                    with contextlib.suppress(BlockingIOError):
                        self._waking.recv(4096)
                    self._reap()
                elif key.fileobj is not self._control:
                    # Given up and ended by itself at once: `_reap`, earlier in this round, may have said all.
                    if key.data in self._workers:
                        self._give_up(key.data)
                elif (order := _receive_order(self._control)) is not None:
                    self._fork(*order)
                else:
                    signal.set_wakeup_fd(-1)  # what ends now is told by nobody: our sockets close first
                    for pid in self._workers:
                        os.kill(pid, signal.SIGKILL)
                    return

    def _fork(self, order: bytes, descriptors: list[int]) -> None:
        status = socket.socket(fileno=descriptors[1])
        try:
            sys.path[:], work = pickle.loads(order)  # imports what it needs, for all that follow too
            pid = os.fork()
            if not pid:
                _become_worker(work, descriptors[0], self._layers)
        except Exception:
            traceback.print_exc()
            status.close()
            return
        finally:
            os.close(descriptors[0])
        self._workers[pid] = status
        self._selector.register(status, selectors.EVENT_READ, pid)
        _tell(status, pid)

    def _give_up(self, pid: int) -> None:
        """The parent closed its end. That the worker has ended comes as a signal."""
        self._selector.unregister(self._workers[pid])
        os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        while self._workers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            connection = self._workers.pop(pid)
            with contextlib.suppress(KeyError):  # given up before
                self._selector.unregister(connection)
            _tell(connection, os.waitstatus_to_exitcode(status))
            connection.close()


def _receive_order(control: socket.socket) -> tuple[bytes, list[int]] | None:
    """What to run and the two sockets of its process; None when the parent is gone."""
    try:
        header, descriptors, _, _ = socket.recv_fds(control, _LENGTH.size, 2)
        if len(header) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack(header)
        order = b""
        while len(order) < length and (part := control.recv(length - len(order))):
            order += part
    except OSError:
        return None
    return (order, descriptors) if len(order) == length else None


def _tell(status: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # nobody is left to tell
        status.sendall(_NUMBER.pack(number))


def _become_worker(work: Work, descriptor: int, layers: tuple[str, ...]) -> NoReturn:
    code = 1
    try:
        server = os.getppid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(descriptor, _WORKER_FD)
        os.closerange(_WORKER_FD + 1, os.sysconf("SC_OPEN_MAX"))
        os.dup2(0, 2)  # a decoder may say anything there, and a terminal would obey it
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == server:
            work(socket.socket(fileno=_WORKER_FD), layers)
            code = 0
    finally:
        os._exit(code)
