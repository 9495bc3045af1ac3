"""From images to what an image tower takes. Shapes: F frames, C = 3 channels, H = W = size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from gare.data.randaugment import rand_augment
from gare.image_fit import CROP, ImageFit, fit_image

Augmentation = Literal["off", "light", "strong", "randaugment"]
"""`light`: one random crop (half the picture or more) and a flip per clip. `strong`: a quarter or more,
then colour jitter and random erasing (`data.colour_jitter`). `randaugment`: four random colour or geometry
operations of magnitude 7, the same on every frame of the clip."""
LEAST_AREA = {"light": 0.5, "strong": 0.25}


def to_bytes(images: Sequence[Image.Image], size: int, fit: ImageFit = CROP) -> Tensor:
    """Each image as `fit` wants it, by default the short side to `size` (bicubic, antialiased), then a centre
    crop: uint8 [F, 3, size, size].

    The encoder normalises them (`ImageFormat.normalise`): bytes are a quarter of the memory to send to a GPU.

    >>> to_bytes([Image.new("RGB", (80, 40), "white")], 32).shape
    torch.Size([1, 3, 32, 32])
    """
    if not images:
        raise ValueError("a clip needs at least one image")
    frames_FHWC = np.stack([np.asarray(fit_image(image, size, fit)) for image in images])
    return torch.from_numpy(frames_FHWC).permute(
        0, 3, 1, 2
    )  # channels last in memory: no copy, and GPUs like it


def augment(
    images: Sequence[Image.Image], augmentation: Augmentation, *, generator: torch.Generator
) -> list[Image.Image]:
    """A random variant of a clip: one draw, applied alike to all of its frames. Colour jitter comes later."""
    if augmentation == "off":
        return list(images)
    if augmentation in LEAST_AREA:
        return _crop_and_flip(images, LEAST_AREA[augmentation], generator)
    if augmentation == "randaugment":
        return rand_augment(images, generator=generator)
    raise ValueError(f"augmentation '{augmentation}' is not one of off, light, strong, randaugment")


class Crop(NamedTuple):
    """A part of a picture, in pixels; perhaps to be mirrored."""

    left: float
    top: float
    width: float
    height: float
    flip: bool = False


def random_crop(width: int, height: int, least_area: float, generator: torch.Generator) -> Crop:
    """A part of the picture, about as wide as high, anywhere; mirrored half of the time."""
    area, log_ratio, x, y, flip = torch.rand(5, generator=generator).tolist()
    ratio = math.exp((2 * log_ratio - 1) * math.log(4 / 3))
    scale = math.sqrt(least_area + (1 - least_area) * area)
    crop_width = min(width, max(1, round(min(width, height) * scale * math.sqrt(ratio))))
    crop_height = min(height, max(1, round(min(width, height) * scale / math.sqrt(ratio))))
    left, top = round(x * (width - crop_width)), round(y * (height - crop_height))
    return Crop(left, top, crop_width, crop_height, flip < 0.5)


def _crop_and_flip(
    images: Sequence[Image.Image], least_area: float, generator: torch.Generator
) -> list[Image.Image]:
    crop = random_crop(*images[0].size, least_area, generator)
    box = (crop.left, crop.top, crop.left + crop.width, crop.top + crop.height)
    crops = [image.crop(box) for image in images]
    return [part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for part in crops] if crop.flip else crops
