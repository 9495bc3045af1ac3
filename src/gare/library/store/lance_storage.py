"""What lies below Lance tables: one writer at a time, files that survive a power cut, errors that say why.

Lance never calls fsync. Here everything a commit refers to is flushed before the commit, and the commit
before it is acknowledged. What a power cut can still leave is a newest manifest that is empty, cut short or
has a hole: nobody was told of that commit, so it is set aside and the version before it stands.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from gare.atomic import flush
from gare.errors import DamagedLibraryError, GareError, LibraryError
from gare.library.store.store_protocol import damaged_library

Result = TypeVar("Result")
SET_ASIDE = "set-aside"
_MANIFEST_END = b"LANC"
_FOOTER = struct.Struct("<QHH4s")  # where the message begins, two versions, the end
_MESSAGES = (1, 2)  # fields of a manifest that are messages themselves: columns and fragments
_SURELY_WRITTEN_S = 300.0  # the kernel writes dirty pages back within half a minute
_SOURCE_PLACE = re.compile(r", /[^ ]+\.rs:\d+:\d+")  # Lance adds where in its own source it was
_LOCK_POLL_S = 0.01  # a commit takes some ten milliseconds


@dataclass
class Place:
    """A folder or a prefix on object storage that holds the tables of one library."""

    uri: str
    read_only: bool
    options: dict[str, str] = field(default_factory=dict)
    session: Any = None
    """What its tables share in memory, a connection among it; None: each has its own."""

    @property
    def folder(self) -> Path | None:
        """The folder of the library; None on object storage."""
        return None if "://" in self.uri else Path(self.uri)

    @cached_property
    def _write_lock(self) -> contextlib.AbstractContextManager[object]:
        if self.folder is None:
            return contextlib.nullcontext()
        return FileLock(self.folder / ".write-lock", poll_interval=_LOCK_POLL_S)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Hold what a writer must hold: in a folder a lock, which the thread that has it may take again."""
        if self.read_only:
            raise LibraryError(f"library {self.uri} is open for reading only; open it for writing first")
        with explained(self.uri), self._write_lock:
            yield

    @contextlib.contextmanager
    def maintaining(self) -> Iterator[bool]:
        """Hold the lock of whoever maintains the library, if nobody else does; says whether."""
        if self.folder is None:
            yield True
            return
        try:
            lock = FileLock(self.folder / ".upkeep-lock").acquire(blocking=False)
        except Timeout:
            yield False
            return
        with lock:
            yield True


class Flusher:
    """Flushes the files of one table that are new since the last time."""

    def __init__(self, table: Path) -> None:
        self.table = table
        self._flushed: set[str] | None = None

    def flush(self) -> None:
        """Wait until every new file of the table is on the disk."""
        if self._flushed is None:  # files of a process that died before its flush are flushed too
            recent = time.time() - _SURELY_WRITTEN_S
            self._flushed = {path for path, entry in self._files() if _modified(entry) < recent}
        new = [path for path, _ in self._files() if path not in self._flushed]
        folders = {os.path.dirname(path) for path in new}
        for path in new:
            with contextlib.suppress(FileNotFoundError):  # a clean-up elsewhere may take it meanwhile
                flush(Path(path))
        for folder in sorted(folders | {os.path.dirname(folder) for folder in folders}):
            with contextlib.suppress(FileNotFoundError):
                flush(Path(folder))
        self._flushed.update(new)

    def _files(self) -> Iterator[tuple[str, os.DirEntry[str]]]:
        pending = [str(self.table)]
        while pending:
            with contextlib.suppress(FileNotFoundError), os.scandir(pending.pop()) as entries:
                for entry in entries:
                    if entry.is_dir():
                        pending.append(entry.path)
                    else:
                        yield entry.path, entry


def _modified(entry: os.DirEntry[str]) -> float:
    """When a file was written; one that a clean-up took meanwhile counts as just now."""
    try:
        return entry.stat().st_mtime
    except FileNotFoundError:
        return math.inf


def folder_bytes(folder: Path) -> int:
    """How much room a folder takes, without what a clean-up takes away meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(place, name)).st_size
    return total


def broken_manifests(table: Path) -> list[Path]:
    """The newest manifests that are empty, cut short or have a hole, newest first."""
    broken = []
    for manifest in sorted((table / "_versions").glob("*.manifest")):  # names count down: newest first
        if is_whole(manifest.read_bytes()):
            break
        broken.append(manifest)
    return broken


def broken_older_manifests(table: Path) -> list[Path]:
    """Manifests behind the newest one that are empty, cut short or have a hole.

    Lance joins fragments in two commits, with no flush in between: a power cut may spoil the first alone.
    """
    older = sorted((table / "_versions").glob("*.manifest"))[1:]
    return [manifest for manifest in older if not is_whole(manifest.read_bytes())]


def is_whole(manifest: bytes) -> bool:
    """Whether a manifest has its end, and its message has no hole: no field of a message has the number 0."""
    if len(manifest) < _FOOTER.size or manifest[-len(_MANIFEST_END) :] != _MANIFEST_END:
        return False
    (position, *_) = _FOOTER.unpack(manifest[-_FOOTER.size :])
    message = manifest[position + 4 : -_FOOTER.size]
    if int.from_bytes(manifest[position : position + 4], "little") != len(message):
        return False
    try:
        fields = list(_fields(message))
        for number, content in fields:
            if number in _MESSAGES:
                list(_fields(content))
    except (IndexError, ValueError):
        return False
    return bool(fields)


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The fields of a protobuf message: their numbers, and the content of those that have a length."""
    at = 0
    while at < len(message):
        tag, at = _number(message, at)
        kind, content = tag & 7, b""
        if kind == 0:
            _, at = _number(message, at)
        elif kind == 2:
            size, at = _number(message, at)
            content, at = message[at : at + size], at + size
        else:
            at += {1: 8, 5: 4}.get(kind, len(message))
        if tag >> 3 == 0 or at > len(message):
            raise ValueError("no message")
        yield tag >> 3, content


