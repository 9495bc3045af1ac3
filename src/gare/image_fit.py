"""How a picture of any shape becomes the square that an image tower takes.

A module that everything may import: an encoder says what it wants, a process that decodes does it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image

FitMode = Literal["crop", "squash", "letterbox", "tiles", "patches"]
Resample = Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]
_GREY = (127, 127, 127)
_LONGEST = 200  # a line of a million pixels, resized whole, would fill the memory


@dataclass(frozen=True)
class ImageFit:
    """How a picture is brought to `size` × `size` pixels.

    Args:
        mode: `crop`: the short side to `size`, then the middle. `squash`: both sides to `size`. `letterbox`:
            the long side to `size`, grey above and below. `tiles`: overlapping squares that cover the
            picture, laid out in a square of four (`lay_out_tiles`). `patches`: the picture keeps its shape,
            is cut into patches, and these are laid out in a square (`lay_out_patches`).
        edge: crop and squash bring a side to this many pixels first and cut `size` out of the middle, with
            black around a smaller one.
        resample: the filter.
        patch: the side of a patch, for `patches`.
        max_patches: the most patches of a picture, for `patches`.
        as_processor: as the image processors of transformers do, to the byte: the picture is decoded in its
            own size and resized once, with their rounding. Otherwise it is scaled down while it is decoded.
    """

    mode: FitMode = "crop"
    edge: int | None = None
    resample: Resample = "bicubic"
    patch: int = 16
    max_patches: int = 256
    as_processor: bool = False

    def __repr__(self) -> str:
        """Only what is not the default: features of frames are kept under it."""
        changed = [
            f"{name}={value!r}" for name, value in vars(self).items() if value != getattr(ImageFit, name)
        ]
        return f"ImageFit({', '.join(changed)})"

    def decoded_side(self, size: int, least: int) -> int | None:
        """The short side to which larger frames are scaled while decoding; None leaves them as they are.

        >>> ImageFit().decoded_side(224, 256), ImageFit(as_processor=True).decoded_side(224, 256)
        (256, None)
        """
        wanted = size // 2 if self.mode == "tiles" else self.edge or size
        return None if self.as_processor else max(least, wanted)


CROP = ImageFit()
"""What gare's own models take."""


def fit_image(image: Image.Image, size: int, fit: ImageFit) -> Image.Image:
    """The picture as `fit` wants it, `size` × `size` pixels in RGB.

    >>> fit_image(Image.new("RGB", (80, 40)), 32, ImageFit()).size
    (32, 32)
    """
    image = image.convert("RGB")
    if fit.mode == "patches":
        return lay_out_patches(image, size, fit)
    if fit.mode == "letterbox":
        return _letterbox(image, size, fit)
    if fit.mode == "tiles":
        return lay_out_tiles(image, size, fit)
    if fit.mode == "squash":
        width = height = fit.edge or size
    else:
        width, height = _short_side_to(fit.edge or size, image.size, fit)
    # The processors round down, the published pipelines of text-video retrieval to the nearest.
    if fit.as_processor:
        left, top = (width - size) // 2, (height - size) // 2
    else:
        left, top = round((width - size) / 2), round((height - size) / 2)
    if (width, height) == image.size:
        return image.crop((left, top, left + size, top + size))
    if fit.as_processor and max(width, height) <= _LONGEST * size:
        return image.resize((width, height), _filter(fit)).crop((left, top, left + size, top + size))
    # In one step, so that what is cut off is never computed. Pixels differ a little from those of two steps.
    x, y = image.width / width, image.height / height
    right, bottom = min(left + size, width), min(top + size, height)
    shown = (max(left, 0), max(top, 0))
    box = (shown[0] * x, shown[1] * y, right * x, bottom * y)
    resized = image.resize((right - shown[0], bottom - shown[1]), _filter(fit), box)
    if resized.size == (size, size):
        return resized
    left, top = left - shown[0], top - shown[1]
    return resized.crop((left, top, left + size, top + size))  # black around it


def _short_side_to(edge: int, size: tuple[int, int], fit: ImageFit) -> tuple[int, int]:
    """Width and height with the short side at `edge`. The long one is floored, in the order of operations of
    the processors or of CLIP's own pipeline: they differ by one pixel now and then."""
    short, long = min(size), max(size)
    scaled = int(edge * long / short) if fit.as_processor else int(long * (edge / short))
    width, height = (edge if side == short else scaled for side in size)
    return width, height


