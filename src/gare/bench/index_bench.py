"""Indexing a folder, beside its decoding and its encoding alone: what bookkeeping and storage cost."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gare.data.workers import Limits, WorkerPool
from gare.errors import LibraryError
from gare.library.index.encode_segments import encode_segments
from gare.library.index.extract import Job, extract
from gare.library.index.extract_task import Extracted, ExtractTask, Segment
from gare.library.index.index_run import IndexOptions
from gare.library.index.scan import scan_folders
from gare.library.index.segment import Segmentation, default_segmentation
from gare.library.library import Library
from gare.model import GARE

_WAIT_S = 1.0


@dataclass(frozen=True)
class IndexBenchmark:
    """Seconds for the same files; `over_parts` is indexing over decoding and encoding one after the other."""

    num_files: int
    num_items: int
    decode_s: float
    encode_s: float
    index_s: float
    over_parts: float
    files_per_second: float
    unchanged_s: float
    """A second run, with nothing to do."""
    decode_core_s: float
    """Processor seconds of decoding, of all processes."""
    index_core_s: float
    """Processor seconds of the first indexing run."""
    video_hours: float
    """Hours that the files last."""
    num_frames: int
    picture_bytes: int
    """Small pictures of all frames, as they are stored."""

    @property
    def constants(self) -> dict[str, float]:
        """What `gare plan` uses of it."""
        return {
            "picture_bytes": self.picture_bytes / self.num_frames,
            "frames_an_hour": self.num_frames / self.video_hours,
            "decode_core_s": self.decode_core_s / self.video_hours,
            "index_core_s": self.index_core_s / self.video_hours,
        }


def benchmark_index(folder: Path, *, model: GARE, num_workers: int = 0) -> IndexBenchmark:
    """Decode and encode every video of a folder, then index it into a library that is thrown away."""
    num_workers = num_workers or os.cpu_count() or 1
    files = [file.path for file in scan_folders([str(folder)]).files]
    if not files:
        raise LibraryError(f"no videos in {folder}")
    started, before = time.perf_counter(), _core_seconds()
    segmentation = default_segmentation(None, has_temporal=not model.has_independent_frames)
    segments = _decode(files, model, segmentation, num_workers)
    decoded, decode_core_s = time.perf_counter(), _core_seconds() - before
    for segment in segments:
        encode_segments(model, [segment])
    encoded = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as place,
        Library.open(Path(place) / "library", model=model) as library,
    ):
        options = IndexOptions(num_workers=num_workers)
        before = _core_seconds()
        report = library.index(folder, options=options)
        index_core_s = _core_seconds() - before
        again = library.index(folder, options=options)
    decode_s, encode_s = decoded - started, encoded - decoded
    return IndexBenchmark(
        num_files=len(files),
        num_items=report.num_items_encoded,
        decode_s=decode_s,
        encode_s=encode_s,
        index_s=report.seconds,
        over_parts=report.seconds / (decode_s + encode_s),
        files_per_second=len(files) / report.seconds,
        unchanged_s=again.seconds,
        decode_core_s=decode_core_s,
        index_core_s=index_core_s,
        video_hours=report.video_seconds / 3600,
        num_frames=sum(len(segment.times) for segment in segments),
        picture_bytes=sum(len(segment.thumbnail) + len(segment.strip) for segment in segments),
    )


def _decode(files: list[str], model: GARE, segmentation: Segmentation, num_workers: int) -> list[Segment]:
    wanted = model.encoder.image_format
    segments: list[Segment] = []
    pool: WorkerPool[Job, Extracted] = WorkerPool(extract, num_workers, task=ExtractTask, limits=Limits())
    with pool:
        for path in files:
            pool.submit(Job(path, segmentation, model.config.num_frames, wanted.size, wanted.fit))
        while pool.unfinished:
            event = pool.next_event(_WAIT_S)
            if event is not None and isinstance(event.result, Segment):
                segments.append(event.result)
    return segments


def _core_seconds() -> float:
    """Processor time of this process and its children, those included that they have seen end."""
    spent = os.times()
    total = spent.user + spent.system + spent.children_user + spent.children_system
    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text().split():
            with suppress(OSError):  # it ended
                after_name = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                total += sum(map(int, after_name[11:15])) / os.sysconf("SC_CLK_TCK")
    return total
