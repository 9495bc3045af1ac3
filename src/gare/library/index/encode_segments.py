"""From the frames of segments to vectors, in batches over many files; and from vectors to items.

Shapes: V segments, F frames, C = 3, H = W, D embedding.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch

from gare.data.frame_sampling import sample_indices
from gare.data.workers import Limits, WorkerPool
from gare.library.index.dense_frames import as_stored
from gare.library.index.extract import Job, extract
from gare.library.index.extract_task import Extracted, ExtractTask, Segment
from gare.library.index.moment_ranges import moment_ranges
from gare.library.index.segment import Segmentation
from gare.library.search.stage1 import stage1_vectors
from gare.library.store.stored_frames import pack_frames
from gare.model import GARE
from gare.model.gare import stack_clips
from gare.types import VideoFeatures

Owner = TypeVar("Owner")
_BATCH_SIZES = {"cpu": 1, "cuda": 32}  # on a CPU, what fits its caches is fastest
_FRAMES_AT_ONCE = 12  # of a block, on a CPU
_BLOCKS_AT_ONCE = {"cuda": 64}
_PATIENCE_S = 2.0  # a batch that is not full waits no longer than this


@dataclass(frozen=True)
class EncodedItem:
    """A part of a segment that becomes an item: the whole of it, or a range of dense frames."""

    start: float
    end: float
    vector: np.ndarray
    """Finds candidates."""


@dataclass(frozen=True)
class Encoded:
    """A segment with its vectors and its items; its pixels are gone."""

    start: float
    end: float
    times: tuple[float, ...]
    thumbnail: bytes
    strip: bytes
    frames: bytes
    """float16, frames × dim, little-endian."""
    items: tuple[EncodedItem, ...]


class EncodeQueue(Generic[Owner]):
    """Segments of many files, encoded together as soon as there are enough of them."""

    def __init__(self, model: GARE, segmentation: Segmentation) -> None:
        self._model, self._is_dense = model, segmentation.is_dense
        self._size = _BATCH_SIZES.get(model.device.type, 1)
        self._waiting: list[tuple[Owner, Segment]] = []
        self._since = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, owner: Owner, segment: Segment) -> None:
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting.append((owner, segment))

    def drop(self, owner: Owner) -> None:
        """Forget the waiting segments of a file that failed."""
        self._waiting = [(other, segment) for other, segment in self._waiting if other is not owner]

    def run(self, *, is_idle: bool) -> Iterator[tuple[Owner, Encoded]]:
        """Encode what is due: full batches; the rest when nothing else is to come or it waited for long."""
        while self._waiting:
            is_due = len(self._waiting) >= self._size or is_idle
            if not is_due and time.monotonic() - self._since < _PATIENCE_S:
                return
            batch, self._waiting = self._waiting[: self._size], self._waiting[self._size :]
            self._since = time.monotonic()
            encoded = encode_segments(self._model, [segment for _, segment in batch], is_dense=self._is_dense)
            yield from zip([owner for owner, _ in batch], encoded, strict=True)


def encode_file(model: GARE, path: str, segmentation: Segmentation) -> list[Encoded]:
    """The items of one file; none where it cannot be decoded."""
    wanted = model.encoder.image_format
    job = Job(path, segmentation, model.config.num_frames, wanted.size, wanted.fit, keep_damaged=True)
    pool: WorkerPool[Job, Extracted] = WorkerPool(extract, 1, task=ExtractTask, limits=Limits())
    segments = []
    try:
        pool.submit(job)
        while pool.unfinished:
            event = pool.next_event()
            if event is not None and isinstance(event.result, Segment):
                segments.append(event.result)
    finally:
        pool.close()
    is_dense = segmentation.is_dense
    return [one for segment in segments for one in encode_segments(model, [segment], is_dense=is_dense)]


@torch.no_grad()
def encode_segments(model: GARE, segments: Sequence[Segment], *, is_dense: bool = False) -> list[Encoded]:
    """Encode one batch; padding is masked, so batch mates change nothing."""
    if is_dense:
        return [_encode_dense(model, segment) for segment in segments]
    clips = [torch.from_numpy(segment.pixels).permute(0, 3, 1, 2) for segment in segments]
    video = model.encode_frames(*stack_clips(clips))
    vectors_VE = stage1_vectors(model, video).float().cpu().numpy()
    return [
        _encoded(segment, frames, [EncodedItem(segment.start, segment.end, vector_E)])
        for segment, frames, vector_E in zip(segments, pack_frames(video), vectors_VE, strict=True)
    ]


def _encode_dense(model: GARE, segment: Segment) -> Encoded:
    """A block of dense frames and the items that are ranges of it."""
    pixels = torch.from_numpy(segment.pixels).permute(0, 3, 1, 2)
    size = _BLOCKS_AT_ONCE.get(model.device.type, _FRAMES_AT_ONCE)
    parts = [model.encode_frames(*stack_clips([part])) for part in pixels.split(size)]
    frames_FD = torch.cat([part.frames_VFD[0] for part in parts])
    bounds = [*map(as_stored, segment.times), segment.end]
    ranges = moment_ranges(frames_FD)
    clips = [frames_FD[first:last] for first, last in ranges]
    chosen = [clip[sample_indices(len(clip), model.config.num_frames)] for clip in clips]
    vectors_VE = stage1_vectors(model, VideoFeatures.stack(chosen)).float().cpu().numpy()
    items = [
        EncodedItem(segment.start if first == 0 else bounds[first], bounds[last], vector_E)
        for (first, last), vector_E in zip(ranges, vectors_VE, strict=True)
    ]
    return _encoded(segment, frames_FD.to(torch.float16).cpu().numpy().astype("<f2").tobytes(), items)


def _encoded(segment: Segment, frames: bytes, items: Sequence[EncodedItem]) -> Encoded:
    return Encoded(
        segment.start,
        segment.end,
        segment.times,
        segment.thumbnail,
        segment.strip,
        frames,
        tuple(items),
    )
