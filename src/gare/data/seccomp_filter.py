"""Which system calls a decoding process may make, as a seccomp filter (Linux on x86-64 and arm64).

A list of what is allowed, not of what is forbidden: a call that a later kernel adds is refused. No entry
opens a file, makes a socket, starts a program, signals another process or changes what is known of a file.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

_X86_64, _ARM64 = "x86_64", "aarch64"
_AUDIT_ARCH = {_X86_64: 0xC000003E, _ARM64: 0xC00000B7}
_X32_BIT = 0x40000000  # x86-64 has a second set of numbers, from here on

# fmt: off
_NUMBERS: dict[str, tuple[int | None, int | None]] = {  # on x86-64, on arm64
    # the file, by its descriptor
    "read": (0, 63), "readv": (19, 65), "pread64": (17, 67), "lseek": (8, 62), "close": (3, 57),
    "close_range": (436, 436), "dup": (32, 23), "fcntl": (72, 25), "fstat": (5, 80), "newfstatat": (262, 79),
    "fadvise64": (221, 223),
    # the answers
    "write": (1, 64), "writev": (20, 66), "sendto": (44, 206), "sendmsg": (46, 211), "recvfrom": (45, 207),
    "recvmsg": (47, 212), "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72),
    # memory
    "brk": (12, 214), "munmap": (11, 215), "mremap": (25, 216), "madvise": (28, 233),
    "membarrier": (324, 283),
    # threads
    "futex": (202, 98), "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "getcpu": (309, 168),
    "set_robust_list": (273, 99), "get_robust_list": (274, 100), "rseq": (334, 293),
    "set_tid_address": (218, 96),
    # itself
    "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getuid": (102, 174),
    "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "uname": (63, 160),
    "sysinfo": (99, 179), "getrandom": (318, 278), "exit": (60, 93), "exit_group": (231, 94),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132), "restart_syscall": (219, 128),
    # clocks and limits
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115),
    "nanosleep": (35, 101), "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153),
    "getrusage": (98, 165), "getrlimit": (97, 163), "setrlimit": (160, 164),
}
# Allowed with some arguments only, or refused with an error of their own.
_MMAP, _MPROTECT, _CLONE, _CLONE3 = (9, 222), (10, 226), (56, 220), (435, 435)
_TGKILL, _PRLIMIT = (234, 131), (302, 261)
# fmt: on

_CLONE_THREAD = 0x10000
_PROT_EXEC = 4

# Classic BPF: load a word, jump if equal, jump if a bit is set, jump if greater or equal, return.
_LOAD, _EQUAL, _BITS, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_NUMBER, _ARCH = 0, 4
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2


def _error(number: int) -> int:
    return 0x00050000 | number


def _argument(index: int, *, high: bool = False) -> int:
    return 16 + 8 * index + 4 * high  # little endian, as both machines are


class _Program:
    """BPF instructions. A jump of 0 goes on with the next one."""

    def __init__(self) -> None:
        self.code: list[tuple[int, int, int, int]] = []

    def load(self, offset: int) -> None:
        self.code.append((_LOAD, 0, 0, offset))

    def answer(self, value: int) -> None:
        self.code.append((_RETURN, 0, 0, value))

    def answer_if(self, test: int, operand: int, value: int) -> None:
        self.code += [(test, 0, 1, operand), (_RETURN, 0, 0, value)]

    def answer_unless(self, test: int, operand: int, value: int) -> None:
        self.code += [(test, 1, 0, operand), (_RETURN, 0, 0, value)]

    def for_call(self, number: int, inner: _Program) -> None:
        """What `inner` says about this call; it must end with an answer."""
        self.code += [(_EQUAL, 0, len(inner.code), number), *inner.code]

    def to_bytes(self) -> bytes:
        return b"".join(struct.pack("=HBBI", *instruction) for instruction in self.code)


def make_filter(machine: str, process: int) -> bytes:
    """The filter for a process on a machine.

    Args:
        machine: x86_64 or aarch64, as `platform.machine()` calls it.
        process: its id: it may signal itself (abort does), and nobody else.
    """
    column = (_X86_64, _ARM64).index(machine)
    program = _Program()
    program.load(_ARCH)
    program.answer_unless(_EQUAL, _AUDIT_ARCH[machine], _KILL)
    program.load(_NUMBER)
    if machine == _X86_64:
        program.answer_if(_AT_LEAST, _X32_BIT, _error(errno.EPERM))
    for row in _NUMBERS.values():
        if (number := row[column]) is not None:
            program.answer_if(_EQUAL, number, _ALLOW)
    for call in (_MMAP, _MPROTECT):  # no memory becomes code
        program.for_call(call[column], _if_bit(_argument(2), _PROT_EXEC, _error(errno.EACCES), _ALLOW))
    program.for_call(_CLONE[column], _if_bit(_argument(0), _CLONE_THREAD, _ALLOW, _error(errno.EPERM)))
    # Its arguments lie in memory, where a filter cannot look; C libraries then fall back to clone.
    program.for_call(_CLONE3[column], _always(_error(errno.ENOSYS)))
    program.for_call(_TGKILL[column], _if_equal(_argument(0), process))
    program.for_call(_PRLIMIT[column], _if_equal(_argument(0), 0))
    program.answer(_error(errno.EPERM))
    return program.to_bytes()


def _always(value: int) -> _Program:
    inner = _Program()
    inner.answer(value)
    return inner


def _if_bit(argument: int, bit: int, then: int, otherwise: int) -> _Program:
    inner = _Program()
    inner.load(argument)
    inner.answer_if(_BITS, bit, then)
    inner.answer(otherwise)
    return inner


def _if_equal(argument: int, value: int) -> _Program:
    inner = _Program()
    inner.load(argument)
    inner.answer_if(_EQUAL, value, _ALLOW)
    inner.answer(_error(errno.EPERM))
    return inner


class _Instructions(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def install_filter(libc: ctypes.CDLL) -> None:
    """Put this thread, and those it starts, under the filter for good. Privileges must be given up before.

    Raises:
        OSError: the kernel has no seccomp, or no filter is known for this machine.
    """
    machine = platform.machine()
    if machine not in _AUDIT_ARCH:
        raise OSError(errno.ENOSYS, f"no list of system calls for {machine}")
    code = make_filter(machine, os.getpid())
    program = _Instructions(len(code) // 8, code)
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
