"""Ends a process at its n-th write: `write_shim.c`, compiled when it is first asked for.

A process that was started with `environment()` may call `arm`. From then on its writes are counted:
everything that changes a file below a folder, or that is sent to a port. `trace` keeps them, so that a power
cut can be simulated from them (`power_cut.py`).

| mode | at the n-th write |
| --- | --- |
| count | nothing happens |
| before | the process is killed, the write is not made |
| torn | the first half of the data is written, then the process is killed |
| after | the write is made, then the process is killed; nobody hears the answer |
| cut | on a socket: the data is sent, the answer is lost, the connection is closed; the process lives |
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("write_shim.c")
MODES = {"count": 0, "before": 1, "torn": 2, "after": 3, "cut": 4}
_HEADER = struct.Struct("=cIIQQ")


@dataclass(frozen=True)
class Stop:
    """Which writes to count, and at which of them to stop."""

    folder: str = ""
    port: int = 0
    only_requests: bool = False
    """On the port, count what is part of a PUT, POST or DELETE; otherwise everything."""
    at: int = 0
    mode: str = "count"
    trace: str = ""
    """A file for everything that was written."""


@dataclass(frozen=True)
class Write:
    """One call of the trace.

    `kind` is C create, W write, T truncate, R rename, X exchange, L link, U unlink, M make a folder, D remove
    one, F flush, S send, N one that failed, and A for what the process itself noted.
    """

    kind: str
    path: str
    target: str
    number: int
    """Where the data begins; for T the new size."""
    data: bytes = field(repr=False)


@cache
def compiled() -> Path:
    """The shim; skips the test where it cannot be had."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip("writes are counted on Linux on x86_64 alone: the crash points are not tried")
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        message = "no C compiler (gcc): the crash points are not tried; install gcc and libc6-dev"
        if os.environ.get("GARE_NEEDS_COMPILER"):
            raise AssertionError(message)
        pytest.skip(message)
    target = Path(tempfile.mkdtemp(prefix="gare-shim-")) / "write_shim.so"
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", target, SOURCE, "-ldl", "-lpthread"]
    subprocess.run(list(map(str, command)), check=True)
    return target


def environment() -> dict[str, str]:
    """What a process needs that is to be stopped."""
    return {**os.environ, "LD_PRELOAD": str(compiled()), "OMP_NUM_THREADS": "1"}


# --- in the process ----------------------------------------------------------------------------------------


def _shim() -> ctypes.CDLL:
    return ctypes.CDLL(os.environ["LD_PRELOAD"])


def arm(stop: Stop) -> None:
    """Count from now on."""
    trace = os.open(stop.trace, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600) if stop.trace else -1
    folder = os.path.realpath(stop.folder) if stop.folder else ""
    shim = _shim()
    shim.gare_arm.argtypes = [ctypes.c_char_p, *[ctypes.c_int] * 2, ctypes.c_long, *[ctypes.c_int] * 2]
    arguments = (os.fsencode(folder), stop.port, stop.only_requests, stop.at, MODES[stop.mode], trace)
    if shim.gare_arm(*arguments):
        raise OSError("writes cannot be counted here: the kernel refuses a seccomp filter")


def disarm() -> int:
    """Count no more; how many writes there were."""
    shim = _shim()
    shim.gare_disarm.restype = ctypes.c_long
    return int(shim.gare_disarm())


def note(text: str) -> None:
    """Put a line into the trace: something was acknowledged."""
    _shim().gare_note(text.encode())


# --- the trace ---------------------------------------------------------------------------------------------


def read_trace(file: str | os.PathLike[str]) -> Iterator[Write]:
    """The writes of a process, in their order."""
    content = Path(file).read_bytes()
    at = 0
    while at < len(content):
        kind, first, second, number, size = _HEADER.unpack_from(content, at)
        at += _HEADER.size
        parts = []
        for length in (first, second, size):
            parts.append(content[at : at + length])
            at += length
        yield Write(kind.decode(), os.fsdecode(parts[0]), os.fsdecode(parts[1]), number, parts[2])
