"""Videos on object storage: found by listing, and fetched into scratch space when they are to be read.

A file there is known by its address, `s3://bucket/key`, its size and its date. One that has not changed is
not fetched. One that is wanted is fetched whole, for as long as it is hashed and decoded: a decoder reads
forth and back. Scratch space has a limit, leaves some of the disk free, and is emptied by whoever made it;
what a process that was killed left behind is removed by the next one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from gare.data.containers import VIDEO_SUFFIXES
from gare.data.object_storage import is_remote, list_objects, open_storage
from gare.errors import LibraryError
from gare.library.index.scan import FoundFile, Problem, Scan, scan_folders

SCRATCH_BYTES = 16 * 2**30
"""What objects in work may take of the disk, in each process that indexes."""
SCRATCH_VARIABLE = "GARE_SCRATCH"
"""The environment variable that names another folder for scratch space than the system's."""
_LEFT_FREE_BYTES = 2**30
_BLOCK_BYTES = 8 * 2**20
_WAIT_S = 0.5
_PREFIX = "gare-scratch-"


class Unreachable(OSError):
    """An object that could not be fetched this time; the next run tries again."""


def normal_source(source: str) -> str:
    """A source as the ledger knows it: the address of a prefix without its last slash, or an absolute path.

    >>> normal_source("s3://bucket/videos/"), normal_source("file:///mnt/my%20videos")
    ('s3://bucket/videos', '/mnt/my videos')

    Raises:
        LibraryError: it is an address of another kind.
    """
    scheme, is_address, rest = source.partition("://")
    if is_remote(source):
        return f"{scheme}://{rest.strip('/')}"
    if scheme == "file" and is_address:
        host, slash, path = unquote(rest).partition("/")
        if host not in ("", "localhost"):
            raise LibraryError(f"{source} is on another machine, {host}; a folder of this one is file:///…")
        source = f"{slash}{path}"
    elif is_address and not os.path.exists(source):
        raise LibraryError(f"{source} cannot be read; give a folder, a video, file:///…, s3://… or gs://…")
    return os.path.abspath(os.path.expanduser(source))


def has_objects(root: str) -> bool:
    """Whether there is anything at an address, or below it."""
    return bool(_list(root))


def scan_sources(
    roots: Sequence[str], *, exclude: Sequence[str] = (), hidden: bool = False, skip: Sequence[str] = ()
) -> Scan:
    """Every video in these folders and files and at these addresses; arguments as for `scan_folders`."""
    local = [root for root in roots if not is_remote(root)]
    found = scan_folders(local, exclude=exclude, hidden=hidden, skip=skip)
    for root in roots:
        if is_remote(root):
            scan_objects(root, found, exclude=exclude, hidden=hidden)
    found.files = sorted({file.path: file for file in found.files}.values(), key=lambda file: file.path)
    return found


def scan_objects(root: str, found: Scan, *, exclude: Sequence[str] = (), hidden: bool = False) -> None:
    """Add the videos at an address, or below it; names as for folders."""
    for info in _list(root):
        scheme = root.partition("://")[0]
        path = f"{scheme}://{info.path}"
        below = path.removeprefix(root).strip("/")
        names = (below or path.rpartition("/")[2]).split("/")
        if not hidden and any(name.startswith(".") for name in names):
            continue
        if any(_fits(path, names, pattern) for pattern in exclude):
            continue
        if below and os.path.splitext(path)[1].lower() not in VIDEO_SUFFIXES:
            continue
        if info.mtime_ns is None:
            found.problems.append(Problem(path, "unreadable", "the storage does not say when it was written"))
            continue
        found.files.append(FoundFile(path, info.size, info.mtime_ns))


def _fits(path: str, names: Sequence[str], pattern: str) -> bool:
    if "/" in pattern:
        return fnmatch(path, pattern) or fnmatch(path, f"*/{pattern}")
    return any(fnmatch(name, pattern) for name in names)


def _list(root: str) -> list[Any]:
    """The objects at an address: itself, or all below it."""
    import pyarrow as pa

    try:
        return list_objects(root)
    except (OSError, pa.ArrowException) as error:
        raise LibraryError(
            f"{root} cannot be listed: {_first_line(error)}. Check the address, the credentials and that the "
            "service runs"
        ) from error


