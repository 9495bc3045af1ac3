"""What a limited worker process does with an upload: find its frames, or say why there are none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image, ImageOps

from gare.data.transforms import to_bytes
from gare.library.extract import Facts, Failure, Job, Stretch, extract
from gare.library.splitting import Split
from gare.library.walk import looks_like_video

Kind = Literal["image", "video"]
_MOST_PIXELS = 64_000_000
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
_MAGICS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a", b"BM")


@dataclass(frozen=True)
class Upload:
    path: str
    kind: Kind
    num_frames: int
    image_size: int


def sniff(start: bytes) -> Kind | None:
    """Image or video by the first bytes: what a client calls a file says nothing.

    >>> sniff(b"\\xff\\xd8\\xff\\xe0"), sniff(b"#!/bin/sh"), sniff(bytes(4) + b"ftypisom")
    ('image', None, 'video')
    """
    if start.startswith(_MAGICS) or (start[:4] == b"RIFF" and start[8:12] == b"WEBP"):
        return "image"
    return "video" if looks_like_video(start) else None


def decode_upload(upload: Upload) -> Iterator[np.ndarray | Failure]:
    """Frames as the model takes them: uint8, frames × height × width × 3."""
    if upload.kind == "image":
        yield _decode_image(upload)
        return
    job = Job(upload.path, Split(), upload.num_frames, upload.image_size)
    pixels: np.ndarray | None = None
    for part in extract(job):
        if isinstance(part, Stretch):
            pixels = part.pixels
        elif isinstance(part, Failure):
            yield part
            return
        elif isinstance(part, Facts):
            break
    yield pixels if pixels is not None else Failure("no_video", "it has no frame")


def _decode_image(upload: Upload) -> np.ndarray | Failure:
    try:
        with Image.open(upload.path, formats=_FORMATS) as image:
            if image.width * image.height > _MOST_PIXELS:
                return Failure("too_large", f"{image.width} × {image.height} pixels are too many")
            image.draft("RGB", (1024, 1024))
            upright = ImageOps.exif_transpose(image).convert("RGB")
        pixels: np.ndarray = to_bytes([upright], upload.image_size).permute(0, 2, 3, 1).numpy()
        return pixels
    except MemoryError:
        raise  # the process is at its limit, and given up
    except Exception as error:
        return Failure("unreadable", f"it cannot be read: {error}")
