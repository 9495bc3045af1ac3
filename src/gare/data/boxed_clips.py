"""Clips of a dataset decoded in the box: `video.read_clip` for files that may come from anywhere.

A video goes in as a descriptor, images as their bytes; what comes back are JPEGs, or whether all is well.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from PIL import Image

from gare.data.decoder_messages import (
    Bounds,
    Damage,
    Facts,
    Failure,
    Picture,
    ProtocolError,
    Record,
)
from gare.data.frame_images import decode_image, is_frames_source, read_chosen
from gare.data.frame_sampling import Sampling
from gare.data.packed_members import is_packed_video, open_member
from gare.data.video import Clip, check_video_file, read_clip, shrink
from gare.data.workers import Limits, Refused, Task, WorkerLost, map_in_processes
from gare.errors import VideoError, VideoProblem

_LIMITS = Limits(seconds=600, cpu_seconds=600, memory_bytes=4 * 2**30)
_LARGEST_JPEG = 64 * 2**20


@dataclass(frozen=True)
class ClipJob:
    """A source of `read_clip`, and what is wanted of it."""

    source: str
    num_frames: int
    sampling: Sampling = "grid"
    start: float | None = None
    end: float | None = None
    short_side: int | None = None
    quality: int = 0
    """JPEG quality of the frames that are sent back; 0 sends none."""


@dataclass(frozen=True)
class BoxedClip:
    """The frames as JPEG. `problem` says what is wrong with a source that gave no frame, or not all."""

    jpegs: Sequence[bytes] = ()
    times: Sequence[float] = ()
    duration: float = 0.0
    problem: VideoError | None = None


def read_boxed_clips(jobs: Sequence[ClipJob], *, num_workers: int) -> Iterator[tuple[ClipJob, BoxedClip]]:
    """Each job with its clip, in the order they finish."""
    for job, clip in map_in_processes(_read, jobs, num_workers=num_workers, task=_ClipTask, limits=_LIMITS):
        if isinstance(clip, WorkerLost):
            what = "the decoder crashed" if clip.kind == "crashed" else f"the decoder was stopped ({clip})"
            clip = BoxedClip(problem=VideoError(f"{job.source}: {what}"))
        yield job, clip


def _open_video(source: str) -> int:
    if is_packed_video(source):
        return open_member(source)
    check_video_file(source)
    return os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


class _ClipTask(Task[ClipJob, BoxedClip]):
    """Opens the source of a job, and collects its pictures."""

    def __init__(self, job: ClipJob) -> None:
        super().__init__(job)
        self.bounds = Bounds(picture_bytes=_LARGEST_JPEG if job.quality else 0)
        self._descriptor: int | None = None
        self._pictures: list[Picture] = []
        self._problem: VideoError | None = None
        self._has_ended = False

    def open(self) -> int | None:
        job = self.item
        try:
            if is_frames_source(job.source):
                if job.start is not None or job.end is not None:
                    read_clip(job.source, job.num_frames, job.sampling, start=job.start, end=job.end)
                self.payload = (job, *read_chosen(job.source, job.num_frames, job.sampling))
                return None
            self._descriptor = _open_video(job.source)
            self.num_bytes = os.fstat(self._descriptor).st_size
        except VideoError as error:
            raise Refused(BoxedClip(problem=error)) from None
        except OSError as error:
            message = f"{job.source} cannot be read: {error.strerror or error}"
            raise Refused(BoxedClip(problem=VideoError(message))) from None
        self.payload = (job, [], [], 0)
        return self._descriptor

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def take(self, record: Record) -> BoxedClip | None:
        if self._has_ended:
            raise ProtocolError("it sent more after the end of the file")
        match record:
            case Picture() if len(self._pictures) < self.item.num_frames:
                self._pictures.append(record)
            case Damage(kind, message) if self._problem is None:
                self._problem = _problem(kind, message)
            case Failure(kind, message):
                self._has_ended = True
                return BoxedClip(problem=_problem(kind, message))
            case Facts(duration, _, _):
                self._has_ended = True
                jpegs = [picture.jpeg for picture in self._pictures]
                return BoxedClip(jpegs, [picture.time for picture in self._pictures], duration, self._problem)
            case _:
                raise ProtocolError(f"it sent a {type(record).__name__}, which was not asked for")
        return None


def _problem(kind: str, message: str) -> VideoError:
    if kind not in get_args(VideoProblem):
        raise ProtocolError(f"it sent a failure of an unknown kind ({kind})")
    return VideoError(message, kind)  # type: ignore[arg-type]  # looked up just now


# --- in the process -----------------------------------------------------------------------------------------


def _read(
    order: tuple[ClipJob, list[tuple[str, bytes]], list[int], int], descriptor: int | None = None
) -> Iterator[Picture | Damage | Facts | Failure]:
    job, images, positions, total = order
    try:
        clip = _decode_images(job, images, positions, total) if images else _decode_video(job, descriptor)
    except VideoError as error:
        yield Failure(error.kind, str(error))
        return
    if job.quality:
        for time, image in zip(clip.times, clip.images, strict=True):
            yield Picture(time, _to_jpeg(image, job.quality))
    if clip.damage is not None:
        yield Damage(clip.damage.kind, str(clip.damage))
    yield Facts(clip.duration, 0, 0)


def _decode_images(job: ClipJob, images: list[tuple[str, bytes]], positions: list[int], total: int) -> Clip:
    decoded = [shrink(decode_image(name, content), job.short_side) for name, content in images]
    return Clip(decoded, [float(position) for position in positions], float(total))


def _decode_video(job: ClipJob, descriptor: int | None) -> Clip:
    return read_clip(
        job.source,
        job.num_frames,
        job.sampling,
        start=job.start,
        end=job.end,
        short_side=job.short_side,
        descriptor=descriptor,
    )


def _to_jpeg(image: Image.Image, quality: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()
