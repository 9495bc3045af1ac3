"""Files and folders that survive a kill: written beside their place, flushed, then moved into it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PART_SUFFIX = ".part"
"""The ending of a file that is not finished; what a killed process leaves behind has it."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to; it takes the place of `path` when the block ends without an error.

    A reader sees the old file or the new one, never half of one. After a power cut it is one of the two.
    """
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}{PART_SUFFIX}")
    try:
        yield part
        flush(part)
        os.replace(part, path)
        flush(path.parent)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def creating(path: Path) -> Iterator[Path]:
    """Yield a path to write to; it becomes `path` when the block ends without an error.

    Nothing is ever replaced: not even what came to be there meanwhile, nor a link that leads nowhere.

    Raises:
        FileExistsError: there is something of that name.
    """
    if os.path.lexists(path):
        raise FileExistsError(path)
    part = path.with_name(f"{uuid.uuid4().hex[:16]}{PART_SUFFIX}")  # short, however long the name is
    try:
        yield part
        flush(part)
        rename_new(part, path)
        flush(path.parent)
    finally:
        part.unlink(missing_ok=True)


def rename_new(old: Path, new: Path) -> None:
    """Rename a file, to a name that nothing has.

    Raises:
        FileExistsError: something has it.
    """
    if _renameat2(old, new, _NO_REPLACE):
        return
    try:
        os.link(old, new)  # the same in two steps
        old.unlink()
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if os.path.lexists(new):
            raise FileExistsError(new) from None
        os.rename(old, new)


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder to fill; it takes the place of `folder` when the block ends without an error.

    Files of the old folder that the new one does not have are kept. After a kill or a power cut the old
    folder is there or the new one, whole. Only where the file system cannot exchange two folders (NFS, macOS)
    a kill at the wrong moment leaves none; the next call finds the old one beside its place and puts it back.
    """
    recover_folder(folder)
    part, old = _beside(folder, uuid.uuid4().hex[:8]), _beside(folder, _OLD)
    for leftover in folder.parent.glob(f"{folder.name}.*{PART_SUFFIX}"):
        shutil.rmtree(leftover)
    part.mkdir(parents=True)
    try:
        yield part
        for path in folder.iterdir() if folder.is_dir() else ():
            if not (part / path.name).exists():
                (shutil.copytree if path.is_dir() else shutil.copy2)(path, part / path.name)
        for place, _, names in os.walk(part, topdown=False):
            for name in (*names, "."):
                flush(Path(place) / name)
        if not folder.is_dir():
            os.rename(part, folder)
        elif not _exchange(part, folder):
            os.rename(folder, old)
            os.rename(part, folder)
        flush(folder.parent)
    finally:
        for rest in (part, old):
            if folder.is_dir():
                shutil.rmtree(rest, ignore_errors=True)


def recover_folder(folder: Path) -> None:
    """Put a folder back that a kill left beside its place, where folders cannot be exchanged."""
    old = _beside(folder, _OLD)
    if old.is_dir() and not folder.exists():
        os.rename(old, folder)


_OLD = "old"
_NO_REPLACE, _EXCHANGE = 1, 2  # RENAME_NOREPLACE, RENAME_EXCHANGE
_AT_FDCWD = -100


def _beside(path: Path, word: str) -> Path:
    return path.with_name(f"{path.name}.{word}{PART_SUFFIX}")


def _exchange(one: Path, other: Path) -> bool:
    """Give two folders each other's name in one step; False where that cannot be done."""
    return _renameat2(one, other, _EXCHANGE)


def _renameat2(one: Path, other: Path, way: int) -> bool:
    with contextlib.suppress(AttributeError, OSError, TypeError):  # not Linux
        rename = ctypes.CDLL(None, use_errno=True).renameat2
        return bool(rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), way) == 0)
    return False


def write_text(path: Path, text: str) -> None:
    """Write a text file as a whole."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file as a whole."""
    with replacing(path) as part:
        part.write_bytes(content)


def whole_lines(path: Path) -> list[str]:
    """The lines of a file that a run appends to; none if there is no file.

    A kill may have cut the last line off: it is left out, as are empty ones.
    """
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [line for line in text[: text.rfind("\n") + 1].splitlines() if line]


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
