"""What a worker process does with one file: decode the frames a model looks at, and make small pictures."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from gare.data.sampling import sample_indices, sample_times
from gare.data.transforms import to_bytes
from gare.data.video import SHORT_SIDE, VideoReader
from gare.data.workers import Alive
from gare.errors import VideoError
from gare.library.shots import LOOKS_PER_SECOND, ShotDetector
from gare.library.splitting import Split, find_spans
from gare.library.thumbnails import make_strip, make_thumbnail

MAX_ITEMS = 10_000
_GRID_S = 1.0 - 1e-3


@dataclass(frozen=True)
class Job:
    path: str
    split: Split
    num_frames: int
    image_size: int
    keep_damaged: bool = False


@dataclass(frozen=True)
class Stretch:
    """One item to be: its frames as the model takes them, before normalising."""

    start: float
    end: float
    times: tuple[float, ...]
    pixels: np.ndarray
    """uint8, frames × height × width × 3."""
    thumbnail: bytes
    strip: bytes


@dataclass(frozen=True)
class Facts:
    """Comes last, when the file is good."""

    duration: float
    width: int
    height: int


@dataclass(frozen=True)
class Failure:
    """Comes last, when it is not."""

    kind: str
    message: str


Extracted = Stretch | Facts | Failure | Alive


def extract(job: Job) -> Iterator[Extracted]:
    """Every item of a file, one by one, then its facts or why it cannot be used. One pass over the file."""
    try:
        if not Path(job.path).stat().st_size:
            raise VideoError("the file is empty (0 bytes); copy or download it again", "zero_length")
        with VideoReader(Path(job.path)) as reader:
            yield from _read(job, reader)
    except VideoError as error:
        yield Failure(error.kind, _without_path(str(error), job.path))
    except OSError as error:
        yield Failure("unreadable", f"it cannot be read: {error.strerror or error}")
    except MemoryError:
        raise  # the process is at its limit, and given up
    except Exception as error:  # no file may stop a run, whatever it makes a library do
        yield Failure("unreadable", f"it cannot be read: {type(error).__name__}: {error}")


def _read(job: Job, reader: VideoReader) -> Iterator[Extracted]:
    damage = reader.judge(has_frames=True)  # cut off: known before anything is decoded
    if damage is not None and not job.keep_damaged:
        raise damage
    stretches = _shots(job, reader) if job.split.kind == "shots" else _spans(job, reader)
    num_items = 0
    for stretch in stretches:
        num_items += isinstance(stretch, Stretch)
        if num_items > MAX_ITEMS:
            yield Failure("too_many_items", f"it gives more than {MAX_ITEMS:,} items; split it less finely")
            return
        yield stretch
    damage = reader.judge(has_frames=num_items > 0)
    if damage is not None and not job.keep_damaged:
        raise damage
    yield Facts(reader.duration, *reader.size)


def _spans(job: Job, reader: VideoReader) -> Iterator[Stretch | Alive]:
    last_time = -1.0
    for start, end in find_spans(job.split, reader.duration):
        moments = [start + time for time in sample_times(end - start, job.num_frames)]
        images, times = yield from _take(reader, moments, _short_side(job))
        if not times or (reader.has_ended and times[-1] <= last_time):
            return  # the file ends before it said it would
        last_time = times[-1]
        yield _make_stretch(job, start, end, images, times)


def _take(
    reader: VideoReader, moments: Sequence[float], short_side: int
) -> Generator[Alive, None, tuple[list[Image.Image], list[float]]]:
    """As `VideoReader.take`, with a sign of life after every frame."""
    images: list[Image.Image] = []
    times: list[float] = []
    for moment in moments:
        shown = reader.image_at(moment, short_side)
        if shown is None:
            break
        if not times or shown[0] > times[-1]:
            times.append(shown[0])
            images.append(shown[1])
        yield Alive()
    return images, times


def _shots(job: Job, reader: VideoReader) -> Iterator[Stretch | Alive]:
    """Look four times a second; keep a frame a second of the shot that is on."""
    detector = ShotDetector()
    images: list[Image.Image] = []
    times: list[float] = []
    start, last_time = 0.0, -1.0
    for look in range(max(1, int(reader.duration * LOOKS_PER_SECOND))):
        shown = reader.image_at(look / LOOKS_PER_SECOND, _short_side(job))
        if shown is None or (reader.has_ended and shown[0] <= last_time):
            break
        if shown[0] <= last_time:
            continue  # the same frame is still on screen
        last_time, image = shown
        if detector.begins(last_time, image) and times:
            yield _thin(job, start, last_time, images, times)
            start, images, times = last_time, [], []
        if not times or last_time - times[-1] >= _GRID_S:
            images.append(image)
            times.append(last_time)
            yield Alive()
    if times:
        yield _thin(job, start, max(reader.duration, last_time), images, times)


def _thin(job: Job, start: float, end: float, images: list[Image.Image], times: list[float]) -> Stretch:
    chosen = sample_indices(len(images), job.num_frames)
    return _make_stretch(job, start, end, [images[i] for i in chosen], [times[i] for i in chosen])


def _make_stretch(
    job: Job, start: float, end: float, images: list[Image.Image], times: list[float]
) -> Stretch:
    pixels = to_bytes(images, job.image_size).permute(0, 2, 3, 1).numpy()
    return Stretch(start, end, tuple(times), pixels, make_thumbnail(images), make_strip(images))


def _short_side(job: Job) -> int:
    return max(SHORT_SIDE, job.image_size)


def _without_path(message: str, path: str) -> str:
    """The ledger has the path already.

    >>> _without_path("/a/b.mp4 is truncated: …", "/a/b.mp4")
    'it is truncated: …'
    """
    return f"it {message.removeprefix(path).lstrip()}" if message.startswith(path) else message
