"""Which files of a folder are videos. Every file is met once, whatever links lead to it."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch

# fmt: off
VIDEO_SUFFIXES = frozenset({
    ".3g2", ".3gp", ".asf", ".avi", ".divx", ".dv", ".f4v", ".flv", ".h264", ".h265", ".hevc", ".ivf",
    ".m1v", ".m2ts", ".m2v", ".m4v", ".mj2", ".mjpeg", ".mkv", ".mov", ".mp4", ".mpe", ".mpeg", ".mpg",
    ".mts", ".mxf", ".nsv", ".nut", ".obu", ".ogm", ".ogv", ".qt", ".rm", ".rmvb", ".ts", ".vob", ".webm",
    ".wmv", ".wtv", ".y4m",
})
# fmt: on
_MAGICS = (
    b"\x1a\x45\xdf\xa3",  # Matroska, WebM
    b"FLV\x01",
    b"\x00\x00\x01\xba",  # MPEG program stream
    b"\x00\x00\x01\xb3",  # MPEG video
    b"\x30\x26\xb2\x75\x8e\x66\xcf\x11",  # Windows Media
)
_UNSHOWN = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_ALSO_OTHER_THINGS = frozenset({"", ".ts", ".dat", ".bin"})
"""Suffixes that only the first bytes decide: `.ts` is a programming language too."""


@dataclass(frozen=True)
class FoundFile:
    path: str
    """Absolute, POSIX separators."""
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Problem:
    """A file or folder that cannot be used, by the name under which it is reported."""

    path: str
    kind: str
    message: str
    is_folder: bool = False


@dataclass
class Walk:
    """What a walk met."""

    files: list[FoundFile] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def walk(
    roots: Sequence[str],
    *,
    exclude: Sequence[str] = (),
    hidden: bool = False,
    skip: Sequence[str] = (),
) -> Walk:
    """Every video file in these files and folders, in the order of their names.

    Args:
        roots: absolute paths. A file given by name is taken whatever it is called.
        exclude: patterns (`*`, `?`, `[abc]`) of names; of paths, or ends of paths, where one has a slash.
        hidden: take files and folders whose name begins with a dot as well.
        skip: folders to leave out, such as the library's own.
    """
    walker = _Walker(exclude, hidden, {path for path in map(os.path.abspath, skip)})
    for root in roots:
        walker.add_root(root)
    walker.follow_links()
    walker.found.files.sort(key=lambda file: file.path)
    return walker.found


def looks_like_video(start: bytes) -> bool:
    """Judge by the first bytes.

    >>> looks_like_video(bytes(4) + b"ftypisom"), looks_like_video(b"import os\\n")
    (True, False)
    """
    if start[4:8] in (b"ftyp", b"moov", b"mdat"):
        return True
    if start[:4] == b"RIFF":
        return start[8:12] == b"AVI "
    if start[:1] == b"\x47":  # transport streams repeat this byte every 188 (or, with a time code, 192)
        return len(start) > 188 and start[188:189] == b"\x47"
    if start[4:5] == b"\x47" and len(start) > 196:
        return start[196:197] == b"\x47"
    return start.startswith(_MAGICS)


def printable(path: str) -> str:
    """The path as it can be stored and printed: bytes that are not UTF-8 become `\\xNN`.

    >>> printable("caf\\udce9.mp4")
    'caf\\\\xe9.mp4'
    """
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def on_one_line(path: str) -> str:
    """The path for a terminal: what breaks lines, moves the cursor or turns text around is spelt out.

    >>> on_one_line("a\\nb\\x1b[31m.mp4")
    'a\\\\nb\\\\x1b[31m.mp4'
    """
    return _UNSHOWN.sub(lambda found: found[0].encode("unicode_escape").decode(), path)


class _Walker:
    def __init__(self, exclude: Sequence[str], hidden: bool, skip: set[str]) -> None:
        self.found = Walk()
        self._exclude = exclude
        self._hidden = hidden
        self._skip = skip
        self._folders_met: set[tuple[int, int]] = set()
        self._paths_met: set[str] = set()
        self._files_met: set[tuple[int, int]] = set()
        self._links: list[str] = []

    def add_root(self, root: str) -> None:
        if os.path.isdir(root):
            self._add_folder(root)
        else:
            self._add_file(root)

    def follow_links(self) -> None:
        """Links come last, so that what lies in the folders is met under its own name."""
        while self._links:
            links, self._links = sorted(self._links), []
            for path in links:
                if os.path.isdir(path):
                    self._add_folder(path)
                else:
                    self._add_link(path)

    def _add_folder(self, top: str) -> None:
        folders = [top]
        while folders:
            folder = folders.pop()
            if os.path.abspath(folder) in self._skip:
                continue
            try:
                status = os.stat(folder)
                if (status.st_dev, status.st_ino) in self._folders_met:
                    continue
                self._folders_met.add((status.st_dev, status.st_ino))
                with os.scandir(folder) as entries:
                    inside = sorted(entries, key=lambda entry: entry.name, reverse=True)
            except OSError as error:
                self._report(folder, *explain(error), is_folder=True)
                continue
            folders += [entry.path for entry in inside if self._sort_in(entry)]

    def _sort_in(self, entry: os.DirEntry[str]) -> bool:
        """True for a folder to go into; files and links are dealt with here."""
        if self._is_unwanted(entry):
            return False
        try:
            if entry.is_symlink():
                if entry.is_dir() or _is_candidate(entry.path):
                    self._links.append(entry.path)
                return False
            if entry.is_dir():
                return True
            if entry.is_file(follow_symlinks=False) and _is_candidate(entry.path):
                self._add_file(entry.path)
        except OSError as error:
            self._report(entry.path, *explain(error))
        return False

    def _is_unwanted(self, entry: os.DirEntry[str]) -> bool:
        if entry.name.startswith(".") and not self._hidden:
            return True
        return any(_fits(entry, pattern) for pattern in self._exclude)

    def _add_link(self, path: str) -> None:
        try:
            status = os.stat(path)
        except OSError as error:
            return self._report(path, *explain(error))
        if (status.st_dev, status.st_ino) not in self._files_met:
            self._add_file(path)

    def _add_file(self, path: str) -> None:
        if path in self._paths_met:
            return
        self._paths_met.add(path)
        try:
            status = os.stat(path)
        except OSError as error:
            return self._report(path, *explain(error))
        if not stat.S_ISREG(status.st_mode):
            return self._report(path, "unreadable", "it is not a regular file")
        self._files_met.add((status.st_dev, status.st_ino))
        if printable(path) != path:
            return self._report(path, "bad_name", "its name is not UTF-8; rename it")
        self.found.files.append(FoundFile(path.replace(os.sep, "/"), status.st_size, status.st_mtime_ns))

    def _report(self, path: str, kind: str, message: str, is_folder: bool = False) -> None:
        self.found.problems.append(Problem(printable(path), kind, message, is_folder))


def _fits(entry: os.DirEntry[str], pattern: str) -> bool:
    if "/" not in pattern:
        return fnmatch(entry.name, pattern)
    return fnmatch(entry.path, pattern) or fnmatch(entry.path, f"*/{pattern}")


def _is_candidate(path: str) -> bool:
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in _ALSO_OTHER_THINGS:
        return suffix in VIDEO_SUFFIXES
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return False  # reading a pipe would wait for ever
        with open(path, "rb") as file:
            return looks_like_video(file.read(256))
    except OSError:
        return suffix in VIDEO_SUFFIXES  # it will be met again, and reported, when it is read


def explain(error: OSError) -> tuple[str, str]:
    """Kind and message of what the system said about a file."""
    if isinstance(error, PermissionError):
        return "no_permission", "you may not read it; change its permissions"
    if isinstance(error, FileNotFoundError):
        return "missing", "it is not there (a link that leads nowhere, or it was just deleted)"
    return "unreadable", f"it cannot be read: {error.strerror or error}"


def is_below(path: str, folder: str) -> bool:
    """Whether the path is the folder (or file) itself or lies in it.

    >>> is_below("/a/b/c.mp4", "/a/b"), is_below("/a/bc.mp4", "/a/b"), is_below("/x.mp4", "/")
    (True, False, True)
    """
    return path == folder or path.startswith(folder.rstrip("/") + "/")
