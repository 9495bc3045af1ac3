"""WebDataset: tars in which `clip7.mp4` and `clip7.txt` are one sample. Members are read where they lie.

| ending | is |
| --- | --- |
| of a video or a picture | the video; a picture is a video of one frame |
| `.txt`, `.caption` | captions, one a line |
| `.json` | captions under `caption`, `captions` or `text`: a string, or a list of strings |

Other members are left alone. A shard whose name, or folder, begins with `val` or `test` is for that split.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any

from gare.data.containers import VIDEO_SUFFIXES
from gare.data.datasets.captions_to_manifest import Captions, build
from gare.data.datasets.split_names import split_of_name
from gare.data.manifest import Counts, Manifest, Split
from gare.data.object_storage import address_of, list_objects, open_binary
from gare.data.packed_members import IMAGE_SUFFIXES, SEPARATOR, leads_out, tar_members
from gare.errors import DataError, VideoError

_TEXT_SUFFIXES, _JSON_SUFFIX = (".txt", ".caption"), ".json"
_JSON_KEYS = ("caption", "captions", "text")
_LARGEST_TEXT = 2**20
_SHOWN = 5


def read(annotations: Path, *, videos: Path | None = None) -> Manifest:
    """The samples of all shards of a folder, or of one shard.

    Args:
        annotations: the folder of shards, or the one tar; here or on object storage, `s3://bucket/shards`.
        videos: not used; videos lie beside their captions.
    """
    if videos is not None:
        raise DataError("the videos of WebDataset shards lie in the shards: leave --videos out")
    root, shards = _find(annotations)
    captions: dict[Split, dict[str, list[str]]] = {}
    paths: dict[str, str] = {}
    problems: list[str] = []
    for place, shard in shards.items():
        split = split_of_name(place) or "train"
        for key, sample in _samples(shard, problems).items():
            video_id = f"{place.with_suffix('').as_posix()}/{key}"
            captions.setdefault(split, {})[video_id] = sample.captions
            paths[video_id] = f"{place.as_posix()}{SEPARATOR}{sample.media}"
    _raise_if_any(problems)
    counted = {split: _count(by_video) for split, by_video in captions.items()}
    return build(annotations.stem, "WebDataset shards", captions, videos=root, paths=paths, expected=counted)


def _find(annotations: Path) -> tuple[Path, dict[PurePosixPath, str]]:
    """The folder or address that all shards lie below, and the shards by their place there."""
    address = address_of(annotations)
    if address is None:
        is_folder = annotations.is_dir()
        paths = sorted(annotations.rglob("*.tar")) if is_folder else [annotations]
        found = [path.as_posix() for path in paths if path.is_file()]
    else:
        found = _list(address)
        is_folder = found != [address]
    if not found:
        raise DataError(f"{address or annotations} has no tar; give the folder of shards, or one shard")
    root = annotations if is_folder else annotations.parent
    return root, {PurePosixPath(Path(shard).relative_to(root)): shard for shard in found}


def _list(address: str) -> list[str]:
    scheme = address.partition("://")[0]
    try:
        return sorted(
            f"{scheme}://{info.path}" for info in list_objects(address) if info.path.endswith(".tar")
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0][:300]
        raise DataError(
            f"{address} cannot be listed: {reason}. Check the address, the credentials and that the service "
            "runs"
        ) from error


class _Sample:
    """The members of one key."""

    def __init__(self) -> None:
        self.media = ""
        self.captions: list[str] = []


def _samples(shard: str, problems: list[str]) -> dict[str, _Sample]:
    """Whole samples by key, in the order of the shard; what is wrong with others is noted."""
    found: dict[str, _Sample] = {}
    seen: set[str] = set()
    try:
        with open_binary(shard) as file:
            for member in tar_members(shard):
                name = member.name.removeprefix("./")
                key, suffix = _key_of(name)
                if member.isdir() or suffix not in _KNOWN:
                    continue
                problem = _problem(member, name, seen)
                if problem:
                    problems.append(f"{shard}: {name} {problem}")
                    continue
                seen.add(name)
                sample = found.setdefault(key, _Sample())
                if suffix in VIDEO_SUFFIXES or suffix in IMAGE_SUFFIXES:
                    if sample.media:
                        problems.append(f"{shard}: {key} has two videos, {sample.media} and {name}")
                    sample.media = name
                else:
                    file.seek(member.offset_data)
                    sample.captions += _captions(file.read(member.size), suffix, f"{shard}: {name}", problems)
    except (VideoError, OSError) as error:
        raise DataError(str(error)) from None
    for key, sample in found.items():
        if not sample.media or not sample.captions:
            what = "captions" if sample.media else "video"
            problems.append(f"{shard}: the sample {key} has no {what}")
    return {key: sample for key, sample in found.items() if sample.media and sample.captions}


_KNOWN = VIDEO_SUFFIXES | IMAGE_SUFFIXES | {*_TEXT_SUFFIXES, _JSON_SUFFIX}


def _key_of(name: str) -> tuple[str, str]:
    """The key of a member, up to the first dot of its file name, and its ending.

    >>> _key_of("a.b/clip7.MP4"), _key_of("clip7.seg.txt")
    (('a.b/clip7', '.mp4'), ('clip7', '.txt'))
    """
    folder, slash, file = name.rpartition("/")
    return f"{folder}{slash}{file.partition('.')[0]}", Path(file).suffix.lower()


def _problem(member: tarfile.TarInfo, name: str, seen: set[str]) -> str | None:
    if leads_out(name):
        return "leads out of the archive; such an archive was made to harm, or by mistake"
    if not member.isfile() or member.issparse():
        return "is a link, or no plain file; pack the file itself"
    if name in seen:
        return "is there twice; keep one of the two"
    is_text = Path(name).suffix.lower() in (*_TEXT_SUFFIXES, _JSON_SUFFIX)
    if is_text and member.size > _LARGEST_TEXT:
        return f"has {member.size:,} bytes, too many for captions"
    return None


def _captions(content: bytes, suffix: str, where: str, problems: list[str]) -> list[str]:
    try:
        text = content.decode("utf-8-sig")
        found: Any = _from_json(json.loads(text)) if suffix == _JSON_SUFFIX else text.splitlines()
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        problems.append(f"{where} cannot be read: {error}")
        return []
    return [caption.strip() for caption in found if caption.strip()]


def _from_json(values: Any) -> list[str]:
    """The captions in a JSON member; none where it holds something else."""
    found: Any = (
        next((values[key] for key in _JSON_KEYS if key in values), []) if isinstance(values, dict) else []
    )
    listed = found if isinstance(found, list) else [found]
    if not all(isinstance(caption, str) for caption in listed):
        raise ValueError("a caption is no text")
    return listed


def _raise_if_any(problems: list[str]) -> None:
    if problems:
        more = len(problems) - _SHOWN
        raise DataError(
            "\n".join(problems[:_SHOWN] + ([f"… and {more} more like these"] if more > 0 else []))
        )


def _count(by_video: Captions) -> Counts:
    return Counts(len(by_video), sum(map(len, by_video.values())))
