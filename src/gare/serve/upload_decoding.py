"""What a limited worker process does with an upload: find its frames, or say why there are none.

It is a file of its own because a worker imports it whole: it needs neither a web server nor a model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from gare.data.containers import looks_like_video
from gare.data.decoder_messages import (
    Alive,
    Bounds,
    Facts,
    Failure,
    Frame,
    ProtocolError,
    Record,
    SegmentEnd,
)
from gare.data.workers import Refused, Task
from gare.image_fit import CROP, ImageFit, fit_image
from gare.library.index.extract import Job, extract
from gare.library.index.segment import Segmentation

Kind = Literal["image", "video"]
_MOST_PIXELS = 64_000_000
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
_MAGICS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a", b"BM")


@dataclass(frozen=True)
class Upload:
    """A file to decode, and what the model takes of it."""

    path: str
    kind: Kind
    num_frames: int
    image_size: int
    fit: ImageFit = CROP


def sniff(start: bytes) -> Kind | None:
    """Image or video by the first bytes: what a client calls a file says nothing.

    >>> sniff(b"\\xff\\xd8\\xff\\xe0"), sniff(b"#!/bin/sh"), sniff(bytes(4) + b"ftypisom")
    ('image', None, 'video')
    """
    if start.startswith(_MAGICS) or (start[:4] == b"RIFF" and start[8:12] == b"WEBP"):
        return "image"
    return "video" if looks_like_video(start) else None


def decode_upload(upload: Upload, descriptor: int) -> Iterator[Frame | Facts | Failure | Alive]:
    """Frames as the model takes them, then facts; or why there are none."""
    if upload.kind == "image":
        yield from _decode_image(upload, descriptor)
        return
    job = Job("the upload", Segmentation(), upload.num_frames, upload.image_size, upload.fit)
    for message in extract(job, descriptor):
        if not isinstance(message, SegmentEnd):
            yield message


def _decode_image(upload: Upload, descriptor: int) -> Iterator[Frame | Facts | Failure]:
    try:
        with (
            open(descriptor, "rb", closefd=False) as file,
            Image.open(file, formats=_FORMATS) as image,
        ):
            if image.width * image.height > _MOST_PIXELS:
                yield Failure("too_large", f"{image.width} × {image.height} pixels are too many")
                return
            if not upload.fit.as_processor:
                image.draft("RGB", (1024, 1024))
            upright = ImageOps.exif_transpose(image).convert("RGB")
        yield Frame(0.0, np.asarray(fit_image(upright, upload.image_size, upload.fit)))
        yield Facts(0.0, *upright.size)
    except UnidentifiedImageError:  # its own words name the descriptor
        yield Failure("unreadable", "it is not an image that can be read")
    except MemoryError:
        raise  # the process is at its limit, and given up
    except Exception as error:
        yield Failure("unreadable", f"it cannot be read: {error}")


class UploadTask(Task[Upload, np.ndarray | Failure]):
    """Opens an upload, and makes an array of the frames that come back: frames × height × width × 3."""

    def __init__(self, upload: Upload) -> None:
        super().__init__(upload)
        self.bounds = Bounds(frame_bytes=3 * upload.image_size**2)
        self._descriptor: int | None = None
        self._frames: list[np.ndarray] = []
        self._has_ended = False

    def open(self) -> int:
        """The file that was uploaded."""
        try:
            self._descriptor = os.open(self.item.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # the request ended, and took its file along
            raise Refused(Failure("missing", "it is not there any more")) from None
        self.num_bytes = os.fstat(self._descriptor).st_size
        self.payload = replace(self.item, path="")  # where it lies is nobody's business
        return self._descriptor

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def take(self, record: Record) -> np.ndarray | Failure | None:
        """All frames, at the end, or a failure."""
        if self._has_ended:
            raise ProtocolError("it sent more after the end of the file")
        if isinstance(record, Frame):
            size = self.item.image_size
            if record.pixels.shape != (size, size, 3) or len(self._frames) >= self.item.num_frames:
                raise ProtocolError("it sent other frames than were asked for")
            self._frames.append(record.pixels)
            return None
        self._has_ended = True
        if isinstance(record, Failure):
            return record
        if not isinstance(record, Facts):
            raise ProtocolError(f"it sent a {type(record).__name__}, which was not asked for")
        return np.stack(self._frames) if self._frames else Failure("no_video", "it has no frame")
