"""From a video to the few frames a model looks at, chosen by the clock and not by frame numbers.

PyAV is imported where it is used, so that frames sources work without it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from gare.data.containers import find_truncation
from gare.data.frames import is_frames_source, read_images
from gare.data.sampling import Sampling, sample_times
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
_OPTIONS = {"format_whitelist": _FORMATS, "protocol_whitelist": "file"}


@dataclass(frozen=True)
class Clip:
    """Frames of a video in time order, with the moment of each."""

    images: list[Image.Image]
    times: list[float]
    """Seconds from the start of the video; for a frames source, positions among its images."""
    duration: float
    damage: VideoError | None = None
    """What is wrong with a file that could be read in part."""


def read_frames(
    source: str | os.PathLike[str],
    num_frames: int,
    sampling: Sampling = "grid",
    *,
    start: float | None = None,
    end: float | None = None,
    short_side: int | None = None,
) -> list[Image.Image]:
    """Up to `num_frames` RGB images of a video, upright and in time order.

    Args:
        source: a video file; an image; a folder of images; `archive.tar::member` or `archive.tar::prefix/`.
        num_frames: how many at most. No frame is taken twice, so a short video gives fewer.
        sampling: `grid` (one a second, thinned evenly, as the papers) or `uniform` (middles of equal parts).
        start: use the video from this second on.
        end: use the video up to this second.
        short_side: scale larger frames down to this short side while decoding.

    Raises:
        VideoError: the source cannot be read in full; `kind` says why. `read_clip` keeps what there is.
    """
    clip = read_clip(source, num_frames, sampling, start=start, end=end, short_side=short_side)
    if clip.damage is not None:
        raise clip.damage
    return clip.images


def read_clip(
    source: str | os.PathLike[str],
    num_frames: int,
    sampling: Sampling = "grid",
    *,
    start: float | None = None,
    end: float | None = None,
    short_side: int | None = None,
) -> Clip:
    """As `read_frames`, with the time of every frame, and with what a damaged file still gives."""
    name = os.fspath(source)
    if is_frames_source(name):
        if start is not None or end is not None:
            raise VideoError(f"{name} is a set of images without timestamps; leave start and end empty")
        images, positions, total = read_images(name, num_frames, sampling)
        images = [_shrink(image, short_side) for image in images]
        return Clip(images, [float(position) for position in positions], float(total))
    path = Path(name)
    if not path.exists():
        raise VideoError(f"{name} does not exist; check the path and the folder of videos", "missing")
    if path.stat().st_size == 0:
        raise VideoError(f"{name} is empty (0 bytes); copy or download it again", "zero_length")
    return _decode(path, num_frames, sampling, start or 0.0, end, short_side)


def _decode(
    path: Path, num_frames: int, sampling: Sampling, start: float, end: float | None, short_side: int | None
) -> Clip:
    av = import_av()
    truncation = find_truncation(path)
    try:
        container = _open(path, av)
    except (av.FFmpegError, ValueError, OSError) as error:
        if truncation:
            raise _truncated(path, truncation) from None
        raise VideoError(f"{path} is not a video that can be read: {_reason(error)}") from None
    with container:
        stream = _pick_stream(container, path)
        duration = _duration(container, stream, av) or _measure_duration(path, av)
        stop = duration if end is None else min(end, duration)
        if start >= max(stop, 1e-9):
            raise VideoError(
                f"{path} lasts {duration:.2f} s, so nothing lies between start {start} and end {end}",
                "zero_length",
            )
        decoder = _Decoder(container, stream, av, may_seek=truncation is None)
        images: list[Image.Image] = []
        times: list[float] = []
        for time in sample_times(stop - start, num_frames, sampling):
            frame = decoder.frame_at(start + time)
            if frame is None:
                break
            moment = decoder.time_of(frame)
            if not times or moment > times[-1]:
                images.append(_to_image(frame, short_side))
                times.append(moment)
    return Clip(images, times, duration, _judge(path, truncation, decoder.error, bool(images)))


def _truncated(path: Path, reason: str) -> VideoError:
    return VideoError(f"{path} is truncated: {reason}; copy or download it again", "truncated")


def _judge(path: Path, truncation: str | None, error: str | None, has_frames: bool) -> VideoError | None:
    if truncation:
        damage = _truncated(path, truncation)
    elif error:
        damage = VideoError(f"{path} is damaged: {error}; copy or download it again", "corrupt")
    elif not has_frames:
        damage = VideoError(f"{path} has a video stream without a single frame", "zero_length")
    else:
        return None
    if not has_frames:
        raise damage
    return damage


class _Decoder:
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
        self._frame_interval = _frame_interval(stream)
        self._clock = -self._frame_interval
        self._shown: VideoFrame | None = None
        self._frames = self._decode_forward()
        self._next = next(self._frames, None)

    def time_of(self, frame: VideoFrame) -> float:
        """Seconds from the start of the stream."""
        # Raw streams carry no timestamps; then frames follow each other at the stream's rate.
        return float(frame.time) - self._origin if frame.time is not None else self._clock

    def frame_at(self, time: float) -> VideoFrame | None:
        """The frame on screen at this moment; moments must not go back. None: nothing can be decoded."""
        if self._should_seek(time):
            self._seek(time)
        while self._next is not None and self.time_of(self._next) <= time + _SAME_MOMENT_S:
            self._shown, self._next = self._next, None
            self._next = next(self._frames, None)
        return self._shown or self._next

    def _decode_forward(self) -> Iterator[VideoFrame]:
        try:
            for packet in self._container.demux(self._stream):
                try:
                    frames = packet.decode()
                except self._av.InvalidDataError as error:
                    self.error = self.error or _reason(error)
                    continue
                for frame in frames:
                    self._clock += self._frame_interval
                    yield frame
        except EOFError:
            return
        except self._av.FFmpegError as error:
            self.error = self.error or _reason(error)

    def _should_seek(self, time: float) -> bool:
        if not self._may_seek or self._next is None or self._next.time is None:
            return False
        here = self.time_of(self._next)
        if time <= here:
            return False
        index = self._stream.index_entries
        target, position = self._timestamp(time), self._timestamp(here)
        if len(index) and index[len(index) - 1].timestamp >= target:
            entry = index.search_timestamp(target)
            return entry >= 0 and index[entry].timestamp > position
        return time - here > self._blind_seek_gap

    def _seek(self, time: float) -> None:
        here = None if self._next is None else self.time_of(self._next)
        # Some containers land late; then try from further back, at last from the start.
        for margin in (0.0, 10.0, 100.0, time):
            try:
                self._container.seek(
                    self._timestamp(max(0.0, time - margin)), stream=self._stream, backward=True
                )
            except self._av.FFmpegError:
                self._may_seek = False
                return
            self._frames = self._decode_forward()
            self._shown, self._next = None, next(self._frames, None)
            if self._next is not None and self.time_of(self._next) <= time:
                break
        landed = None if self._next is None else self.time_of(self._next)
        if here is not None and (landed is None or landed <= here):
            self._blind_seek_gap *= 2  # keyframes are further apart than that: decoding on was cheaper

    def _timestamp(self, time: float) -> int:
        return int((time + self._origin) / _time_base(self._stream))


def _open(path: Path, av: Any) -> InputContainer:
    # An absolute path: a colon in a relative one would read as a protocol.
    container: InputContainer = av.open(os.path.abspath(path), options=_OPTIONS, metadata_errors="replace")
    return container


def _pick_stream(container: InputContainer, path: Path) -> VideoStream:
    from av.stream import Disposition

    # The cover picture of a music file is a video stream too.
    streams = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
    if not streams:
        found = " and ".join(sorted({stream.type for stream in container.streams})) or "nothing"
        raise VideoError(f"{path} has no video stream, only {found}", "no_video")
    return streams[0]


def _duration(container: InputContainer, stream: VideoStream, av: Any) -> float | None:
    if stream.duration:
        return float(stream.duration * _time_base(stream))
    return float(container.duration / av.time_base) if container.duration else None


def _measure_duration(path: Path, av: Any) -> float:
    """For files that do not say (live recordings, raw streams): read the packets without decoding them."""
    num_packets, end = 0, 0
    with _open(path, av) as container:
        stream = _pick_stream(container, path)
        try:
            for packet in container.demux(stream):
                num_packets += bool(packet.size)
                end = max(end, (packet.pts or 0) + (packet.duration or 0))
        except av.FFmpegError:
            pass  # the decoder will meet the same damage and report it
        if end:
            return float((end - (stream.start_time or 0)) * _time_base(stream))
        return num_packets * _frame_interval(stream)


def _frame_interval(stream: VideoStream) -> float:
    return 1 / float(stream.average_rate or stream.guessed_rate or 25)


def _time_base(stream: VideoStream) -> Fraction:
    return stream.time_base or Fraction(1, 1_000_000)


def _to_image(frame: VideoFrame, short_side: int | None) -> Image.Image:
    width, height = _scaled_size(frame.width, frame.height, short_side)
    to_image: Any = frame.to_image  # PyAV leaves it untyped
    image: Image.Image = to_image(width=width, height=height, interpolation="BICUBIC")
    return image.rotate(frame.rotation, expand=True) if frame.rotation else image


def _shrink(image: Image.Image, short_side: int | None) -> Image.Image:
    size = _scaled_size(*image.size, short_side)
    return image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)


def _scaled_size(width: int, height: int, short_side: int | None) -> tuple[int, int]:
    if short_side is None or min(width, height) <= short_side:
        return width, height
    scale = short_side / min(width, height)
    return max(1, round(width * scale)), max(1, round(height * scale))


def import_av() -> Any:
    """PyAV, or an error that says how to get it."""
    try:
        import av
    except ImportError:
        raise GareError("reading video files needs PyAV: pip install 'gare[video]'") from None
    return av


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
