"""Small pictures of an item: the frame that shows most, and all frames side by side."""

from __future__ import annotations

import io
from collections.abc import Sequence

from PIL import Image

THUMBNAIL_SIDE = 320
STRIP_FRAME_WIDTH = 96
_THUMBNAIL_QUALITY, _STRIP_QUALITY = 80, 70


def make_thumbnail(images: Sequence[Image.Image]) -> bytes:
    """JPEG of the frame with most in it: not the black one a film begins with, nor a fade."""
    best = max(images, key=_interest)
    small = best.copy()
    small.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE), Image.Resampling.BICUBIC, reducing_gap=2.0)
    return _to_jpeg(small, _THUMBNAIL_QUALITY)


def make_strip(images: Sequence[Image.Image]) -> bytes:
    """JPEG of the frames from left to right, each `STRIP_FRAME_WIDTH` pixels wide."""
    width, height = images[0].size
    size = (STRIP_FRAME_WIDTH, max(1, min(2 * STRIP_FRAME_WIDTH, round(STRIP_FRAME_WIDTH * height / width))))
    strip = Image.new("RGB", (size[0] * len(images), size[1]))
    for position, image in enumerate(images):
        strip.paste(image.resize(size, Image.Resampling.BICUBIC, reducing_gap=2.0), (position * size[0], 0))
    return _to_jpeg(strip, _STRIP_QUALITY)


def _interest(image: Image.Image) -> float:
    """Bits per pixel of the brightness: 0 for a flat picture, 8 where every shade is as frequent."""
    return image.resize((64, 64), Image.Resampling.BOX).convert("L").entropy()


def _to_jpeg(image: Image.Image, quality: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()
