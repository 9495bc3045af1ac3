"""RandAugment on the frames of one clip, with the operations and strengths of the video-retrieval codes.

They call it `rand-m7-n4-mstd0.5-inc1`: four operations, each applied with probability one half, of magnitude
7 ± 0.5 out of 10.

It is our own because torchvision's has other operations and strengths, draws anew for every image and takes
no generator: the frames of a clip must change alike, and a run must be repeatable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from PIL import Image, ImageEnhance, ImageOps

Operation = Callable[[Image.Image], Image.Image]

_FILL = (128, 128, 128)


def rand_augment(
    images: Sequence[Image.Image],
    *,
    generator: torch.Generator,
    num_operations: int = 4,
    magnitude: float = 7.0,
) -> list[Image.Image]:
    """Draw once, apply to every frame."""
    clip = list(images)
    for _ in range(num_operations):
        make = _OPERATIONS[int(torch.randint(len(_OPERATIONS), (), generator=generator))]
        chance, negate = torch.rand(2, generator=generator).tolist()
        noise = 0.5 * torch.randn((), generator=generator).item()
        strength = min(max(magnitude + noise, 0.0), 10.0) / 10
        if chance < 0.5:
            operation = make(strength, -1.0 if negate < 0.5 else 1.0)
            clip = [operation(image) for image in clip]
    return clip


def _enhance(enhancer: Callable[[Image.Image], ImageEnhance._Enhance]) -> Callable[[float, float], Operation]:
    return lambda strength, sign: lambda image: enhancer(image).enhance(1 + sign * 0.9 * strength)


def _affine(
    coefficients: Callable[[float, tuple[int, int]], tuple[float, ...]],
) -> Callable[[float, float], Operation]:
    def make(strength: float, sign: float) -> Operation:
        return lambda image: image.transform(
            image.size,
            Image.Transform.AFFINE,
            coefficients(sign * strength, image.size),
            resample=Image.Resampling.BICUBIC,
            fillcolor=_FILL,
        )

    return make


def _rotate(strength: float, sign: float) -> Operation:
    return lambda image: image.rotate(
        sign * 30 * strength, resample=Image.Resampling.BICUBIC, fillcolor=_FILL
    )


def _posterize(strength: float, _sign: float) -> Operation:
    return lambda image: ImageOps.posterize(image, max(1, 4 - int(4 * strength)))


def _solarize(strength: float, _sign: float) -> Operation:
    return lambda image: ImageOps.solarize(image, 256 - int(256 * strength))


def _solarize_add(strength: float, _sign: float) -> Operation:
    table = [min(255, value + int(110 * strength)) if value < 128 else value for value in range(256)]
    return lambda image: image.point(table * 3)


_OPERATIONS: tuple[Callable[[float, float], Operation], ...] = (
    lambda _strength, _sign: ImageOps.autocontrast,
    lambda _strength, _sign: ImageOps.equalize,
    lambda _strength, _sign: ImageOps.invert,
    _rotate,
    _posterize,
    _solarize,
    _solarize_add,
    _enhance(ImageEnhance.Color),
    _enhance(ImageEnhance.Contrast),
    _enhance(ImageEnhance.Brightness),
    _enhance(ImageEnhance.Sharpness),
    _affine(lambda amount, _size: (1, 0.3 * amount, 0, 0, 1, 0)),
    _affine(lambda amount, _size: (1, 0, 0, 0.3 * amount, 1, 0)),
    _affine(lambda amount, size: (1, 0, 0.45 * amount * size[0], 0, 1, 0)),
    _affine(lambda amount, size: (1, 0, 0, 0, 1, 0.45 * amount * size[1])),
)
