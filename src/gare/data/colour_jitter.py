"""Colour jitter and random erasing: drawn once per clip, applied to all of its frames, on any device.

Shapes: V clips, F frames, C = 3, H × W pixels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_SWING = 0.4  # brightness, contrast and saturation are multiplied by 0.6 to 1.4
_GREY_SHARE = 0.1
_ERASED_SHARE = 0.25
_ERASED_SIDE = (0.2, 0.5)  # of the picture's
_GREY = 127.0
_LUMA = (0.299, 0.587, 0.114)


class ColourJitter(NamedTuple):
    """What happens to a clip. The erased patch is given by its edges, as shares of width and height."""

    brightness: float
    contrast: float
    saturation: float
    left: float
    top: float
    right: float
    bottom: float


def draw_colour_jitter(generator: torch.Generator) -> ColourJitter:
    """Draw what happens to one clip: a tenth of them lose their colours, a quarter a patch."""
    light, contrast, saturation, is_grey, is_erased, width, height, x, y = torch.rand(
        9, generator=generator
    ).tolist()
    light, contrast, saturation = (1 + _SWING * (2 * number - 1) for number in (light, contrast, saturation))
    least, most = _ERASED_SIDE if is_erased < _ERASED_SHARE else (0.0, 0.0)
    width, height = (least + (most - least) * number for number in (width, height))
    left, top = x * (1 - width), y * (1 - height)
    saturation = 0.0 if is_grey < _GREY_SHARE else saturation
    return ColourJitter(light, contrast, saturation, left, top, left + width, top + height)


def jitter_colours(bytes_VFCHW: Tensor, jitter_V7: Tensor, mask_VF: Tensor | None = None) -> Tensor:
    """Apply a `ColourJitter` per clip, the same in all of its frames, as bytes again.

    Args:
        mask_VF: true where a frame is real; only those decide how light a clip is. None: all are.
    """
    device = bytes_VFCHW.device
    numbers_V7 = jitter_V7.to(device, non_blocking=True)
    brightness, contrast, saturation, left, top, right, bottom = numbers_V7.view(-1, 7, 1, 1, 1, 1).unbind(1)
    luma_C11 = torch.tensor(_LUMA, device=device).view(-1, 1, 1)
    pixels = bytes_VFCHW.float() * brightness
    grey_VF1HW = (pixels * luma_C11).sum(dim=2, keepdim=True)
    pixels = grey_VF1HW + saturation * (pixels - grey_VF1HW)
    mean_VF111 = grey_VF1HW.mean(dim=(3, 4), keepdim=True)
    real_VF111 = torch.ones_like(mean_VF111) if mask_VF is None else mask_VF.to(device)[..., None, None, None]
    mean_V1111 = (mean_VF111 * real_VF111).sum(dim=1, keepdim=True) / real_VF111.sum(dim=1, keepdim=True)
    pixels = mean_V1111 + contrast * (pixels - mean_V1111)
    height, width = bytes_VFCHW.shape[-2:]
    y_H1 = ((torch.arange(height, device=device) + 0.5) / height)[:, None]
    x_W = (torch.arange(width, device=device) + 0.5) / width
    is_erased = (x_W >= left) & (x_W < right) & (y_H1 >= top) & (y_H1 < bottom)
    pixels = torch.where(is_erased, _GREY, pixels)
    return pixels.round_().clamp_(0, 255).to(torch.uint8)
