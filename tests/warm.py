"""Processes that start warm: forked from one that has imported everything, which takes seconds each time.

Tests call `run_gare` and `run_python`, or keep a `WarmProcess`. Run as a script, this file is the process
they are forked from. It has one thread and uses nothing it imports: a fork is as good as a new process.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from functools import cache
from pathlib import Path
from typing import IO, Any

IMPORTED = (
    "numpy",
    "torch",
    "torch._dynamo",  # every optimizer imports it, which takes longer than torch itself
    "torch.utils.tensorboard",
    "gare.cli.main",
    "gare.cli.score_options",
    "gare.interaction.peers",
    "gare.library.library",
    "gare.library.search.resident_search",
    "gare.library.store.lance_store",
    "gare.serve.app",
    "gare.serve.http_server",
    "gare.train",
    "gare.evaluate.model_evaluation",
    "lance",
    "av",
)
Command = list[str]
"""`["gare", …]`, `["-c", CODE, …]` or `["script.py", …]`: what follows `python -m` or `python`."""


# --- in the tests ------------------------------------------------------------------------------------------


class WarmProcess:
    """A process with as much of `subprocess.Popen` as the tests need."""

    def __init__(
        self,
        command: Command,
        *,
        stdout: IO[Any] | int = subprocess.DEVNULL,
        stderr: IO[Any] | int = subprocess.DEVNULL,
        cwd: Path | str | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        self.args = command
        self.returncode: int | None = None
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = None
        with tempfile.TemporaryFile() as nothing:
            reading, output = self._open(stdout, nothing)
            reading_errors, errors = self._open(stderr, nothing)
            self._link = socket.socket(socket.AF_UNIX)
            self._link.connect(_parent())
            socket.send_fds(self._link, [b"!"], [nothing.fileno(), output, errors])
        for pipe, end in ((reading, output), (reading_errors, errors)):
            if pipe is not None:
                os.close(end)
        self.stdout, self.stderr = reading, reading_errors
        order = {"command": command, "cwd": str(cwd or os.getcwd()), "env": env or dict(os.environ)}
        self._link.sendall(json.dumps(order).encode() + b"\n")
        self._answers = self._link.makefile("r")
        self.pid = int(self._answers.readline())

    @staticmethod
    def _open(target: IO[Any] | int, nothing: IO[bytes]) -> tuple[IO[str] | None, int]:
        if target == subprocess.DEVNULL:
            return None, nothing.fileno()
        if target == subprocess.PIPE:
            reading, writing = os.pipe()
            return os.fdopen(reading, encoding="utf-8"), writing
        assert not isinstance(target, int)
        return None, target.fileno()

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._link.settimeout(timeout)
            try:
                self.returncode = int(self._answers.readline())
            except TimeoutError:
                # A file over a socket is of no use after a time-out.
                self._answers = self._link.makefile("r")
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
            self._answers.close()
            self._link.close()
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(timeout=0.001)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ended this moment; its code is on the way
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it writes to its pipes until its end."""
        said = ["", ""]

        def read(number: int, pipe: IO[str]) -> None:
            said[number] = pipe.read()

        pipes = [(number, pipe) for number, pipe in enumerate((self.stdout, self.stderr)) if pipe is not None]
        readers = [threading.Thread(target=read, args=pair) for pair in pipes]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join()
        for _, pipe in pipes:
            pipe.close()
        return said[0], said[1]

    def __enter__(self) -> WarmProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait()
        for pipe in (self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()


def run_python(
    command: Command,
    *,
    cwd: Path | str | None = None,
    env: dict[str, str] | None = None,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run to the end, and give what was written."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        with WarmProcess(command, stdout=output, stderr=errors, cwd=cwd, env=env) as process:
            code = process.wait(timeout)
        said = []
        for file in (output, errors):
            file.seek(0)
            said.append(file.read().decode().replace("\r\n", "\n"))
    return subprocess.CompletedProcess(command, code, *said)


def run_gare(
    *arguments: object, cwd: Path | str | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    from servers import HANG_S

    env = {**os.environ, **environment}
    return run_python(["gare", *map(str, arguments)], cwd=cwd, env=env, timeout=HANG_S)


@cache
def _parent() -> str:
    """The address of the process that is forked, started when it is first needed."""
    folder = tempfile.TemporaryDirectory(prefix="gare-warm-")
    atexit.register(folder.cleanup)
    address = os.path.join(folder.name, "socket")
    process = subprocess.Popen(
        [sys.executable, __file__, address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == b"ready\n"
    process.stdout.close()
    atexit.register(process.wait)
    atexit.register(process.stdin.close)  # called before: it ends when this is closed
    return address


# --- in the process that is forked -------------------------------------------------------------------------


def serve_forks(address: str) -> Command:
    """Fork for everyone who asks. Only the new processes return."""
    import select

    for name in IMPORTED:
        importlib.import_module(name)
    threads = {(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}
    threads -= {"jemalloc_bg_thd"}  # Arrow's; it is made anew in a fork
    assert len(threads) == 1, f"a process with threads cannot be forked: {threads}"
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    print("ready", flush=True)
    while True:
        _reap()
        if sys.stdin in select.select([sys.stdin, listener], [], [])[0]:
            os._exit(0)
        link, _ = listener.accept()
        if not _fork():
            listener.close()
            return _become(link)
        link.close()


def _become(link: socket.socket) -> Command:
    """Here two processes are made: one that does the work, and one that waits for its end."""
    _, streams, _, _ = socket.recv_fds(link, 1, 3)
    order = json.loads(link.makefile("r").readline())
    worker = _fork()
    if worker:
        for stream in streams:
            os.close(stream)
        link.sendall(f"{worker}\n".encode())
        status = os.waitpid(worker, 0)[1]
        try:
            link.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        finally:
            os._exit(0)
    link.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.modules["numpy"].random.seed()
    command: Command = order["command"]
    return command


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "lance is not fork-safe")  # it was not used yet
        return os.fork()


def main() -> None:
    command = serve_forks(sys.argv[1])
    code = 1
    try:
        code = _run(command)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    # What an interpreter does at its end, but for taking every module apart, which takes a second.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(command: Command) -> int:
    program, *arguments = command
    sys.argv = [program, *arguments]
    if program == "gare":
        from gare.cli.main import main as gare

        gare()
    elif program == "-c":
        sys.argv = ["-c", *arguments[1:]]
        exec(compile(arguments[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        import runpy

        sys.path[0] = os.path.dirname(os.path.abspath(program))
        runpy.run_path(program, run_name="__main__")
    return 0


if __name__ == "__main__":
    main()