def _number(message: bytes, at: int) -> tuple[int, int]:
    """A number of variable length, and where it ends."""
    value = shift = 0
    while True:
        byte = message[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at


def set_aside(manifest: Path) -> str:
    """Move a manifest out of its table, into a folder beside it; what to tell the user."""
    table = manifest.parent.parent
    folder = table.parent / SET_ASIDE
    folder.mkdir(exist_ok=True)
    target = folder / f"{table.stem}-{time.strftime('%Y%m%dT%H%M%S')}-{manifest.name}"
    size = manifest.stat().st_size
    os.replace(manifest, target)
    (manifest.parent / "latest_version_hint.json").unlink(missing_ok=True)  # it speaks of that version
    flush(folder)
    flush(manifest.parent)
    return (
        f"the last, unfinished write to '{table.stem}' was undone: its manifest has {size} bytes and no end, "
        f"as after a power cut; it is kept as {target}. Run 'gare index' again to write what is missing."
    )


# Lance reports everything as text; these words are the operating system's, in any of its layers.
_MEANINGS = {
    ("no space left", "disk quota", "os error 28", "file too large"): (
        "the disk is full. What was acknowledged is safe; free some space and run the same command again"
    ),
    ("read-only file system", "os error 30", "permission denied", "os error 13", "accessdenied"): (
        "it cannot be written. Check its permissions, or copy the library to a place you may write"
    ),
    ("error sending request", "connection refused", "timed out", "dns error", "service unavailable"): (
        "the storage cannot be reached. Check the address, the credentials and that the service runs"
    ),
    ("file name too long", "os error 36"): "its name is too long for a folder; give another --library",
    ("nosuchbucket", "invalidaccesskeyid", "signaturedoesnotmatch", "403 forbidden"): (
        "the storage refuses. Check the bucket's name, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    ),
    ("generic s3 error",): (
        "the storage answers with an error. Check the bucket's name, the address and the credentials"
    ),
}  # fmt: skip


# What Lance says of data files that are gone, cut short or overwritten.
_DAMAGE = (
    "not found: ",
    "failed to fill whole buffer",
    "not appear to be a lance file",
    "invalid magic",
    "unexpected eof",
    "end of file",
    "out of range",
    "lanceerror(io)",
    "lanceerror(schema)",
    "lanceerror(arrow)",
    "corrupt",
    "protobuf",
    "decompress",
    "invalid utf8",
    "task was aborted",
    "does not exist in schema",
)

_NO_DAMAGE = (
    "conflict",
    "already exists",
    "concurrent",
    "incompatible transaction",
)  # another writer was faster


def explanation(uri: str, error: Exception) -> LibraryError | None:
    """What an error of Lance or the system means, and what to do; None where nothing is known of it."""
    text = str(error).lower()
    for words, meaning in _MEANINGS.items():
        if any(word in text for word in words):
            known = LibraryError(f"library {uri}: {meaning}. ({_first_line(error)})")
            known.logged = meaning
            return known
    # Bytes break in more ways than anybody could list: what else Lance itself refuses to read is damage.
    is_of_lance = text.startswith("external error") or _SOURCE_PLACE.search(str(error)) is not None
    is_damage = is_of_lance and not any(word in text for word in _NO_DAMAGE)
    return damaged(uri, error) if is_damage or any(word in text for word in _DAMAGE) else None


@contextlib.contextmanager
def explained(uri: str) -> Iterator[None]:
    """Turn what Lance and the system raise into a `LibraryError` that says what to do."""
    try:
        yield
    except (GareError, FileNotFoundError):
        raise
    except UnicodeDecodeError as error:  # bytes that nobody wrote as text
        raise damaged(uri, "a text is not UTF-8") from error
    except (OSError, RuntimeError, ValueError, LookupError) as error:
        known = explanation(uri, error)
        if known is None:
            raise
        raise known from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # Lance meets bytes that it did not write
            raise
        raise damaged(uri, error) from error


def damaged(uri: str, what: BaseException | str) -> DamagedLibraryError:
    """The error for a library that cannot be read as it was written."""
    return damaged_library(uri, what if isinstance(what, str) else _first_line(what))


_TOO_LATE = ("conflict", "too many concurrent writers")  # what Lance says to a writer that lost


def with_retries(
    action: Callable[[], Result], *, seconds: float = 60.0, longest_pause_s: float = 2.0
) -> Result:
    """Repeat an action that lost against another writer, a little later each time."""
    deadline = time.monotonic() + seconds
    pause = 0.02
    while True:
        try:
            return action()
        except (OSError, RuntimeError, ValueError) as error:
            if not any(word in str(error).lower() for word in _TOO_LATE) or time.monotonic() > deadline:
                raise
        time.sleep(pause * random.uniform(0.5, 1.5))  # two that met once should not meet again
        pause = min(2 * pause, longest_pause_s)


def _first_line(error: BaseException) -> str:
    line = str(error).strip().partition("\n")[0]
    return _SOURCE_PLACE.sub("", line)[:300] or type(error).__name__
