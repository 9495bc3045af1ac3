"""Indexing a folder, beside its decoding and its encoding alone: what bookkeeping and storage cost."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from gare.data.workers import Limits, WorkerPool
from gare.errors import LibraryError
from gare.library.index.encode_segments import encode_segments
from gare.library.index.extract import Job, extract
from gare.library.index.extract_task import Extracted, ExtractTask, Segment
from gare.library.index.index_run import IndexOptions
from gare.library.index.scan import scan_folders
from gare.library.index.segment import parse_segmentation
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


def benchmark_index(folder: Path, *, model: GARE, num_workers: int = 0) -> IndexBenchmark:
    """Decode and encode every video of a folder, then index it into a library that is thrown away."""
    num_workers = num_workers or os.cpu_count() or 1
    files = [file.path for file in scan_folders([str(folder)]).files]
    if not files:
        raise LibraryError(f"no videos in {folder}")
    started = time.perf_counter()
    segments = _decode(files, model, num_workers)
    decoded = time.perf_counter()
    for segment in segments:
        encode_segments(model, [segment])
    encoded = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as place,
        Library.open(Path(place) / "library", model=model) as library,
    ):
        options = IndexOptions(num_workers=num_workers)
        report = library.index(folder, options=options)
        again = library.index(folder, options=options)
    decode_s, encode_s = decoded - started, encoded - decoded
    return IndexBenchmark(
        num_files=len(files),
        num_items=len(segments),
        decode_s=decode_s,
        encode_s=encode_s,
        index_s=report.seconds,
        over_parts=report.seconds / (decode_s + encode_s),
        files_per_second=len(files) / report.seconds,
        unchanged_s=again.seconds,
    )


def _decode(files: list[str], model: GARE, num_workers: int) -> list[Segment]:
    wanted, whole = model.encoder.image_format, parse_segmentation("whole")
    segments: list[Segment] = []
    pool: WorkerPool[Job, Extracted] = WorkerPool(extract, num_workers, task=ExtractTask, limits=Limits())
    with pool:
        for path in files:
            pool.submit(Job(path, whole, model.config.num_frames, wanted.size, wanted.fit))
        while pool.unfinished:
            event = pool.next_event(_WAIT_S)
            if event is not None and isinstance(event.result, Segment):
                segments.append(event.result)
    return segments
