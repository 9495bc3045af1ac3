"""Which files of a folder are videos. Every file is met once, whatever links lead to it."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch

from gare.data.containers import VIDEO_SUFFIXES, looks_like_video

_UNSHOWN = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_ALSO_OTHER_THINGS = frozenset({"", ".ts", ".dat", ".bin"})
"""Suffixes that only the first bytes decide: `.ts` is a programming language too."""


@dataclass(frozen=True)
class FoundFile:
    """A video file as the scan found it."""

    path: str
    """Absolute, POSIX separators."""
    size: int
    mtime_ns: int


Identity = tuple[int, int, int, int, int]
"""Device, inode, size, and the times of the last change of the bytes and of the file in nanoseconds. It is
another one when the file was written to, replaced or renamed, even when it was put back since."""


def file_identity(status: os.stat_result) -> Identity:
    """What tells whether a file is still the one that was read."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@dataclass(frozen=True)
class Problem:
    """A file or folder that cannot be used, by the name under which it is reported."""

    path: str
    kind: str
    message: str
    is_folder: bool = False


@dataclass
class Scan:
    """The videos of some folders, and what could not be read there."""

    files: list[FoundFile] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def keep_only(self, paths: Container[str]) -> None:
        """Leave out all files but these; folders that cannot be read stay."""
        self.files = [file for file in self.files if file.path in paths]
        self.problems = [problem for problem in self.problems if problem.is_folder or problem.path in paths]


def scan_folders(
    roots: Sequence[str],
    *,
    exclude: Sequence[str] = (),
    hidden: bool = False,
    skip: Sequence[str] = (),
) -> Scan:
    """Every video file in these files and folders, in the order of their names.

    Args:
        roots: absolute paths. A file given by name is taken whatever it is called.
        exclude: patterns (`*`, `?`, `[abc]`) of names; of paths, or ends of paths, where one has a slash.
        hidden: take files and folders whose name begins with a dot as well.
        skip: folders to leave out, such as the library's own.
    """
    scanner = _Scanner(exclude, hidden, set(map(os.path.abspath, skip)))
    for root in roots:
        scanner.add_root(root)
    scanner.follow_links()
    scanner.found.files.sort(key=lambda file: file.path)
    return scanner.found


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


class _Scanner:
    def __init__(self, exclude: Sequence[str], hidden: bool, skip: set[str]) -> None:
        self.found = Scan()
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
