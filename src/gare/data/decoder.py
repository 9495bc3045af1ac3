"""PyAV behind a few functions: open a file safely, find how long it is, and walk it by the clock.

PyAV is imported where it is used, so that frames sources work on machines without it.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from gare.errors import GareError, VideoError

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

# Playlists and concat lists are left out on purpose: they make the decoder read other files.
_FORMATS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,mpegtsraw,mpegvideo,m4v,flv,live_flv,asf,ogg,mxf,dv,rm,"
    "h264,hevc,av1,ivf,obu,yuv4mpegpipe,nut,gif,wtv,nsv,vob"
)
_SAME_MOMENT_S = 1e-4  # timestamps are rounded to the container's clock
_SHORTEST_FRAME_S = 0.01
_FRAMES_PER_STEP = 8  # more than are left out in a row
_ROOM_PER_PIXEL, _LEAST_ROOM = 64, 2**25  # sixteen pictures to refer to, others in work, one in RGB
_NO_MEMORY = ("cannot allocate memory", "failed to map segment", "cannot map zero-fill pages")


def import_av() -> Any:
    """PyAV, or an error that says how to get it (18.1 or later: earlier ones crash on some damaged files)."""
    try:
        import av
    except ImportError as error:
        if any(words in str(error).lower() for words in _NO_MEMORY):
            raise MemoryError("there is not enough memory to load the video decoder") from None
        raise GareError("reading video files needs PyAV: pip install av") from None
    return av


def damage_errors(av: Any) -> tuple[type[Exception], ...]:
    """What PyAV raises on damaged files: its own errors, and now and then a plain Python one.

    One of its own says that memory ran out. That is no damage: let `MemoryError` pass before these.
    """
    return (av.FFmpegError, OSError, ValueError, LookupError, ArithmeticError)


@dataclass(frozen=True)
class VideoFile:
    """A file to decode: by its path, or by a descriptor that is open; then the path is only its name."""

    path: Path
    descriptor: int | None = None

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return os.stat(self.path if self.descriptor is None else self.descriptor).st_size

    def open_bytes(self) -> BinaryIO:
        """The file from its first byte."""
        if self.descriptor is None:
            return self.path.open("rb")
        os.lseek(self.descriptor, 0, os.SEEK_SET)
        return open(self.descriptor, "rb", closefd=False)

    @contextmanager
    def keeping_its_place(self) -> Iterator[None]:
        """Read elsewhere in the file: a descriptor has one place, which an open container counts on."""
        place = 0 if self.descriptor is None else os.lseek(self.descriptor, 0, os.SEEK_CUR)
        try:
            yield
        finally:
            if self.descriptor is not None:
                os.lseek(self.descriptor, place, os.SEEK_SET)


def is_short_of_memory(width: int, height: int) -> bool:
    """Whether a process that has a limit lacks the memory to decode pictures of this size.

    FFmpeg often reports a failed allocation as invalid data, or as nothing at all. A file is called damaged
    only where there was room to decode it.
    """
    try:
        import resource
    except ImportError:  # no limits on this system
        return False
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        return False
    try:
        mmap.mmap(-1, max(_LEAST_ROOM, _ROOM_PER_PIXEL * width * height)).close()
    except (OSError, ValueError, OverflowError):
        return True
    return False


def open_video(file: VideoFile, av: Any, **more: str) -> InputContainer:
    """Open a file for decoding, restricted to containers that read no other file, and to this one file.

    Args:
        file: what to open.
        av: PyAV.
        more: further options of FFmpeg's reader.
    """
    if file.descriptor is None:
        # An absolute path: a colon in a relative one would read as a protocol.
        place, protocol = os.path.abspath(file.path), {"protocol_whitelist": "file"}
    else:
        os.lseek(file.descriptor, 0, os.SEEK_SET)
        place, protocol = "fd:", {"protocol_whitelist": "fd", "fd": str(file.descriptor)}
    options = {**more, "format_whitelist": _FORMATS, **protocol}
    container: InputContainer = av.open(place, options=options, metadata_errors="replace")
    return container


def pick_stream(container: InputContainer, path: Path) -> VideoStream:
    """The video stream of a file; cover pictures do not count."""
    from av.stream import Disposition

    # The cover picture of a music file is a video stream too.
    streams = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
    if not streams:
        found = " and ".join(sorted({stream.type for stream in container.streams})) or "nothing"
        raise VideoError(f"{path} has no video stream, only {found}", "no_video")
    # A stream in a coding that the decoder does not know has no context: a new one, or a damaged name of one.
    known = [stream for stream in streams if stream.codec_context is not None]
    if not known:
        raise VideoError(f"{path} is not a video that can be read: its coding is unknown")
    return known[0]


def find_duration(container: InputContainer, stream: VideoStream, file: VideoFile, av: Any) -> float:
    """Seconds from the first frame to the end of the last."""
    return _stated_duration(container, stream, av) or _measure_duration(file, av)


def _stated_duration(container: InputContainer, stream: VideoStream, av: Any) -> float | None:
    if stream.duration:
        stated = float(stream.duration * _time_base(stream))
        return max(stated, _last_moment(container, stream, av)) if len(stream.index_entries) else stated
    duration = float(container.duration or 0) / av.time_base
    if "matroska" in container.format.name:
        # It states where the longest stream ends, not how long one lasts; a tag says where each ends.
        end = _parse_clock(stream.metadata.get("DURATION", "")) or duration
        duration = end - float((stream.start_time or 0) * _time_base(stream))
    return duration if duration > 0 else None


def _last_moment(container: InputContainer, stream: VideoStream, av: Any) -> float:
    """When the last frame is on screen. An mp4 of variable frame rate may state less than that."""
    start, last = stream.start_time or 0, 0
    try:
        container.seek(start + (stream.duration or 0), stream=stream, backward=True)
        for packet in container.demux(stream):
            last = max(last, packet.pts or 0)
    except MemoryError:
        raise
    except damage_errors(av):
        pass  # the decoder will meet the same damage and report it
    container.seek(start, stream=stream, backward=True)
    return float((last - start) * _time_base(stream)) + _SHORTEST_FRAME_S


def _parse_clock(text: str) -> float | None:
    """Seconds of `00:01:30.500000000`."""
    try:
        hours, minutes, seconds = (float(part) for part in text.split(":"))
    except ValueError:
        return None
    return 3600 * hours + 60 * minutes + seconds


def _measure_duration(file: VideoFile, av: Any) -> float:
    """Measure a file that states no duration (a live recording, a raw stream) by reading its packets."""
    num_packets, end = 0, 0
    with file.keeping_its_place(), open_video(file, av) as container:
        stream = pick_stream(container, file.path)
        try:
            for packet in container.demux(stream):
                num_packets += bool(packet.size)
                end = max(end, (packet.pts or 0) + (packet.duration or 0))
        except MemoryError:
            raise
        except damage_errors(av):
            pass  # the decoder will meet the same damage and report it
        if end:
            return float((end - (stream.start_time or 0)) * _time_base(stream))
        return num_packets * _frame_interval(stream)


def _frame_interval(stream: VideoStream) -> float:
    return 1 / float(stream.average_rate or stream.guessed_rate or 25)


def _time_base(stream: VideoStream) -> Fraction:
    return stream.time_base or Fraction(1, 1_000_000)


class Shot(NamedTuple):
    """A frame and its moment, in seconds from the start of the stream."""

    time: float
    frame: VideoFrame


class Decoder:
    """Walks a video stream forward, from one wanted moment to the next, and never holds more than two frames.

    Where a keyframe lies between here and the next moment it seeks to it, and so decodes a few frames per
    moment however long the video is.
    """

    def __init__(self, container: InputContainer, stream: VideoStream, av: Any, *, may_seek: bool) -> None:
        self.error: str | None = None
        self._av = av
        self._container = container
        self._stream = stream
        self._may_seek = may_seek
        self._blind_seek_gap = 10.0
        self._origin = float((stream.start_time or 0) * _time_base(stream))
        self._shown: Shot | None = None
        self._shots = self._decode_forward()
        self._next = next(self._shots, None)

    @property
    def has_ended(self) -> bool:
        """Whether no frame follows."""
        return self._next is None

    @property
    def nearest_frame(self) -> VideoFrame | None:
        """The frame on screen, or the first one to come."""
        shot = self._shown or self._next
        return None if shot is None else shot.frame

    @property
    def next_time(self) -> float:
        """When the frame after the one on screen comes; minus infinity where none follows."""
        return -math.inf if self._next is None else self._next.time

    def thin_out(self, step: float) -> None:
        """Skip frames that no other refers to, where at least `_FRAMES_PER_STEP` come in `step` seconds."""
        if step >= _FRAMES_PER_STEP * _frame_interval(self._stream):
            self._stream.codec_context.skip_frame = "NONREF"

    def shot_at(self, time: float) -> Shot | None:
        """The frame on screen at this moment; moments must not go back. None: nothing can be decoded."""
        if self._should_seek(time):
            self._seek(time)
        while self._next is not None and self._next.time <= time + _SAME_MOMENT_S:
            self._shown = self._next
            self._next = next(self._shots, None)
        return self._shown or self._next

    def _decode_forward(self) -> Iterator[Shot]:
        clock = 0.0
        try:
            for packet in self._container.demux(self._stream):
                try:
                    frames = packet.decode()
                except EOFError:
                    return
                except MemoryError:
                    raise
                except damage_errors(self._av) as error:
                    self.error = self.error or reason(error)
                    continue
                for frame in frames:
                    # Some streams carry no timestamps; then frames follow each other at the stream's rate.
                    self._may_seek = self._may_seek and frame.time is not None
                    yield Shot(clock if frame.time is None else float(frame.time) - self._origin, frame)
                    clock += _frame_interval(self._stream)
        except MemoryError:
            raise
        except damage_errors(self._av) as error:
            self.error = self.error or reason(error)

    def _should_seek(self, time: float) -> bool:
        if not self._may_seek or self._next is None or time <= self._next.time:
            return False
        index = self._stream.index_entries
        target, position = self._timestamp(time), self._timestamp(self._next.time)
        if len(index) and index[len(index) - 1].timestamp >= target:
            entry = index.search_timestamp(target)
            return entry >= 0 and index[entry].timestamp > position
        return time - self._next.time > self._blind_seek_gap

    def _seek(self, time: float) -> None:
        before = self._next
        # Some containers land late; then try from further back, at last from the start.
        for margin in (0.0, 10.0, 100.0, time):
            try:
                self._container.seek(
                    self._timestamp(max(0.0, time - margin)), stream=self._stream, backward=True
                )
            except MemoryError:
                raise
            except damage_errors(self._av):
                self._may_seek = False
                return
            self._shots = self._decode_forward()
            self._shown, self._next = None, next(self._shots, None)
            if self._next is not None and self._next.time <= time:
                break
        if before is not None and (self._next is None or self._next.time <= before.time):
            self._blind_seek_gap *= 2  # keyframes are further apart than that: decoding on was cheaper

    def _timestamp(self, time: float) -> int:
        return int((time + self._origin) / _time_base(self._stream))


def reason(error: Exception) -> str:
    """What an error of PyAV says, on one line."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