def _filter(fit: ImageFit) -> Image.Resampling:
    return Image.Resampling[fit.resample.upper()]


def _letterbox(image: Image.Image, size: int, fit: ImageFit) -> Image.Image:
    scale = size / max(image.size)
    width, height = (max(1, round(side * scale)) for side in image.size)
    square = Image.new("RGB", (size, size), _GREY)
    square.paste(image.resize((width, height), _filter(fit)), ((size - width) // 2, (size - height) // 2))
    return square


# --- tiles --------------------------------------------------------------------------------------------------
# A tower that looks at a whole picture tile by tile takes the mean of what it sees. The tiles travel in a
# square of two by two: one, two or four of them, repeated until it is full, which leaves the mean as it is.


def lay_out_tiles(image: Image.Image, size: int, fit: ImageFit) -> Image.Image:
    """Overlapping squares along the long side of a picture, in a square of four.

    A square picture has one tile, one up to twice as long as wide has two, a longer one four.
    """
    side = size // 2
    scale = side / min(image.size)
    width, height = (max(side, min(round(each * scale), _LONGEST * side)) for each in image.size)
    image = image.resize((width, height), _filter(fit))
    spare = max(width, height) - side
    number = 1 if not spare else 2 if spare <= side else 4
    square = Image.new("RGB", (size, size))
    for cell in range(4):
        offset = round(spare * (cell % number) / max(number - 1, 1))
        left, top = (offset, 0) if width > height else (0, offset)
        tile = image.crop((left, top, left + side, top + side))
        square.paste(tile, (cell % 2 * side, cell // 2 * side))
    return square


# --- patches ------------------------------------------------------------------------------------------------
# A tower that takes pictures in their own shape (SigLIP 2 NaFlex) wants patches, how many rows and columns
# they form, and padding. A square of bytes carries them through decoding, batches and caches like any other
# picture: patches in reading order, cell by cell, and in the last cell the numbers of rows and columns in
# black and white.

_BITS = 16


def patches_size(fit: ImageFit) -> int:
    """The side of the square that holds the patches of a picture and one cell more.

    >>> patches_size(ImageFit("patches", patch=16, max_patches=256))
    272
    """
    return fit.patch * math.isqrt(fit.max_patches) + fit.patch


def lay_out_patches(image: Image.Image, size: int, fit: ImageFit) -> Image.Image:
    """A picture resized to at most `max_patches` whole patches, in a square of cells."""
    height, width = _size_for_patches(image.height, image.width, fit)
    if (width, height) != image.size:
        image = image.resize((width, height), _filter(fit))
    rows, columns, cells = height // fit.patch, width // fit.patch, size // fit.patch
    patches = np.asarray(image).reshape(rows, fit.patch, columns, fit.patch, 3).swapaxes(1, 2)
    square = np.zeros((cells * cells, fit.patch, fit.patch, 3), dtype=np.uint8)
    square[: rows * columns] = patches.reshape(-1, fit.patch, fit.patch, 3)
    for channel, number in enumerate((rows, columns)):
        bits = np.array([number >> bit & 1 for bit in range(_BITS)], dtype=np.uint8)
        square[-1, ..., channel].flat[:_BITS] = 255 * bits
    picture = square.reshape(cells, cells, fit.patch, fit.patch, 3).swapaxes(1, 2)
    return Image.fromarray(np.ascontiguousarray(picture.reshape(size, size, 3)))


def _size_for_patches(height: int, width: int, fit: ImageFit) -> tuple[int, int]:
    """The largest height and width, in whole patches, that keep the shape and are not too many patches.

    The search is that of SigLIP 2's processor, step by step, so that the result is the same.
    """

    def whole(scale: float, side: int) -> int:
        return max(fit.patch, math.ceil(side * scale / fit.patch) * fit.patch)

    least, most = 1e-6, 100.0
    while most - least >= 1e-5:
        scale = (least + most) / 2
        if whole(scale, height) / fit.patch * (whole(scale, width) / fit.patch) <= fit.max_patches:
            least = scale
        else:
            most = scale
    return whole(least, height), whole(least, width)
