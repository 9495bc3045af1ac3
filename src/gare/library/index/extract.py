"""What a worker process does with one file: segment it, decode the frames a model takes, make small pictures.

A segment has small pictures: the frame that shows most and every frame by itself, for cards
(`gare.library.store.stored_pictures`), and a strip, all frames side by side.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from gare.data.decoder import VideoFile
from gare.data.decoder_messages import Alive, Facts, Failure, Frame, SegmentEnd
from gare.data.frame_sampling import sample_indices, sample_times
from gare.data.video import SHORT_SIDE, VideoReader
from gare.errors import VideoError
from gare.image_fit import CROP, ImageFit, fit_image
from gare.library.index.dense_frames import DenseBlocks, DenseChooser
from gare.library.index.scan import Identity
from gare.library.index.segment import (
    PICTURES_PER_SECOND,
    Segmentation,
    ShotDetector,
    count_spans,
    find_spans,
)
from gare.library.store.store_schema import MOST_DENSE_FRAMES

MAX_ITEMS = 10_000
MAX_STILL = 500
"""Items of a file that show nothing but a frame that the item before showed too: a small file that claims to
last for weeks is made of these."""
THUMBNAIL_SIDE = 320
FRAME_SIDE = 256
"""Pixels of the longer side of a frame's picture: a card shows the frame that matches."""
STRIP_FRAME_WIDTH = 96
_THUMBNAIL_QUALITY, _FRAME_QUALITY, _STRIP_QUALITY = 80, 70, 70
_GRID_S = 1.0 - 1e-3
_GRID_TOLERANCE_S = 1e-3
_LOOK_SIDE = 32  # small pictures are enough to see that something changed

Message = Frame | SegmentEnd | Facts | Failure | Alive


@dataclass(frozen=True)
class Job:
    """A file, and what the model wants of it."""

    path: str
    segmentation: Segmentation
    num_frames: int
    image_size: int
    fit: ImageFit = CROP
    keep_damaged: bool = False
    identity: Identity | None = None
    """The file that was hashed: what is decoded must be the same one. None is any."""

    @property
    def most_frames(self) -> int:
        """The most frames of a segment that is decoded."""
        return MOST_DENSE_FRAMES if self.segmentation.is_dense else self.num_frames


def extract(job: Job, descriptor: int) -> Iterator[Message]:
    """Every frame of every item of a file, then its facts or why it cannot be used. One pass over the file.

    Args:
        job: what the model wants; the path is only the file's name.
        descriptor: the file.
    """
    try:
        if not os.fstat(descriptor).st_size:
            raise VideoError("the file is empty (0 bytes); copy or download it again", "zero_length")
        with VideoReader(Path(job.path), descriptor) as reader:
            if not math.isfinite(reader.duration):
                raise VideoError("it does not say how long it lasts")
            yield from _read(job, reader, descriptor)
    except VideoError as error:
        yield Failure(error.kind, _without_path(str(error), job.path))
    except OSError as error:
        yield Failure("unreadable", f"it cannot be read: {error.strerror or error}")
    except MemoryError:
        raise  # the process is at its limit, and given up
    except Exception as error:  # no file may stop a run, whatever it makes a library do
        yield Failure("unreadable", f"it cannot be read: {type(error).__name__}: {error}")


def _read(job: Job, reader: VideoReader, descriptor: int) -> Iterator[Message]:
    damage = reader.judge(has_frames=True)  # cut off: known before anything is decoded
    if damage is not None and not job.keep_damaged:
        raise damage
    too_many = Failure(
        "too_many_items", f"it gives more than {MAX_ITEMS:,} items; use longer segments (--split)"
    )
    if _gives_too_many(job, reader.duration, descriptor):
        yield too_many
        return
    messages = _WAYS.get(job.segmentation.kind, _spans)(job, reader)
    num_items, num_still, shown, last_time = 0, 0, -1.0, -1.0
    for message in messages:
        if isinstance(message, Frame):
            shown = message.time
        elif isinstance(message, SegmentEnd):
            num_items += 1
            num_still += shown <= last_time
            last_time = shown
        if num_items > MAX_ITEMS:
            yield too_many
            return
        if num_still > MAX_STILL:
            yield Failure(
                "too_many_items",
                f"it gives more than {MAX_STILL:,} items without a frame of their own: it claims to last "
                f"{reader.duration:,.0f} seconds; use longer segments (--split)",
            )
            return
        yield message
    damage = reader.judge(has_frames=num_items > 0)
    if damage is not None and not job.keep_damaged:
        raise damage
    yield Facts(max(0.0, reader.duration), *reader.size)


