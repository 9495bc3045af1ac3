"""What a folder needs so that a power cut takes nothing that was acknowledged.

Lance never calls fsync. Here everything a commit refers to is flushed before the commit, and the commit
before it is acknowledged. What a power cut can still leave is a newest manifest that is empty or cut short:
nobody was told of that commit, so it is set aside and the version before it stands.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

SET_ASIDE = "set-aside"
_MANIFEST_END = b"LANC"
_SURELY_WRITTEN_S = 300.0  # the kernel writes dirty pages back within half a minute


class Flusher:
    """Flushes the files of one table that are new since the last time."""

    def __init__(self, table: Path) -> None:
        self.table = table
        self._flushed: set[str] | None = None

    def flush(self) -> None:
        if self._flushed is None:  # files of a process that died before its flush are flushed too
            recent = time.time() - _SURELY_WRITTEN_S
            self._flushed = {path for path, entry in self._files() if entry.stat().st_mtime < recent}
        new = [path for path, _ in self._files() if path not in self._flushed]
        folders = {os.path.dirname(path) for path in new}
        for path in new:
            with contextlib.suppress(FileNotFoundError):  # a clean-up elsewhere may take it meanwhile
                flush_path(path)
        for folder in sorted(folders | {os.path.dirname(folder) for folder in folders}):
            flush_path(folder)
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


def flush_path(path: str | Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def broken_manifests(table: Path) -> list[Path]:
    """The newest manifests that are empty or cut short, newest first."""
    broken = []
    for manifest in sorted((table / "_versions").glob("*.manifest")):  # names count down: newest first
        with open(manifest, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - len(_MANIFEST_END)))
            if file.read() == _MANIFEST_END:
                break
        broken.append(manifest)
    return broken


def set_aside(manifest: Path) -> str:
    """Move a manifest out of its table, into a folder beside it; what to tell the user."""
    table = manifest.parent.parent
    folder = table.parent / SET_ASIDE
    folder.mkdir(exist_ok=True)
    target = folder / f"{table.stem}-{time.strftime('%Y%m%dT%H%M%S')}-{manifest.name}"
    size = manifest.stat().st_size
    os.replace(manifest, target)
    flush_path(folder)
    flush_path(manifest.parent)
    return (
        f"the last, unfinished write to '{table.stem}' was undone: its manifest has {size} bytes and no end, "
        f"as after a power cut; it is kept as {target}. Run 'gare index' again to write what is missing."
    )