class Scratch:
    """A folder for objects in work, with a limit on what they take.

    Args:
        limit_bytes: of all objects together. A larger one cannot be read.
    """

    def __init__(self, limit_bytes: int = SCRATCH_BYTES) -> None:
        self._limit = limit_bytes
        self._folder: Path | None = None
        self._sizes: dict[str, int] = {}
        self._room = threading.Condition()
        self._is_closed = False
        self._number = 0

    def fetch(self, file: FoundFile) -> str:
        """The path of a copy; it waits until there is room. Whoever has it releases it.

        Raises:
            Unreachable: it cannot be fetched now, or is larger than the whole limit.
        """
        place = self._reserve(file)
        try:
            return self._fetch(file, place)
        except BaseException:
            self.release(place)
            raise

    def release(self, place: str) -> None:
        """Remove a copy."""
        with suppress(FileNotFoundError):
            os.unlink(place)
        with self._room:
            self._sizes.pop(place, None)
            self._room.notify_all()

    def close(self) -> None:
        """Remove the folder; who waits for room is told to stop."""
        with self._room:
            self._is_closed = True
            self._room.notify_all()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _reserve(self, file: FoundFile) -> str:
        if file.size > self._limit:
            raise Unreachable(
                f"it has {file.size / 1e9:.1f} GB, and scratch space is limited to {self._limit / 1e9:.1f} "
                "GB; allow more with --scratch"
            )
        with self._room:
            folder = self._made()
            while not self._is_closed:
                lies_idle = not self._sizes
                has_disk = shutil.disk_usage(folder).free - file.size >= _LEFT_FREE_BYTES
                if has_disk and sum(self._sizes.values()) + file.size <= self._limit:
                    self._number += 1
                    place = str(folder / f"{self._number}{os.path.splitext(file.path)[1].lower()}")
                    self._sizes[place] = file.size
                    return place
                if lies_idle:  # nothing of ours will be released
                    raise Unreachable(
                        f"the disk of {folder.parent} has no room for {file.size / 1e9:.1f} GB; free some, "
                        f"or name another folder in ${SCRATCH_VARIABLE}"
                    )
                self._room.wait(_WAIT_S)
        raise Unreachable("the run ended before it was fetched")

    def _fetch(self, file: FoundFile, place: str) -> str:
        import pyarrow as pa

        system, path = open_storage(file.path)
        try:
            num_bytes = 0
            with system.open_input_stream(path) as source, open(place, "wb") as target:
                while block := source.read(_BLOCK_BYTES):
                    num_bytes += len(block)
                    if self._is_closed or num_bytes > file.size:
                        break
                    target.write(block)
            (info,) = system.get_file_info([path])
        except (OSError, pa.ArrowException) as error:
            raise Unreachable(f"it cannot be fetched: {_first_line(error)}") from error
        if (num_bytes, info.size, info.mtime_ns) != (file.size, file.size, file.mtime_ns):
            raise Unreachable("it changed since it was listed; it is tried again in the next run")
        return place

    def _made(self) -> Path:
        if self._folder is None:
            remove_left_behind()
            prefix = f"{_PREFIX}{os.getpid()}-"
            try:
                self._folder = Path(tempfile.mkdtemp(prefix=prefix, dir=_scratch_folder()))
            except OSError as error:
                raise Unreachable(
                    f"there is no scratch space in {_scratch_folder()} ({error.strerror}); name a folder "
                    f"that can be written in ${SCRATCH_VARIABLE}"
                ) from None
        return self._folder


def _scratch_folder() -> Path:
    return Path(os.environ.get(SCRATCH_VARIABLE) or tempfile.gettempdir())


def remove_left_behind() -> None:
    """Remove the scratch space of processes of this machine that are not there any more."""
    for folder in _scratch_folder().glob(f"{_PREFIX}*-*"):
        process = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if process.isdecimal() and not Path(f"/proc/{process}").exists() and Path("/proc/self").exists():
            shutil.rmtree(folder, ignore_errors=True)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__
