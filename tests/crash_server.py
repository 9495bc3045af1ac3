"""Processes that work on a library and may be stopped at any write, at a fraction of a second each.

`CrashServer` starts one process with the shim of `write_shim.py`; it imports everything and loads the model
once. Each job is a fork of it, so a thousand are affordable. What a job can do stands in `crash_tasks.py`.
"""

from __future__ import annotations

import gc
import os
import pickle
import socket
import subprocess
import sys
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import write_shim
from gare.errors import GareError
from write_shim import Stop


@dataclass(frozen=True)
class Job:
    """A function of `crash_tasks.py`, what it is given, and where it is stopped."""

    task: str
    arguments: dict[str, Any] = field(default_factory=dict)
    stop: Stop | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a job."""

    code: int
    """0, or minus the signal that ended it."""
    result: Any = None
    num_writes: int = 0
    error: str = ""
    is_explained: bool = False
    """The error is one that a user can read."""

    @property
    def was_killed(self) -> bool:
        return self.code == -9

    def get(self) -> Any:
        """The result of a job that was not stopped."""
        assert self.code == 0, f"ended with {self.code}: {self.error}"
        return self.result


class CrashServer:
    """The process that jobs are forked from.

    Args:
        model: the folder of a saved model.
        trains: import what training needs as well.
    """

    def __init__(self, model: Path | str, *, trains: bool = False) -> None:
        mine, other = socket.socketpair()
        command = [sys.executable, __file__, str(other.fileno()), str(model), "trains" if trains else ""]
        self._process = subprocess.Popen(
            command, env=write_shim.environment(), pass_fds=[other.fileno()], stdin=subprocess.DEVNULL
        )
        other.close()
        self._link = Connection(mine.detach())
        assert self._link.recv() == "ready"

    def __enter__(self) -> CrashServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close()
        self._process.wait()

    def run(self, task: str, stop: Stop | None = None, **arguments: Any) -> Outcome:
        """One job, to its end."""
        return self.together([Job(task, arguments, stop)])[0]

    def do(self, task: str, **arguments: Any) -> Any:
        """The result of one job that nobody stops."""
        return self.run(task, **arguments).get()

    def together(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Several jobs at once."""
        self._link.send(list(jobs))
        outcomes: list[Outcome] = self._link.recv()
        return outcomes


# --- in that process ----------------------------------------------------------------------------------------


def serve(link: Connection, model: str, *, trains: bool) -> None:
    import crash_tasks

    crash_tasks.prepare(model, trains=trains)
    threads = {(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}
    threads -= {"jemalloc_bg_thd"}  # Arrow's; it is made anew in a fork
    assert len(threads) == 1, f"a process with threads cannot be forked: {threads}"
    gc.collect()
    gc.freeze()
    link.send("ready")
    while True:
        try:
            jobs = link.recv()
        except EOFError:
            return
        children = [_start(job) for job in jobs]
        link.send([_finish(*child) for child in children])


def _start(job: Job) -> tuple[int, int]:
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "lance is not fork-safe")  # it was not used yet
        child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    os.close(reading)
    code = 1
    try:
        answer = _work(job)
        code = 0
    except BaseException as error:
        is_explained = isinstance(error, GareError)
        answer = pickle.dumps((None, 0, traceback.format_exc(), is_explained))
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(answer)
    os._exit(code)


def _work(job: Job) -> bytes:
    import crash_tasks

    if job.stop:
        write_shim.arm(job.stop)
    result = getattr(crash_tasks, job.task)(**job.arguments)
    num_writes = write_shim.disarm()
    return pickle.dumps((result, num_writes, "", False))


def _finish(child: int, reading: int) -> Outcome:
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return Outcome(code, *(pickle.loads(answer) if answer else ()))


if __name__ == "__main__":
    import crash_server  # what is sent must be known by this name

    crash_server.serve(Connection(int(sys.argv[1])), sys.argv[2], trains=bool(sys.argv[3]))
