"""Frames that are already images: a picture, a folder of pictures, or a part of a tar archive.

A tar source is written `archive.tar::member.webp` for one picture, or `archive.tar::video7/` for a folder.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

from gare.data.frame_sampling import Sampling, sample_indices
from gare.errors import VideoError, VideoProblem

IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm"}
TAR_SEPARATOR = "::"


def read_images(
    source: str, num_frames: int, sampling: Sampling, *, offset: float = 0.5
) -> tuple[list[Image.Image], list[int], int]:
    """The chosen images of a frames source, their positions, and how many there are."""
    chosen, positions, total = read_chosen(source, num_frames, sampling, offset=offset)
    return [decode_image(name, content) for name, content in chosen], positions, total


def read_chosen(
    source: str, num_frames: int, sampling: Sampling, *, offset: float = 0.5
) -> tuple[list[tuple[str, bytes]], list[int], int]:
    """The names and bytes of the chosen images, not decoded; their positions, and how many there are."""
    names = list_images(source)
    positions = sample_indices(len(names), num_frames, sampling, offset=offset)
    return [(names[position], _read_image(names[position])) for position in positions], positions, len(names)


def is_frames_source(source: str) -> bool:
    """True for a tar member or prefix, a folder, and an image file."""
    return TAR_SEPARATOR in source or Path(source).suffix.lower() in IMAGE_SUFFIXES or Path(source).is_dir()


def list_images(source: str) -> list[str]:
    """Every image of a frames source, in order: file paths, or `archive.tar::member`."""
    archive, separator, member = source.partition(TAR_SEPARATOR)
    if separator:
        found = [f"{archive}{TAR_SEPARATOR}{name}" for name in _open_tar(archive).select(member)]
        if not found:
            raise VideoError(f"{archive} has no image or folder '{member}'", "missing")
        return found
    path = Path(source)
    if not path.exists():
        raise VideoError(f"{source} does not exist", "missing")
    if path.is_file():
        return [source]
    names = [str(entry) for entry in path.iterdir() if entry.suffix.lower() in IMAGE_SUFFIXES]
    if not names:
        raise VideoError(
            f"the folder {source} has no images ({', '.join(sorted(IMAGE_SUFFIXES))})", "zero_length"
        )
    return sorted(names, key=_natural_order)


def read_bytes(name: str) -> bytes:
    """The bytes of one image as `list_images` names it."""
    archive, separator, member = name.partition(TAR_SEPARATOR)
    return _open_tar(archive).read(member) if separator else Path(name).read_bytes()


def size_of(name: str) -> int:
    """How many bytes `read_bytes` would give."""
    archive, separator, member = name.partition(TAR_SEPARATOR)
    return _open_tar(archive).places[member][1] if separator else os.path.getsize(name)


def _read_image(name: str) -> bytes:
    try:
        content = read_bytes(name)
    except FileNotFoundError:
        raise VideoError(f"{name} does not exist", "missing") from None
    except OSError as error:
        raise VideoError(f"{name} cannot be read: {error}") from None
    if not content:
        raise VideoError(f"{name} is empty (0 bytes)", "zero_length")
    return content


def decode_image(name: str, content: bytes) -> Image.Image:
    """An image from its bytes; the name is for messages."""
    try:
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))  # as a phone held it
        return image.convert("RGB")
    except UnidentifiedImageError:
        raise VideoError(f"{name} is not an image that Pillow can read") from None
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        # Pillow reports a cut-off file as OSError, a broken PNG as SyntaxError.
        kind: VideoProblem = "truncated" if "truncated" in str(error) else "unreadable"
        raise VideoError(f"{name} cannot be read: {error}", kind) from None


@dataclass(frozen=True)
class _TarIndex:
    """Where every image of an uncompressed tar lies, so that any one is a single read."""

    path: str
    places: dict[str, tuple[int, int]]
    folders: dict[str, list[str]]

    def select(self, member: str) -> Sequence[str]:
        return [member] if member in self.places else self.folders.get(member.rstrip("/"), [])

    def read(self, member: str) -> bytes:
        offset, size = self.places[member]
        # Opened for each read: no descriptor to leak or to share over a fork, and it costs microseconds.
        with open(self.path, "rb") as file:
            file.seek(offset)
            return file.read(size)


def _open_tar(path: str) -> _TarIndex:
    try:
        stat = os.stat(path)
    except OSError:
        raise VideoError(f"the archive {path} does not exist", "missing") from None
    return _index_tar(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=64)
def _index_tar(path: str, _mtime_ns: int, _size: int) -> _TarIndex:
    places: dict[str, tuple[int, int]] = {}
    folders: dict[str, list[str]] = {}
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                name = member.name.removeprefix("./")
                if member.isfile() and Path(name).suffix.lower() in IMAGE_SUFFIXES:
                    places[name] = (member.offset_data, member.size)
                    folders.setdefault(name.rpartition("/")[0], []).append(name)
    except (tarfile.TarError, OSError) as error:
        raise VideoError(
            f"{path} is not a plain tar archive ({error}); compressed ones must be unpacked"
        ) from None
    return _TarIndex(
        path, places, {name: sorted(names, key=_natural_order) for name, names in folders.items()}
    )


def _natural_order(name: str) -> list[str | int]:
    """`frame2` before `frame10`."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]
