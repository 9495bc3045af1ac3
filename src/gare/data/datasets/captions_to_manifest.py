"""From captions by video to a manifest: what all readers of datasets share."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from gare.data.annotation_files import Problems
from gare.data.containers import VIDEO_SUFFIXES
from gare.data.manifest import Counts, Header, Manifest, Row, Split
from gare.data.object_storage import address_of
from gare.data.packed_members import IMAGE_SUFFIXES
from gare.errors import DataError

Captions = Mapping[str, Sequence[str]]
"""Captions of every video of a split, by id and in gallery order."""
_LISTED_SUFFIXES = VIDEO_SUFFIXES | {".gif", ".ogg"}
"""A dataset lists its files, so that these are known to be videos; in a folder they may be anything."""


def build(
    name: str,
    protocol: str,
    captions: Mapping[Split, Captions],
    *,
    videos: Path | None,
    expected: Mapping[Split, Counts],
    suffix: str = ".mp4",
    repeated_captions: bool = False,
    paths: Mapping[str, str] | None = None,
) -> Manifest:
    """The manifest of these captions; `expected` is kept in its header and checked."""
    if paths is None:
        paths = locate((video_id for split in captions.values() for video_id in split), videos, suffix=suffix)
    rows = tuple(
        Row(video_id, paths[video_id], caption, split)
        for split, by_video in captions.items()
        for video_id, texts in by_video.items()
        for caption in texts
    )
    root = "." if videos is None else address_of(videos) or str(videos.resolve())
    return Manifest(Header(name, protocol, expected, root, repeated_captions), rows)


def locate(video_ids: Iterable[str], videos: Path | None, *, suffix: str = ".mp4") -> dict[str, str]:
    """Find a path below `videos` for every id; `id + suffix` where none is found, to be reported as missing.

    A file matches by its name with or without suffix, a folder of frames by its name.
    """
    found = {} if videos is None else _index_folder(videos)
    paths = {}
    for video_id in video_ids:
        has_suffix = Path(video_id).suffix.lower() in _LISTED_SUFFIXES
        # DiDeMo's ids end in the suffix of the first upload, the copies people have in another.
        stem = video_id[: -len(Path(video_id).suffix)] if has_suffix else video_id
        default = video_id if has_suffix else video_id + suffix
        paths[video_id] = found.get(video_id) or found.get(stem) or default
    return paths


def _index_folder(videos: Path) -> dict[str, str]:
    if not videos.is_dir():
        raise DataError(f"{videos} is not a folder; give the folder that holds the videos")
    by_name: dict[str, str] = {}
    by_stem: dict[str, str] = {}
    for folder, subfolders, names in os.walk(videos):
        subfolders.sort()
        relative = Path(folder).relative_to(videos)
        if relative.name and any(Path(name).suffix.lower() in IMAGE_SUFFIXES for name in names):
            by_name.setdefault(relative.name, relative.as_posix())
        for name in sorted(names):
            if Path(name).suffix.lower() in _LISTED_SUFFIXES:
                path = (relative / name).as_posix()
                by_name.setdefault(name, path)
                by_stem.setdefault(Path(name).stem, path)
    return by_stem | by_name


def pick(
    ids: Iterable[tuple[int, str]], captions: Captions, path: Path, where: str
) -> dict[str, Sequence[str]]:
    """The captions of listed ids; a list that names an id twice, or one without captions, is refused."""
    problems = Problems(path)
    chosen: dict[str, Sequence[str]] = {}
    first_line: dict[str, int] = {}
    for line, video_id in ids:
        if video_id in chosen:
            problems.add(line, f"{video_id} is already in line {first_line[video_id]}; delete one of the two")
        elif not captions.get(video_id):
            problems.add(line, f"{video_id} has no captions in {where}; correct the id or get the full file")
        else:
            chosen[video_id] = captions[video_id]
            first_line[video_id] = line
            if not all(caption.strip() for caption in captions[video_id]):
                problems.add(line, f"{video_id} has an empty caption in {where}; write one or delete it")
    problems.raise_if_any()
    return chosen


def find(folder: Path, *names: str) -> Path | None:
    """The first of these files that exists."""
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; give the folder of annotation files")
    return next((folder / name for name in names if (folder / name).is_file()), None)


def require(folder: Path, *names: str) -> Path:
    """The first of these files that exists; an error if none does."""
    path = find(folder, *names)
    if path is None:
        raise DataError(
            f"{folder} has no {' or '.join(names)}; give the folder that holds the annotation files"
        )
    return path


def join_sentences(sentences: Iterable[str]) -> str:
    """A paragraph: the sentences of a video, in order, with one space between them.

    >>> join_sentences(["A man sits.", "  He stands up. "])
    'A man sits. He stands up.'
    """
    return " ".join(sentence.strip() for sentence in sentences if sentence.strip())
