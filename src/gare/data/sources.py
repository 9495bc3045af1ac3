"""Where the video of an id lies in a folder, whatever its suffix and however deep."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from gare.data.frames import IMAGE_SUFFIXES
from gare.errors import DataError

VIDEO_SUFFIXES = {
    *(
        ".mp4",
        ".m4v",
        ".mov",
        ".webm",
        ".mkv",
        ".avi",
        ".mpg",
        ".mpeg",
        ".ts",
        ".m2ts",
        ".mts",
        ".flv",
        ".wmv",
    ),
    *(".asf", ".3gp", ".3g2", ".ogv", ".ogg", ".vob", ".mxf", ".dv", ".gif", ".rm", ".h264", ".hevc", ".ivf"),
}


def locate(video_ids: Iterable[str], videos: Path | None, *, suffix: str = ".mp4") -> dict[str, str]:
    """A path below `videos` for every id; `id + suffix` where none is found, to be reported as missing.

    A file matches by its name with or without suffix, a folder of frames by its name.
    """
    found = {} if videos is None else _index(videos)
    paths = {}
    for video_id in video_ids:
        has_suffix = Path(video_id).suffix.lower() in VIDEO_SUFFIXES
        # DiDeMo's ids end in the suffix of the first upload, the copies people have in another.
        stem = video_id[: -len(Path(video_id).suffix)] if has_suffix else video_id
        default = video_id if has_suffix else video_id + suffix
        paths[video_id] = found.get(video_id) or found.get(stem) or default
    return paths


def _index(videos: Path) -> dict[str, str]:
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
            if Path(name).suffix.lower() in VIDEO_SUFFIXES:
                path = (relative / name).as_posix()
                by_name.setdefault(name, path)
                by_stem.setdefault(Path(name).stem, path)
    return by_stem | by_name