def _gives_too_many(job: Job, duration: float, descriptor: int) -> bool:
    """Whether the file gives too many items, known before one is made. A damaged file may claim to last for
    years and end soon: then its last frame decides."""
    if job.segmentation.kind in _WAYS or count_spans(job.segmentation, duration) <= MAX_ITEMS:
        return False
    file = VideoFile(Path(job.path), descriptor)
    with file.keeping_its_place(), VideoReader(file.path, descriptor) as other:  # a reader does not go back
        shown = other.image_at(duration, _short_side(job))
    return shown is not None and count_spans(job.segmentation, shown[0]) > MAX_ITEMS


def _spans(job: Job, reader: VideoReader) -> Iterator[Message]:
    last_time = -1.0
    for start, end in find_spans(job.segmentation, reader.duration):
        moments = [start + time for time in sample_times(end - start, job.num_frames)]
        images, times = yield from _take(job, reader, moments)
        if not times or (reader.has_ended and times[-1] <= last_time):
            return  # the file ends before it said it would
        last_time = times[-1]
        yield from _segment(job, start, end, images, times)


@dataclass(frozen=True)
class _Kept:
    """A frame that may be part of an item."""

    image: Image.Image
    """Small: a long shot has many of them."""
    fitted: Image.Image | None
    """As the model takes it, where that must be made from the frame in its own size."""


def _keep(job: Job, image: Image.Image) -> _Kept:
    if not job.fit.as_processor:
        return _Kept(image, None)
    small, scale = image, SHORT_SIDE / min(image.size)
    if scale < 1:
        width, height = (max(1, round(side * scale)) for side in image.size)
        small = image.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=2.0)
    return _Kept(small, fit_image(image, job.image_size, job.fit))


def _take(
    job: Job, reader: VideoReader, moments: Sequence[float]
) -> Generator[Alive, None, tuple[list[_Kept], list[float]]]:
    """As `VideoReader.take`, with a sign of life after every frame."""
    images: list[_Kept] = []
    times: list[float] = []
    for moment in moments:
        shown = reader.image_at(moment, _short_side(job))
        if shown is None:
            break
        if not times or shown[0] > times[-1]:
            times.append(shown[0])
            images.append(_keep(job, shown[1]))
        yield Alive()
    return images, times


def _shots(job: Job, reader: VideoReader) -> Iterator[Message]:
    """Compare four pictures a second; keep one frame a second of the shot that is on."""
    detector = ShotDetector()
    images: list[_Kept] = []
    times: list[float] = []
    start, last_time, next_number = 0.0, -1.0, 0
    while next_number < max(1, int(reader.duration * PICTURES_PER_SECOND)):
        number, next_number = next_number, next_number + 1
        change = reader.next_change - _GRID_TOLERANCE_S
        if number / PICTURES_PER_SECOND < change and last_time >= 0:
            # The same frame is still on screen, perhaps for weeks: nothing has to be decoded to know it.
            next_number = max(next_number, math.floor(change * PICTURES_PER_SECOND))
            continue
        shown = reader.image_at(number / PICTURES_PER_SECOND, _short_side(job))
        if shown is None or (reader.has_ended and shown[0] <= last_time):
            break
        if shown[0] <= last_time:
            continue  # the same frame is still on screen
        last_time, image = shown
        if detector.begins(last_time, image) and times:
            yield from _thin(job, start, last_time, images, times)
            start, images, times = last_time, [], []
        if not times or last_time - times[-1] >= _GRID_S:
            images.append(_keep(job, image))
            times.append(last_time)
            yield Alive()
    if times:
        yield from _thin(job, start, max(reader.duration, last_time), images, times)


