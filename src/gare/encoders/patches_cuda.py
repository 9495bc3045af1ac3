"""Patches of pictures as rows of bfloat16, from bytes, in one kernel (Triton).

Imports Triton, so it is imported only where its kernel runs. Tests run it in Triton's interpreter.

Shapes: N pictures, C channels, P patches, X numbers of a patch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def patches_of_bytes(bytes_NCHW: Tensor, size: int) -> Tensor:
    """Every byte less 128, [N, P, X]: the bytes of a patch by channel, line and column. Exact in bfloat16."""
    bytes_NCHW = bytes_NCHW.contiguous()
    pictures, channels, height, width = bytes_NCHW.shape
    rows, columns = height // size, width // size
    patches_NPX = torch.empty(
        pictures, rows * columns, channels * size * size, dtype=torch.bfloat16, device=bytes_NCHW.device
    )
    _kernel[(pictures * rows * channels,)](
        bytes_NCHW,
        patches_NPX,
        HEIGHT=height,
        WIDTH=width,
        CHANNELS=channels,
        ROWS=rows,
        COLUMNS=columns,
        SIZE=size,
        BLOCK_Y=triton.next_power_of_2(size),
        BLOCK_X=triton.next_power_of_2(columns * size),
        num_warps=4,
    )
    return patches_NPX


@triton.jit
def _kernel(
    bytes_ptr,
    patches_ptr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_Y: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    """A line of patches in one channel: as many bytes one after the other."""
    channel, line = tl.program_id(0) % CHANNELS, tl.program_id(0) // CHANNELS % ROWS
    picture = (tl.program_id(0) // (CHANNELS * ROWS)).to(tl.int64)  # there are more bytes than 32 bits count
    y, x = tl.arange(0, BLOCK_Y)[:, None], tl.arange(0, BLOCK_X)[None, :]
    inside = (y < SIZE) & (x < COLUMNS * SIZE)
    place = ((picture * CHANNELS + channel) * HEIGHT + line * SIZE + y) * WIDTH + x
    number = tl.load(bytes_ptr + place, mask=inside, other=0).to(tl.float32) - 128
    patch = (picture * ROWS + line) * COLUMNS + x // SIZE
    place = ((patch * CHANNELS + channel) * SIZE + y) * SIZE + x % SIZE
    tl.store(patches_ptr + place, number.to(tl.bfloat16), mask=inside)
