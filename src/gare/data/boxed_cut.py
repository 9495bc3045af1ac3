"""Clips and facts of files that may come from anywhere: the parent's side of `video_cut` and `media_facts`.

A process in the box reads the file and writes the clip. It has both as descriptors and can open nothing.
What it writes is as trustworthy as the file was: a clip of a hostile video is a hostile video. The process
has ended before the clip gets its name.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from gare.atomic import creating
from gare.data.decoder_messages import Bounds, Cut, Failure, Media, ProtocolError, Record
from gare.data.media_facts import read_media
from gare.data.video_cut import CutOrder, cut_video
from gare.data.workers import Limits, Refused, Task, WorkerLost, WorkerPool, map_in_processes
from gare.errors import ClipError

CONTAINERS = {".mp4": "mp4", ".m4v": "mp4", ".mov": "mov", ".mkv": "matroska", ".webm": "webm"}
"""What a clip can be, by the end of its name: FFmpeg's name of the container."""
LONGEST_S = 24 * 3600.0
"""No clip is longer."""
CUT_LIMITS = Limits(seconds=120, cpu_seconds=480, memory_bytes=4 * 2**30, written_bytes=2**50)
FACT_LIMITS = Limits(seconds=60, cpu_seconds=60)
_CLIP_MODE = 0o666
_LOOK_S = 0.2
OnCut = Callable[[float], None]
"""Called with the share that is done, now and then."""


@dataclass(frozen=True)
class CutClip:
    """A clip that was written, and where in the file it really begins and ends."""

    path: Path
    start: float
    end: float
    num_frames: int
    num_bytes: int


def container_for(path: str, *, exact: bool) -> str:
    """The end of the name of a clip of this file: as the file's own, or a container that takes any coding.

    >>> container_for("a.MP4", exact=False), container_for("a.avi", exact=False)
    ('.mp4', '.mkv')
    >>> container_for("a.avi", exact=True)
    '.mp4'
    """
    suffix = os.path.splitext(path)[1].lower()
    if exact:
        return suffix if suffix in (".mov", ".mkv") else ".mp4"
    return suffix if suffix in CONTAINERS else ".mkv"


def cut_clip(
    source: int | str | os.PathLike[str],
    target: Path,
    start: float,
    end: float,
    *,
    exact: bool = False,
    limits: Limits = CUT_LIMITS,
    on_cut: OnCut | None = None,
    on_wait: Callable[[], None] | None = None,
) -> CutClip:
    """Cut a part out of a video file, with all its sound.

    Without `exact` nothing is encoded anew: the clip begins at the keyframe before the start, and may end a
    few frames late. With it, the first and the last frame are those that were asked for.

    Args:
        source: a file, or a descriptor of one that is open.
        target: the file to write, in a folder that exists; the end of its name says which container.
        start: seconds from the file's first frame.
        end: likewise; past the end of the file means its end.
        exact: encode anew, as H.264 and AAC.
        limits: what the process may use.
        on_cut: is told how far it is.
        on_wait: is called several times a second; what it raises ends the cut.

    Raises:
        ClipError: there is something at `target`, or the part cannot be had.
    """
    container = _check(target, start, end, exact=exact)
    name = "the file" if isinstance(source, int) else os.fspath(source)
    order = CutOrder(name, start, end, exact, container)
    try:
        with _opened(source) as reading, creating(target) as part:
            cut = _run(order, reading, part, limits, on_cut, on_wait or _go_on)
    except FileExistsError:
        raise ClipError(f"{target} exists, and nothing is overwritten; choose another name") from None
    except OSError as error:
        is_source = str(error.filename) == name  # else it is the file beside `target`, of which nobody knows
        what = f"{name} cannot be read" if is_source else f"{target} cannot be written"
        raise ClipError(f"{what}: {error.strerror or error}") from None
    return CutClip(target, cut.start, cut.end, cut.num_frames, target.stat().st_size)


def read_media_facts(paths: Sequence[str], *, limits: Limits = FACT_LIMITS) -> dict[str, Media | ClipError]:
    """What an editor asks of each file, or why it cannot be told."""
    facts: dict[str, Media | ClipError] = {}
    unique = list(dict.fromkeys(paths))
    if not unique:
        return {}
    for path, found in map_in_processes(read_media, unique, num_workers=1, task=_MediaTask, limits=limits):
        facts[path] = _failed(path, found) if isinstance(found, WorkerLost | Failure) else found
    return {path: facts.get(path, ClipError(f"{path}: the decoder gave no answer")) for path in unique}


