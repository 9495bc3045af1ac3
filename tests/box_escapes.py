"""What a decoder that was taken over would try, run by tests inside the box. It says how each try ended.

A worker imports it; it needs nothing but the standard library and the messages.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator

from gare.data.decoder_messages import Error, Facts, Failure, Frame

_libc = ctypes.CDLL(None, use_errno=True)


def _call(function: Callable[..., int], *arguments: object) -> None:
    if function(*arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")


def _connect(port: int) -> None:
    with socket.socket() as client:
        client.connect(("127.0.0.1", port))


def _write(path: str) -> None:
    with open(path, "w") as file:
        file.write("was here")


def _thread_works() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()


def attempts(place: str, port: int, other: int) -> dict[str, Callable[[], object]]:
    """Name and deed. `place` is a folder with a file `secret`, `port` one that listens, `other` a process."""
    return {
        "read a file": lambda: open(f"{place}/secret").read(),
        "list a folder": lambda: os.listdir(place),
        "write a file": lambda: _write(f"{place}/new"),
        "change a file": lambda: os.truncate(f"{place}/secret", 0),
        "remove a file": lambda: os.unlink(f"{place}/secret"),
        "rename a file": lambda: os.rename(f"{place}/secret", f"{place}/gone"),
        "make a folder": lambda: os.mkdir(f"{place}/folder"),
        "change a file's mode": lambda: os.chmod(f"{place}/secret", 0o777),
        "follow a link": lambda: os.readlink("/proc/self/exe"),
        "read the parent's environment": lambda: open(f"/proc/{other}/environ", "rb").read(),
        "connect": lambda: _connect(port),
        "listen": lambda: socket.socketpair(),
        "run a program": lambda: os.execv(sys.executable, ["python", "-c", ""]),
        "fork": lambda: os.fork() or os._exit(0),
        "signal another process": lambda: os.kill(other, 0),
        "trace another process": lambda: _call(_libc.ptrace, 16, other, 0, 0),
        "raise its own limits": lambda: _call(_libc.prctl, 4, 1, 0, 0, 0),
        "map memory as code": lambda: _call(_libc.mprotect, _page(), 4096, 7),
        "change its root": lambda: os.chroot("/"),
    }


def _page() -> ctypes.c_void_p:
    global _kept
    _kept = mmap.mmap(-1, 8192)
    address = ctypes.addressof(ctypes.c_char.from_buffer(_kept))
    return ctypes.c_void_p(address + (-address % 4096))


def try_all(item: tuple[str, int, int]) -> Iterator[Failure | Facts]:
    """A message for every try: `NAME: done`, or `NAME: ` and the error."""
    for name, deed in attempts(*item).items():
        try:
            deed()
            yield Failure("unreadable", f"{name}: done")
        except OSError as error:
            yield Failure("unreadable", f"{name}: {type(error).__name__}")
    _thread_works()
    yield Facts(1.0, 0, 0)


def tell_surroundings(_: object, descriptor: int) -> Iterator[Error | Failure | Facts]:
    """The environment, the open descriptors with their rights, and the first bytes of its file."""
    for name, value in os.environ.items():
        yield Failure("unreadable", f"variable {name}={value[:100]}")
    for number in range(64):
        try:
            mode = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE
        except OSError:
            continue
        yield Failure("unreadable", f"descriptor {number} {mode}")
    yield Failure("unreadable", f"modules {' '.join(sorted(sys.modules))}"[:1900])
    yield Failure("unreadable", f"torch {'torch' in sys.modules}")
    yield Failure("unreadable", f"file {descriptor} {os.read(descriptor, 6)!r}")
    yield Facts(float(os.getpid()), 0, 0)


def use_two_files(place: str, reading: int, writing: int) -> Iterator[Failure | Facts]:
    """As one that cuts a clip: it may read the one file and write the other, and tries to do more."""
    tries: dict[str, Callable[[], object]] = {
        "read the film": lambda: os.read(reading, 4),
        "write the clip": lambda: os.write(writing, b"clip"),
        "write the film": lambda: os.write(reading, b"evil"),
        "make the clip a program": lambda: os.fchmod(writing, 0o777),
        "name the clip": lambda: os.link(f"/proc/self/fd/{writing}", f"{place}/evil"),
        "open another file": lambda: os.open(f"{place}/secret", os.O_RDWR),
    }
    for name, attempt in tries.items():
        try:
            attempt()
            yield Failure("unreadable", f"done: {name}")
        except OSError:
            yield Failure("unreadable", f"refused: {name}")
    yield Facts(1.0, 0, 0)


def tell_process(_: object) -> Iterator[Facts]:
    yield Facts(float(os.getpid()), 0, 0)


def send_raw(item: bytes, descriptor: int | None = None) -> Iterator[Frame]:
    """Past the protocol: these bytes, as they are."""
    os.write(3, item)
    yield from ()


def stall(item: bytes, descriptor: int | None = None) -> Iterator[Frame]:
    """The beginning of a message, and then nothing."""
    os.write(3, struct.pack("<B3xI", 11, 100) + item)
    time.sleep(3600)
    yield from ()
