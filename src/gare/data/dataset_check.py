"""What is wrong with a dataset before it costs a training run: files, counts and duplicates."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from gare.data.boxed_clips import ClipJob, read_boxed_clips
from gare.data.frame_images import is_frames_source, list_images, read_bytes, size_of
from gare.data.manifest import Counts, Manifest, Row, Split
from gare.data.packed_members import is_packed_video, member_size, read_member
from gare.data.video import source_exists
from gare.errors import VideoError, VideoProblem

Kind = VideoProblem | Literal["count_mismatch", "duplicate_video", "duplicate_caption"]
WARNINGS: tuple[Kind, ...] = ("duplicate_video", "duplicate_caption")
"""Worth knowing, but the datasets themselves have them: 1k-A has four groups of equal captions."""

_SHORT_SIDE = 64
_NUM_FRAMES = 12  # as training reads them: damage anywhere near the sampled moments is met


@dataclass(frozen=True)
class Finding:
    """One thing to mend or to know."""

    kind: Kind
    message: str
    video_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """Everything `check_manifest` found."""

    name: str
    counts: Mapping[Split, Counts]
    expected: Mapping[Split, Counts]
    num_readable: int
    findings: tuple[Finding, ...] = field(default=())

    @property
    def is_good(self) -> bool:
        """Nothing to mend; duplicates are warnings."""
        return all(finding.kind in WARNINGS for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {**asdict(self), "is_good": self.is_good}


def check_manifest(
    manifest: Manifest,
    *,
    decode: bool = True,
    num_workers: int = 1,
    on_video: Callable[[], None] = lambda: None,
) -> Report:
    """Count rows, open and decode every video, and look for duplicates.

    Args:
        manifest: loaded with `allow_missing`, so that wrong counts are a finding and not an error.
        decode: False only looks whether the files are there.
        num_workers: processes that decode.
        on_video: called after each video, for a progress bar.
    """
    videos = manifest.all_videos()
    findings = _count_mismatches(manifest)
    broken = set()
    for video, problem in _examine(manifest, videos, decode=decode, num_workers=num_workers):
        if problem is not None:
            broken.add(video.video_id)
            findings.append(Finding(problem.kind, str(problem), (video.video_id,)))
        on_video()
    readable = [video for video in videos if video.video_id not in broken]
    findings += _duplicate_videos(manifest, readable)
    findings += _duplicate_captions(manifest)
    return Report(
        manifest.header.name, manifest.counts, manifest.header.expected, len(readable), tuple(findings)
    )


def _count_mismatches(manifest: Manifest) -> list[Finding]:
    found = manifest.counts
    return [
        Finding("count_mismatch", f"{split}: {found.get(split, Counts(0, 0))} instead of {expected}")
        for split, expected in manifest.header.expected.items()
        if found.get(split) != expected
    ]


def _examine(
    manifest: Manifest, videos: Sequence[Row], *, decode: bool, num_workers: int
) -> Iterator[tuple[Row, VideoError | None]]:
    """Each video and what is wrong with it."""
    if not decode:
        for video in videos:
            source = manifest.source(video)
            exists = source_exists(source)
            yield video, None if exists else VideoError(f"{source} does not exist", "missing")
        return
    waiting: dict[ClipJob, list[Row]] = {}
    for video in videos:
        job = ClipJob(
            manifest.source(video), _NUM_FRAMES, start=video.start, end=video.end, short_side=_SHORT_SIDE
        )
        waiting.setdefault(job, []).append(video)
    jobs = [job for job, rows in waiting.items() for _ in rows]
    for job, clip in read_boxed_clips(jobs, num_workers=num_workers):
        yield waiting[job].pop(), clip.problem


def _duplicate_videos(manifest: Manifest, videos: Iterable[Row]) -> list[Finding]:
    """Equal content under two ids. Only files of equal size are read, so this costs next to nothing."""
    by_size = _group(videos, lambda video: (_size(manifest.source(video)), video.start, video.end))
    findings = []
    for same_size in by_size:
        for group in _group(same_size, lambda video: _digest(manifest.source(video))):
            splits = sorted({video.split for video in group})
            leak = f", in {' and '.join(splits)}: a leak" if len(splits) > 1 else ""
            ids = tuple(video.video_id for video in group)
            findings.append(Finding("duplicate_video", f"{' = '.join(ids)}: the same content{leak}", ids))
    return findings


def _duplicate_captions(manifest: Manifest) -> list[Finding]:
    """One text for several videos of a split: no model can rank them, and ties decide."""
    findings = []
    for split in manifest.splits:
        rows = [row for row in manifest.rows if row.split == split]
        for group in _group(rows, lambda row: row.caption):
            ids = tuple(dict.fromkeys(row.video_id for row in group))
            if len(ids) > 1:
                message = f"{split}: '{group[0].caption}' describes {len(ids)} videos"
                findings.append(Finding("duplicate_caption", message, ids))
    return findings


def _group(rows: Iterable[Row], key: Callable[[Row], Any]) -> list[list[Row]]:
    """Rows that share a key, two or more of them."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return [group for group in groups.values() if len(group) > 1]


def _size(source: str) -> int:
    if is_packed_video(source):
        return member_size(source)
    if not is_frames_source(source):
        return os.path.getsize(source)
    return sum(size_of(name) for name in list_images(source))


def _digest(source: str) -> str:
    if is_packed_video(source):
        return hashlib.sha256(read_member(source)).hexdigest()
    if not is_frames_source(source):
        with open(source, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    digest = hashlib.sha256()
    for name in list_images(source):
        digest.update(read_bytes(name))
    return digest.hexdigest()