def _check(target: Path, start: float, end: float, *, exact: bool) -> str:
    if not (math.isfinite(start) and math.isfinite(end)) or start < 0 or end <= start:
        raise ClipError(f"a clip goes from a start to a later end, not from {start:g} s to {end:g} s")
    if end - start > LONGEST_S:
        raise ClipError(f"a clip has {LONGEST_S / 3600:g} hours at most")
    container = CONTAINERS.get(target.suffix.lower())
    if container is None:
        raise ClipError(f"{target.name} is no name for a clip; end it with {', '.join(CONTAINERS)}")
    if not target.parent.is_dir():
        raise ClipError(f"{target.parent} is no folder; make it first")
    if exact and container == "webm":
        raise ClipError("an exact clip is H.264 and AAC, which WebM does not take; use .mp4 or .mkv")
    return container


@contextmanager
def _opened(source: int | str | os.PathLike[str]) -> Iterator[int]:
    """A descriptor of a regular file; one that was given stays open."""
    if isinstance(source, int):
        yield source
        return
    descriptor = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait for ever
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ClipError(f"{os.fspath(source)} is not a regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def _go_on() -> None:
    pass


def _run(
    order: CutOrder,
    reading: int,
    part: Path,
    limits: Limits,
    on_cut: OnCut | None,
    on_wait: Callable[[], None],
) -> Cut:
    """One process for one clip. It is gone when this returns, and can change nothing any more."""
    writing = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _CLIP_MODE)
    job = _CutJob(order, reading, writing)
    cut: Cut | Failure | None = None
    try:
        with WorkerPool(cut_video, 1, task=_CutTask, limits=limits, items_per_process=1) as pool:
            pool.submit(job)
            while pool.unfinished:
                event = pool.next_event(timeout=_LOOK_S)
                on_wait()
                if event is None:
                    continue
                if event.lost is not None:
                    raise _failed(order.name, event.lost)
                cut = event.result or cut
                if isinstance(cut, Cut) and on_cut is not None:
                    on_cut(min(1.0, max(0.0, (cut.end - order.start) / (order.end - order.start))))
    finally:
        os.close(writing)
    if isinstance(cut, Cut) and cut.is_whole and cut.num_frames:
        return cut
    found = cut if isinstance(cut, Failure) else Failure("zero_length", _nothing(order))
    raise _failed(order.name, found)


def _nothing(order: CutOrder) -> str:
    return f"{order.name} has nothing from {order.start:g} s to {order.end:g} s"


def _failed(name: str, found: WorkerLost | Failure) -> ClipError:
    if isinstance(found, Failure):
        return ClipError(found.message, found.kind)
    what = "the decoder crashed" if found.kind == "crashed" else f"the decoder was stopped ({found})"
    return ClipError(f"{name}: {what}")


@dataclass(frozen=True)
class _CutJob:
    order: CutOrder
    reading: int
    writing: int


class _CutTask(Task[_CutJob, Cut | Failure]):
    """Hands two descriptors on, and takes the states of a clip, which go forward."""

    def __init__(self, job: _CutJob) -> None:
        super().__init__(job)
        self.num_bytes = os.fstat(job.reading).st_size
        self._last: Cut | None = None
        self._has_ended = False

    def open(self) -> tuple[int, int]:
        self.payload = replace(self.item.order, name=os.path.basename(self.item.order.name))
        return self.item.reading, self.item.writing

    def take(self, record: Record) -> Cut | Failure:
        if self._has_ended:
            raise ProtocolError("it sent more after the end of the clip")
        if not isinstance(record, Cut | Failure):
            raise ProtocolError(f"it sent a {type(record).__name__}, which was not asked for")
        self._has_ended = isinstance(record, Failure) or record.is_whole
        if isinstance(record, Cut):
            order = self.item.order
            if record.end < record.start or record.start > order.end or record.num_frames < 0:
                raise ProtocolError("it sent the state of a clip that cannot be")
            if self._last is not None and record.end < self._last.end:
                raise ProtocolError("it sent states of a clip that go back")
            self._last = record
        return record


class _MediaTask(Task[str, Media | Failure]):
    """Opens a file, and takes its facts."""

    bounds = Bounds()

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._descriptor: int | None = None
        self._has_ended = False

    def open(self) -> int:
        try:
            self._descriptor = os.open(self.item, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            status = os.fstat(self._descriptor)
        except OSError as error:
            raise Refused(Failure("missing", f"{self.item}: {error.strerror or error}")) from None
        if not stat.S_ISREG(status.st_mode):
            raise Refused(Failure("unreadable", f"{self.item} is not a regular file"))
        self.num_bytes = status.st_size
        self.payload = os.path.basename(self.item)
        return self._descriptor

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def take(self, record: Record) -> Media | Failure:
        if self._has_ended or not isinstance(record, Media | Failure):
            raise ProtocolError(f"it sent a {type(record).__name__}, which was not asked for")
        self._has_ended = True
        return record
