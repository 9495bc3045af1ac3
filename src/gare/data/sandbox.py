"""The box a decoding process shuts itself into: what is not needed to turn bytes into pictures is refused.

Three layers of the Linux kernel, each used where it is there. Each keeps a decoder from opening a file:

    namespaces   an empty file system, no network, no privileges (where users may make them)
    landlock     no file is opened, made or run; from kernel 6.12 on, no signal leaves either (from 5.13)
    seccomp      only the system calls of `seccomp_filter` (x86-64 and arm64)

Everything must be imported before. There is no way out again, for the process or its threads.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import warnings
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cache

from gare.data.seccomp_filter import install_filter

LAYERS = ("namespaces", "landlock", "seccomp")
"""In the order they are entered: each needs system calls that the next one refuses."""

_PR_SET_NO_NEW_PRIVS, _PR_SET_DUMPABLE = 38, 4
_LANDLOCK_CREATE, _LANDLOCK_RESTRICT = 444, 446  # the same number on every machine
_LANDLOCK_VERSION = 1
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
"""From this version of Landlock on, so many rights to files are known."""
_NETWORK_RIGHTS, _NETWORK_SINCE = 0b11, 4
_SCOPES, _SCOPES_SINCE = 0b11, 6
_NEW_USER, _NEW_NET, _NEW_IPC, _NEW_UTS, _NEW_MOUNTS = (
    0x10000000,
    0x40000000,
    0x08000000,
    0x04000000,
    0x00020000,
)
_PRIVATE, _RECURSIVE, _READ_ONLY = 1 << 18, 1 << 14, 1
_PROBE_S = 20


@dataclass(frozen=True)
class Box:
    """Which layers hold a process, and why others do not."""

    layers: tuple[str, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def warning(self) -> str:
        """What to know before files of strangers are decoded; empty where seccomp holds decoders."""
        if "seccomp" in self.layers:
            return ""
        if not self.layers:
            return f"this system has no sandbox for decoders, only limits: {self.describe()}"
        return f"decoders are held in part only: {self.describe()}"

    def describe(self) -> str:
        """One line for people.

        >>> Box(("seccomp",), {"landlock": "Function not implemented"}).describe()
        'seccomp (not landlock: Function not implemented)'
        """
        missing = "; ".join(f"not {layer}: {why}" for layer, why in self.missing.items())
        return (", ".join(self.layers) or "none") + (f" ({missing})" if missing else "")


def enter_box(layers: Collection[str] = LAYERS) -> Box:
    """Shut this process in, with as many of these layers as the system has. It must have one thread only."""
    if sys.platform != "linux":
        return Box(missing=dict.fromkeys(LAYERS, f"{sys.platform} has none"))
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    ways = {"namespaces": _enter_namespaces, "landlock": _enter_landlock, "seccomp": install_filter}
    entered, missing = [], {}
    for layer in LAYERS:
        if layer not in layers:
            missing[layer] = "decoding does not work in it here"
            continue
        try:
            ways[layer](libc)
            entered.append(layer)
        except (OSError, AttributeError) as error:
            missing[layer] = getattr(error, "strerror", None) or str(error)
    return Box(tuple(entered), missing)


def _enter_namespaces(libc: ctypes.CDLL) -> None:
    """A user without rights, in an empty read-only file system, without a network."""
    _check(libc.unshare(_NEW_USER | _NEW_NET | _NEW_IPC | _NEW_UTS | _NEW_MOUNTS))
    _check(libc.mount(b"none", b"/", None, ctypes.c_ulong(_PRIVATE | _RECURSIVE), None))
    # Over a folder that every system has; for this process alone.
    _check(libc.mount(b"none", b"/proc", b"tmpfs", ctypes.c_ulong(_READ_ONLY), b"size=4k,mode=555"))
    os.chdir("/proc")
    _check(libc.chroot(b"."))
    os.chdir("/")


def landlock_version(libc: ctypes.CDLL) -> int:
    """What the kernel has of Landlock.

    Raises:
        OSError: nothing.
    """
    return _check(libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), _LANDLOCK_VERSION))


def _enter_landlock(libc: ctypes.CDLL) -> None:
    rules = landlock_rules(landlock_version(libc))
    descriptor = _check(libc.syscall(_LANDLOCK_CREATE, rules, ctypes.c_size_t(len(rules)), 0))
    try:
        _check(libc.syscall(_LANDLOCK_RESTRICT, descriptor, 0))
    finally:
        os.close(descriptor)


def landlock_rules(version: int) -> bytes:
    """All rights this version knows, to be granted to nothing."""
    num_rights = max(count for since, count in _FILE_RIGHTS.items() if version >= since)
    rules = struct.pack("=Q", (1 << num_rights) - 1)
    if version >= _NETWORK_SINCE:
        rules += struct.pack("=Q", _NETWORK_RIGHTS)
    if version >= _SCOPES_SINCE:
        rules += struct.pack("=Q", _SCOPES)
    return rules


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


@cache
def probe_box() -> Box:
    """What this system has, found out by a child process that really goes in."""
    if sys.platform != "linux":
        return enter_box()
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Python and Lance warn that a child of a process with threads may hang; this one takes no lock of
        # theirs.
        warnings.simplefilter("ignore")
        child = os.fork()
    if not child:
        try:
            box = enter_box()
            os.write(writing, repr((box.layers, box.missing)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    try:
        import ast
        import select

        said = os.read(reading, 4096) if select.select([reading], [], [], _PROBE_S)[0] else b""
        if not said:
            return Box(missing=dict.fromkeys(LAYERS, "the kernel ends a process that asks for it"))
        layers, missing = ast.literal_eval(said.decode())
        return Box(layers, missing)
    finally:
        import signal

        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
