"""Frames that are already images: a picture, a folder of pictures, or a part of a container.

In a tar, `archive.tar::member.webp` is one picture, `archive.tar::video7/` a folder (`data.packed_members`).
"""

from __future__ import annotations

import io
import os
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

from gare.data.frame_sampling import Sampling, sample_indices
from gare.data.packed_members import (
    IMAGE_SUFFIXES,
    is_packed,
    is_packed_video,
    member_size,
    natural_order,
    read_member,
    select_members,
)
from gare.errors import VideoError, VideoProblem


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
    """True for a picture or folder in a container, a folder, and an image file."""
    if is_packed(source):
        return not is_packed_video(source)
    return Path(source).suffix.lower() in IMAGE_SUFFIXES or Path(source).is_dir()


def list_images(source: str) -> list[str]:
    """Every image of a frames source, in order: file paths, or `archive.tar::member`."""
    if is_packed(source):
        return select_members(source)
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
    return sorted(names, key=natural_order)


def read_bytes(name: str) -> bytes:
    """The bytes of one image as `list_images` names it."""
    return read_member(name) if is_packed(name) else Path(name).read_bytes()


def size_of(name: str) -> int:
    """How many bytes `read_bytes` would give."""
    return member_size(name) if is_packed(name) else os.path.getsize(name)


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
