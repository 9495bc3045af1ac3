"""Whether decoding works in the box on this machine, found out with a clip made on the spot.

A system library may make a call that the box refuses, on a machine nobody tried. Then that layer is left out
and reported, and no file fails for it. It also imports what libraries import late, when they first need it:
in the box nothing can be imported.
"""

from __future__ import annotations

import codecs
import importlib
import io
import os
import select
import signal
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from gare.data.decoder import import_av
from gare.data.sandbox import LAYERS, enter_box
from gare.data.video import VideoReader
from gare.errors import GareError

_IMPORTED_LATE = (
    "numpy.ma",  # by np.median
    *(f"PIL.{name}ImagePlugin" for name in ("Bmp", "Gif", "Jpeg", "Mpo", "Png", "Ppm", "Tiff", "WebP")),
    *(f"PIL.Image{name}" for name in ("Chops", "Color", "Filter", "Palette", "Sequence")),
    "PIL.ExifTags",
)
_ENCODINGS = ("latin_1", "ascii", "cp1252", "utf_16", "utf_16_le", "utf_16_be")
_ENOUGH_S = 60


def find_usable_layers() -> tuple[str, ...]:
    """The layers in which the clip can be decoded. One that the system does not have does no harm."""
    for name in _IMPORTED_LATE:
        importlib.import_module(name)
    for name in _ENCODINGS:
        codecs.lookup(name)
    if not hasattr(os, "memfd_create"):
        return LAYERS
    try:
        clip = _make_clip()
    except (GareError, MemoryError):  # no PyAV: then only pictures are decoded
        clip = None
    _decode(clip)  # outside of the box: imports happen here
    if _works_in(LAYERS, clip):
        return LAYERS
    return tuple(layer for layer in LAYERS if _works_in((layer,), clip))


def _make_clip() -> int:
    """A descriptor of a file in memory with two frames."""
    av = import_av()
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for shade in (40, 200):
            pixels = np.full((48, 64, 3), shade, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    descriptor = os.memfd_create("gare-rehearsal")
    os.write(descriptor, buffer.getvalue())
    return descriptor


def _decode(clip: int | None) -> None:
    images = [Image.new("RGB", (64, 48))]
    if clip is not None:
        with VideoReader(Path("rehearsal"), clip) as reader:
            images, _ = reader.take([0.0, 0.1], 32)
    for image_format in ("JPEG", "PNG"):
        buffer = io.BytesIO()
        images[0].save(buffer, image_format)
        ImageOps.exif_transpose(Image.open(buffer)).convert("L").resize(
            (16, 16), Image.Resampling.BICUBIC
        ).entropy()


def _works_in(layers: tuple[str, ...], clip: int | None) -> bool:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            enter_box(layers)
            _decode(clip)
            os.write(writing, b"!")
        finally:
            os._exit(0)
    os.close(writing)
    try:
        return bool(select.select([reading], [], [], _ENOUGH_S)[0] and os.read(reading, 1))
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
