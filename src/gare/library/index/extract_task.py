"""The parent's side of decoding: it opens the file, and takes segments from a process it does not trust.

The file that is opened must be the one that was hashed, and still be that one in the end.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

import numpy as np

from gare.data.decoder_messages import Bounds, Facts, Failure, Frame, ProtocolError, Record, SegmentEnd
from gare.data.workers import Refused, Task
from gare.library.index.extract import FRAME_SIDE, MAX_ITEMS, STRIP_FRAME_WIDTH, THUMBNAIL_SIDE, Job
from gare.library.index.scan import explain, file_identity
from gare.library.store.stored_pictures import split_pictures

_LARGEST_JPEG_HEADER = 1 << 16


@dataclass(frozen=True)
class Segment:
    """A part of a file that becomes an item, or several: its frames as the model takes them, before
    normalising."""

    start: float
    end: float
    times: tuple[float, ...]
    pixels: np.ndarray
    """uint8, frames × height × width × 3."""
    thumbnail: bytes
    strip: bytes


@dataclass(frozen=True)
class Changed:
    """The file is not the one that was hashed, or was not all the time: what was decoded cannot be trusted.

    It comes last, instead of facts or a failure.
    """


Extracted = Segment | Facts | Failure | Changed


class ExtractTask(Task[Job, Extracted]):
    """Opens the file of a job, and makes segments of the frames that come back."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        strip = job.most_frames * 2 * STRIP_FRAME_WIDTH**2
        pictures = THUMBNAIL_SIDE**2 + job.most_frames * FRAME_SIDE**2
        self.bounds = Bounds(
            frame_bytes=3 * job.image_size**2,
            picture_bytes=_LARGEST_JPEG_HEADER + 3 * max(pictures, strip),
        )
        self._descriptor: int | None = None
        self._frames: list[Frame] = []
        self._num_segments = 0
        self._has_ended = False

    def open(self) -> int:
        """The file, if it is the one that was hashed."""
        try:
            # Not to wait for ever: it may be a pipe by now.
            self._descriptor = os.open(self.item.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            status = os.fstat(self._descriptor)
        except OSError as error:
            raise Refused(Changed() if self.item.identity else Failure(*explain(error))) from None
        if not stat.S_ISREG(status.st_mode):
            raise Refused(Failure("unreadable", "it is not a regular file"))
        if self._has_changed():
            raise Refused(Changed())
        self.num_bytes = status.st_size
        return self._descriptor

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def take(self, record: Record) -> Extracted | None:
        """A segment when it is whole; facts, or a failure, at the end."""
        if self._has_ended:
            raise ProtocolError("it sent more after the end of the file")
        match record:
            case Frame():
                self._add(record)
                return None
            case SegmentEnd():
                return self._end_segment(record)
            case Facts() | Failure():
                if isinstance(record, Facts) and (self._frames or not self._num_segments):
                    raise ProtocolError("it ended a file without a whole segment")
                self._has_ended = True
                if isinstance(record, Facts) and (self._frames or not self._num_segments):
                    raise ProtocolError("it sent the end of a file without a segment")
                return Changed() if self._has_changed() else record
        raise ProtocolError(f"it sent a {type(record).__name__}, which was not asked for")

    def _add(self, frame: Frame) -> None:
        job = self.item
        if frame.pixels.shape != (job.image_size, job.image_size, 3):
            raise ProtocolError("it sent a frame of another size than was asked for")
        if len(self._frames) >= job.most_frames:
            raise ProtocolError(f"it sent more than {job.most_frames} frames of a segment")
        if self._frames and frame.time <= self._frames[-1].time:
            raise ProtocolError("it sent frames out of order")
        self._frames.append(frame)

    def _end_segment(self, segment: SegmentEnd) -> Segment:
        frames, self._frames = self._frames, []
        self._num_segments += 1
        if not frames or segment.num_frames != len(frames):
            raise ProtocolError("it sent a segment with another number of frames than it says")
        if self._num_segments > MAX_ITEMS or not 0 <= segment.start <= segment.end:
            raise ProtocolError("it sent a segment that cannot be")
        if len(split_pictures(segment.thumbnail)) != 1 + len(frames):
            raise ProtocolError("it sent another number of pictures than of frames")
        pixels = np.stack([frame.pixels for frame in frames])
        times = tuple(frame.time for frame in frames)
        return Segment(segment.start, segment.end, times, pixels, segment.thumbnail, segment.strip)

    def _has_changed(self) -> bool:
        """Whether another file is there than the one that was hashed. A rename changes a file's identity too:
        one that was swapped for a while and put back does not pass."""
        if self.item.identity is None or self._descriptor is None:
            return False
        try:
            found = {file_identity(os.fstat(self._descriptor)), file_identity(os.stat(self.item.path))}
        except OSError:
            return True
        return found != {self.item.identity}
