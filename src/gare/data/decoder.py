"""PyAV behind a few functions: open a file safely, find how long it is, and walk it by the clock.

PyAV is imported where it is used, so that frames sources work on machines without it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
_OPTIONS = {"format_whitelist": _FORMATS, "protocol_whitelist": "file"}


def import_av() -> Any:
    """PyAV, or an error that says how to get it (18.1 or later: earlier ones crash on some damaged files)."""
    try:
        import av
    except ImportError:
        raise GareError("reading video files needs PyAV: pip install av") from None
    return av


def damage_errors(av: Any) -> tuple[type[Exception], ...]:
    """What PyAV raises on damaged files: its own errors, and now and then a plain Python one."""
    return (av.FFmpegError, OSError, ValueError, LookupError, ArithmeticError)


def open_video(path: Path, av: Any) -> InputContainer:
    # An absolute path: a colon in a relative one would read as a protocol.
    container: InputContainer = av.open(os.path.abspath(path), options=_OPTIONS, metadata_errors="replace")
    return container


def pick_stream(container: InputContainer, path: Path) -> VideoStream:
    from av.stream import Disposition

    # The cover picture of a music file is a video stream too.
    streams = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
    if not streams:
        found = " and ".join(sorted({stream.type for stream in container.streams})) or "nothing"
        raise VideoError(f"{path} has no video stream, only {found}", "no_video")
    return streams[0]


def find_duration(container: InputContainer, stream: VideoStream, path: Path, av: Any) -> float:
    """Seconds from the first frame to the end of the last."""
    return _stated_duration(container, stream, av) or _measure_duration(path, av)


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


def _measure_duration(path: Path, av: Any) -> float:
    """For files that do not say (live recordings, raw streams): read the packets without decoding them."""
    num_packets, end = 0, 0
    with open_video(path, av) as container:
        stream = pick_stream(container, path)
        try:
            for packet in container.demux(stream):
                num_packets += bool(packet.size)
                end = max(end, (packet.pts or 0) + (packet.duration or 0))
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
        return self._next is None

    @property
    def nearest_frame(self) -> VideoFrame | None:
        shot = self._shown or self._next
        return None if shot is None else shot.frame

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
                except damage_errors(self._av) as error:
                    self.error = self.error or reason(error)
                    continue
                for frame in frames:
                    # Some streams carry no timestamps; then frames follow each other at the stream's rate.
                    self._may_seek = self._may_seek and frame.time is not None
                    yield Shot(clock if frame.time is None else float(frame.time) - self._origin, frame)
                    clock += _frame_interval(self._stream)
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
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
