"""A product with x · sigmoid(x) in its last lines (Triton): is it faster than one after the other?

Shapes: R rows, N and W numbers before and after.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

SHAPES = [
    # rows and columns of a tile, numbers at a time, tiles an SM has before it, warps, stages
    (128, 256, 64, 1, 8, 3),
    (128, 256, 64, 1, 8, 4),
    (256, 128, 64, 1, 8, 4),
    (128, 128, 64, 2, 4, 3),
]


def active_product(x_RN: Tensor, weight_WN: Tensor, bias_W: Tensor, shape: tuple[int, ...]) -> Tensor:
    """silu(x · weight + bias), in the precision of x."""
    rows_, columns, numbers, together, warps, stages = shape
    (rows, narrow), wide = x_RN.shape, len(weight_WN)
    out_RW = x_RN.new_empty(rows, wide)
    half = columns // 2
    processors = torch.cuda.get_device_properties(x_RN.device).multi_processor_count if x_RN.is_cuda else 4
    programs = together * processors
    _kernel[(programs,)](
        TensorDescriptor.from_tensor(x_RN, [rows_, numbers]),
        TensorDescriptor.from_tensor(weight_WN, [half, numbers]),
        bias_W,
        TensorDescriptor.from_tensor(out_RW, [rows_, half]),
        rows,
        WIDE=wide,
        NARROW=narrow,
        ROWS=rows_,
        HALF=half,
        NUMBERS=numbers,
        num_warps=warps,
        num_stages=stages,
    )
    return out_RW


@triton.jit
def _kernel(
    x_desc,
    weight_desc,
    bias_ptr,
    out_desc,
    rows,
    WIDE: tl.constexpr,
    NARROW: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    NUMBERS: tl.constexpr,
):
    across: tl.constexpr = WIDE // (2 * HALF)
    tile = tl.program_id(0)
    while tile < tl.cdiv(rows, ROWS) * across:
        row, column = tile // across * ROWS, tile % across * 2 * HALF
        tile += tl.num_programs(0)
        one = tl.zeros([ROWS, HALF], tl.float32)
        other = tl.zeros([ROWS, HALF], tl.float32)
        for first in range(0, NARROW, NUMBERS):
            x = x_desc.load([row, first])
            one = tl.dot(x, weight_desc.load([column, first]).T, one)
            other = tl.dot(x, weight_desc.load([column + HALF, first]).T, other)
        place = tl.arange(0, HALF)
        one += tl.load(bias_ptr + column + place).to(tl.float32)[None, :]
        out_desc.store([row, column], (one * tl.sigmoid(one)).to(out_desc.dtype))
        other += tl.load(bias_ptr + column + HALF + place).to(tl.float32)[None, :]
        out_desc.store([row, column + HALF], (other * tl.sigmoid(other)).to(out_desc.dtype))
