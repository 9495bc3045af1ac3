"""From a video to the few frames a model takes, chosen by the clock and not by frame numbers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from gare.data.containers import find_truncation
from gare.data.decoder import (
    Decoder,
    VideoFile,
    damage_errors,
    find_duration,
    import_av,
    is_short_of_memory,
    open_video,
    pick_stream,
    reason,
)
from gare.data.frame_images import is_frames_source, list_images, read_images
from gare.data.frame_sampling import Sampling, check_sampling, sample_times
from gare.data.packed_members import is_packed_video, member_file, select_members
from gare.errors import VideoError

if TYPE_CHECKING:
    from av.video.frame import VideoFrame


SHORT_SIDE = 256
"""Larger frames are scaled down to this while decoding, for every model: training, evaluation and
search see the same pixels."""


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
    offset: float = 0.5,
) -> list[Image.Image]:
    """Up to `num_frames` RGB images of a video, upright and in time order.

    Args:
        source: a video file; an image; a folder of images; one of these in a tar, `archive.tar::clip.mp4`.
        num_frames: how many at most. No frame is taken twice, so a short video gives fewer.
        sampling: `grid` (one a second, thinned evenly, as the papers) or `uniform` (middles of equal parts).
        start: use the video from this second on.
        end: use the video up to this second.
        short_side: scale larger frames down to this short side while decoding.
        offset: where in its part of the video each frame of `uniform` lies, from 0 up to 1.

    Raises:
        VideoError: the source cannot be read in full; `kind` says why. `read_clip` keeps what there is.
    """
    clip = read_clip(source, num_frames, sampling, start=start, end=end, short_side=short_side, offset=offset)
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
    offset: float = 0.5,
    descriptor: int | None = None,
) -> Clip:
    """As `read_frames`, with the time of every frame, and with what a damaged file still gives.

    A video file may come as a descriptor; then the source is only its name.
    """
    check_sampling(num_frames, sampling)
    name = os.fspath(source)
    if descriptor is None and is_frames_source(name):
        if start is not None or end is not None:
            raise VideoError(f"{name} is a set of images without timestamps; leave start and end empty")
        images, positions, total = read_images(name, num_frames, sampling, offset=offset)
        images = [shrink(image, short_side) for image in images]
        return Clip(images, [float(position) for position in positions], float(total))
    if descriptor is None and is_packed_video(name):
        with member_file(name) as opened:
            return read_clip(
                name,
                num_frames,
                sampling,
                start=start,
                end=end,
                short_side=short_side,
                offset=offset,
                descriptor=opened,
            )
    if descriptor is None:
        check_video_file(name)
    choose = partial(sample_times, num_frames=num_frames, sampling=sampling, offset=offset)
    return _decode(VideoFile(Path(name), descriptor), choose, start or 0.0, end, short_side)


def check_video_file(name: str) -> None:
    """Refuse what is no file, or an empty one, without opening it."""
    if not os.path.exists(name):
        raise VideoError(f"{name} does not exist; check the path and the folder of videos", "missing")
    if not os.path.isfile(name):
        raise VideoError(f"{name} is not a regular file")  # opening a pipe would wait for ever
    if not os.path.getsize(name):
        raise VideoError(f"{name} is empty (0 bytes); copy or download it again", "zero_length")


def source_exists(source: str) -> bool:
    """Whether there is something to read, without decoding it."""
    try:
        if is_packed_video(source):
            return bool(select_members(source))
        return bool(list_images(source)) if is_frames_source(source) else Path(source).is_file()
    except VideoError:
        return False


def _decode(
    file: VideoFile,
    choose: Callable[[float], list[float]],
    start: float,
    end: float | None,
    short_side: int | None,
) -> Clip:
    with VideoReader(file.path, file.descriptor) as reader:
        stop = reader.duration if end is None else min(end, reader.duration)
        if start > 0 and start >= stop:
            span = f"from {start} s to {'the end' if end is None else f'{end} s'}"
            raise VideoError(
                f"{file.path} has nothing {span}: it lasts {reader.duration:.2f} s", "zero_length"
            )
        images, times = reader.take([start + time for time in choose(stop - start)], short_side)
        return Clip(images, times, reader.duration, reader.judge(has_frames=bool(images)))


class VideoReader:
    """A video file open for one walk forward through its moments.

    Args:
        path: of the file; only its name in messages where there is a descriptor.
        descriptor: the file, opened by somebody else. It stays open, and has one reader at a time.

    Raises:
        VideoError: from any method, when nothing more can be had from the file.
    """

    def __init__(self, path: Path, descriptor: int | None = None) -> None:
        av = import_av()
        file = VideoFile(path, descriptor)
        self._path = path
        self._damage_errors = damage_errors(av)
        self._truncation: str | None = None
        self._container: Any = None
        try:
            with self._naming_damage():
                with file.open_bytes() as start:
                    self._truncation = find_truncation(start)
                self._container = open_video(file, av)
                stream = pick_stream(self._container, path)
                if len(stream.index_entries) > file.num_bytes:  # 2 kB may claim millions of packets
                    message = f"{path} is damaged: its index lists more frames than it has bytes"
                    raise VideoError(f"{message}; copy or download it again", "corrupt")
                stream.codec_context.thread_count = (
                    1  # files are decoded side by side; threads gained nothing
                )
                self.duration = max(0.0, find_duration(self._container, stream, file, av))
                self._decoder = Decoder(self._container, stream, av, may_seek=self._truncation is None)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> VideoReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self._container is not None:
            self._container.close()

    @property
    def size(self) -> tuple[int, int]:
        """Width and height as shown, upright; zeros when there is no frame."""
        frame = self._decoder.nearest_frame
        if frame is None:
            return 0, 0
        return (frame.height, frame.width) if frame.rotation % 180 else (frame.width, frame.height)

    @property
    def has_ended(self) -> bool:
        """Nothing comes after the frame that was taken last."""
        return self._decoder.has_ended

    @property
    def next_change(self) -> float:
        """When the next frame comes on screen; before all moments where none does."""
        return self._decoder.next_time

    def image_at(self, moment: float, short_side: int | None = None) -> tuple[float, Image.Image] | None:
        """The frame on screen at this moment and its own time; moments must not go back."""
        with self._naming_damage():
            shot = self._decoder.shot_at(moment)
            return None if shot is None else (shot.time, _to_image(shot.frame, short_side))

    def glance_at(self, moment: float, short_side: int) -> tuple[float, Image.Image] | None:
        """As `image_at`, scaled by a quick filter: enough to see whether something changed."""
        with self._naming_damage():
            shot = self._decoder.shot_at(moment)
            return None if shot is None else (shot.time, _to_image(shot.frame, short_side, "AREA"))

    def thin_out(self, step: float) -> None:
        """Decode only frames that others refer to, where at least eight come in `step` seconds.

        In most films every second frame is left out, and the one on screen is a few hundredths of a second
        older than it might be.
        """
        self._decoder.thin_out(step)

    def take(
        self, moments: Sequence[float], short_side: int | None = None
    ) -> tuple[list[Image.Image], list[float]]:
        """The frames on screen at these moments, none twice, and their times."""
        images: list[Image.Image] = []
        times: list[float] = []
        for moment in moments:
            with self._naming_damage():
                shot = self._decoder.shot_at(moment)
                if shot is None:
                    break
                if not times or shot.time > times[-1]:
                    images.append(_to_image(shot.frame, short_side))
                    times.append(shot.time)
        return images, times

    def judge(self, *, has_frames: bool) -> VideoError | None:
        """What is wrong with the file, as far as it was read; raised when it gave no frame at all."""
        if self._decoder.error and not self._truncation:
            self._blame_memory()
        return _judge(self._path, self._truncation, self._decoder.error, has_frames)

    @contextmanager
    def _naming_damage(self) -> Iterator[None]:
        try:
            yield
        except self._damage_errors as error:
            # "Cannot allocate" of FFmpeg too: a damaged header may ask for more than there can be.
            if self._truncation:
                raise _truncated(self._path, self._truncation) from None
            self._blame_memory()
            raise VideoError(f"{self._path} is not a video that can be read: {reason(error)}") from None
        except MemoryError:
            raise MemoryError(f"{self._path} needs more memory to decode than there is") from None

    def _blame_memory(self) -> None:
        """Raise `MemoryError` where the reason is that there was too little, not the file."""
        streams = self._container.streams.video if self._container is not None else ()
        contexts = [stream.codec_context for stream in streams if stream.codec_context is not None]
        if is_short_of_memory(*(contexts[0].width, contexts[0].height) if contexts else (0, 0)):
            raise MemoryError(f"{self._path} needs more memory to decode than there is")


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


def _to_image(frame: VideoFrame, short_side: int | None, interpolation: str = "BICUBIC") -> Image.Image:
    width, height = _scaled_size(frame.width, frame.height, short_side)
    to_image: Any = frame.to_image  # PyAV leaves it untyped
    image: Image.Image = to_image(width=width, height=height, interpolation=interpolation)
    return image.rotate(frame.rotation, expand=True) if frame.rotation else image


def shrink(image: Image.Image, short_side: int | None) -> Image.Image:
    """Scale a larger picture down to this short side."""
    size = _scaled_size(*image.size, short_side)
    return image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)


def _scaled_size(width: int, height: int, short_side: int | None) -> tuple[int, int]:
    if short_side is None or min(width, height) <= short_side:
        return width, height
    scale = short_side / min(width, height)
    return max(1, round(width * scale)), max(1, round(height * scale))