def _moments(job: Job, reader: VideoReader) -> Iterator[Message]:
    """Frames at a steady rate, in blocks."""
    blocks: DenseBlocks[_Kept] = DenseBlocks(
        is_short=reader.duration <= MOST_DENSE_FRAMES * job.segmentation.seconds
    )
    chooser = DenseChooser(job.segmentation.seconds, is_short=blocks.is_short)
    number, last_time = 0, -1.0
    if not blocks.is_short:
        reader.thin_out(chooser.step)
    while number == 0 or number * chooser.step < reader.duration - _GRID_TOLERANCE_S:
        moment, number = number * chooser.step, number + 1
        change = reader.next_change - _GRID_TOLERANCE_S
        if moment < change and last_time >= 0:
            # The same frame is still on screen, perhaps for weeks: nothing has to be decoded to know it.
            number = max(number, math.floor(change / chooser.step))
            continue
        if blocks.is_short:
            shown = reader.image_at(moment, _short_side(job))
        else:
            shown = reader.glance_at(moment, _LOOK_SIDE)
        if shown is None or (reader.has_ended and shown[0] <= last_time):
            break
        yield Alive()
        if shown[0] <= last_time:
            continue
        last_time = shown[0]
        if not chooser.wants(last_time, shown[1]):
            continue
        whole = shown if blocks.is_short else reader.image_at(moment, _short_side(job))
        if whole is not None:
            for block in blocks.add(last_time, _keep(job, whole[1]), chooser.change):
                yield from _segment(job, *block)
    for block in blocks.rest(max(reader.duration, last_time)):
        yield from _segment(job, *block)


_WAYS = {"shots": _shots, "moments": _moments}


def _thin(job: Job, start: float, end: float, images: list[_Kept], times: list[float]) -> Iterator[Message]:
    chosen = sample_indices(len(images), job.num_frames)
    return _segment(job, start, end, [images[i] for i in chosen], [times[i] for i in chosen])


def _segment(job: Job, start: float, end: float, kept: list[_Kept], times: list[float]) -> Iterator[Message]:
    for time, frame in zip(times, kept, strict=True):
        fitted = frame.fitted or fit_image(frame.image, job.image_size, job.fit)
        yield Frame(time, np.asarray(fitted))
    images = [frame.image for frame in kept]
    yield SegmentEnd(start, end, len(images), make_pictures(images), make_strip(images))


def _short_side(job: Job) -> int | None:
    return job.fit.decoded_side(job.image_size, SHORT_SIDE)


def _without_path(message: str, path: str) -> str:
    """The ledger has the path already.

    >>> _without_path("/a/b.mp4 is truncated: …", "/a/b.mp4")
    'it is truncated: …'
    """
    return f"it {message.removeprefix(path).lstrip()}" if message.startswith(path) else message


# --- small pictures -----------------------------------------------------------------------------------------


def make_pictures(images: Sequence[Image.Image]) -> bytes:
    """JPEGs back to back: the frame with most in it, then every frame."""
    best = max(images, key=_interest)  # not the black one a film begins with, nor a fade
    return _shrunk(best, THUMBNAIL_SIDE, _THUMBNAIL_QUALITY) + b"".join(
        _shrunk(image, FRAME_SIDE, _FRAME_QUALITY) for image in images
    )


def make_strip(images: Sequence[Image.Image]) -> bytes:
    """JPEG of the frames from left to right, each `STRIP_FRAME_WIDTH` pixels wide."""
    width, height = strip_size(*images[0].size, len(images))
    size = (STRIP_FRAME_WIDTH, height)
    strip = Image.new("RGB", (width, height))
    for position, image in enumerate(images):
        strip.paste(image.resize(size, Image.Resampling.BICUBIC, reducing_gap=2.0), (position * size[0], 0))
    return _to_jpeg(strip, _STRIP_QUALITY)


def strip_size(width: int, height: int, num_frames: int) -> tuple[int, int]:
    """Width and height of the strip of so many frames of a video.

    >>> strip_size(1920, 1080, 10), strip_size(100, 1000, 1)
    ((960, 54), (96, 192))
    """
    tall = round(STRIP_FRAME_WIDTH * height / max(1, width))
    return STRIP_FRAME_WIDTH * num_frames, max(1, min(2 * STRIP_FRAME_WIDTH, tall))


def _interest(image: Image.Image) -> float:
    """Bits per pixel of the brightness: 0 for a flat picture, 8 where every shade is as frequent."""
    return image.resize((64, 64), Image.Resampling.BOX).convert("L").entropy()


def _shrunk(image: Image.Image, side: int, quality: int) -> bytes:
    """JPEG of an image that is no longer than `side` either way."""
    small = image.copy()
    small.thumbnail((side, side), Image.Resampling.BICUBIC, reducing_gap=2.0)
    return _to_jpeg(small, quality)


def _to_jpeg(image: Image.Image, quality: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()
