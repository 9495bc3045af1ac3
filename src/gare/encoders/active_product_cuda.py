"""A matrix product with x · sigmoid(x) in its last lines (Triton, for the tensor cores of a Hopper).

The widest tensor of a layer is then written once, and neither read nor written again for its activation. This
takes one instruction of the special function unit a number instead of two, and seven instead of 18 in all:

    x · sigmoid(x) = h + h · tanh(h)  with  h = x / 2

The GPU's own tanh is exact to 2⁻¹¹, a quarter of what the result is rounded by.

Imports Triton, so it is imported only where its kernel runs. Tests run it in Triton's interpreter.

Shapes: R rows, N and W numbers of a row before and after.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


class Shape(NamedTuple):
    """How the work is divided."""

    rows: int
    columns: int
    """So many numbers of so many rows are a tile, which one program makes at a time."""
    numbers: int
    """How many numbers of a row are multiplied at a time."""
    together: int
    """Programs on a multiprocessor, each with one tile after the other; 0: each tile has its own program."""
    warps: int
    stages: int
    """How many times `numbers` are in shared memory."""
    is_flat: bool
    """Whether the first numbers of the next tile are fetched before the activation of this one."""


SHAPE = Shape(128, 256, 64, 1, 8, 4, True)
"""The fastest of six on an H200 (docs/benchmarks.md). It takes nearly all shared memory there is."""


def takes(x_RN: Tensor, weight_WN: Tensor) -> bool:
    """Whether the kernel takes them, and is worth its launch."""
    wide, narrow = weight_WN.shape
    rows = x_RN.numel() // narrow
    return (
        x_RN.is_cuda
        and torch.version.hip is None  # AMD's devices say so too
        and x_RN.dtype == weight_WN.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(x_RN.device)[0] == 9
        and wide % SHAPE.columns == 0
        and narrow % SHAPE.numbers == 0
        and rows >= 8192
    )


def active_product(x_RN: Tensor, weight_WN: Tensor, bias_W: Tensor, *, shape: Shape = SHAPE) -> Tensor:
    """silu(x · weight + bias), in the precision of x.

    Args:
        x_RN: rows, of any number of dimensions.
        weight_WN: as that of a linear layer; whole tiles of it.
        bias_W: likewise.
        shape: how the work is divided.
    """
    wide, narrow = weight_WN.shape
    rows_RN = x_RN.reshape(-1, narrow)
    out_RW = rows_RN.new_empty(len(rows_RN), wide)
    tiles = triton.cdiv(len(rows_RN), shape.rows) * (wide // shape.columns)
    programs = min(tiles, shape.together * _processors(x_RN.device) or tiles)
    turns = triton.cdiv(tiles, programs)
    _active_product_kernel[(programs,)](
        TensorDescriptor.from_tensor(rows_RN, [shape.rows, shape.numbers]),
        TensorDescriptor.from_tensor(weight_WN, [shape.columns, shape.numbers]),
        bias_W,
        TensorDescriptor.from_tensor(out_RW, [shape.rows, shape.columns // 2]),
        turns,
        WIDE=wide,
        NARROW=narrow,
        ROWS=shape.rows,
        COLUMNS=shape.columns,
        NUMBERS=shape.numbers,
        IS_FLAT=shape.is_flat,
        TURNS=0 if x_RN.is_cuda else turns,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    return out_RW.view(*x_RN.shape[:-1], wide)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@triton.jit
def _tanh(x, BY_INTERPRETER: tl.constexpr):
    if not BY_INTERPRETER:
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _active_product_kernel(
    x_desc,
    weight_desc,
    bias_ptr,
    out_desc,
    turns,
    WIDE: tl.constexpr,
    NARROW: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NUMBERS: tl.constexpr,
    IS_FLAT: tl.constexpr,
    TURNS: tl.constexpr,
):
    """`TURNS` is zero on a GPU. Triton's interpreter wants to know it, and knows no assembler."""
    across: tl.constexpr = WIDE // COLUMNS
    # All columns of some rows are made at a time: the weight stays in the cache, and rows are fetched once.
    # A tile beyond the last row is read as zeros and not written.
    for turn in tl.range(0, turns if TURNS == 0 else TURNS, flatten=IS_FLAT):
        tile = turn * tl.num_programs(0) + tl.program_id(0)
        row, column = tile // across * ROWS, tile % across * COLUMNS
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(0, NARROW, NUMBERS):
            sums = tl.dot(x_desc.load([row, first]), weight_desc.load([column, first]).T, sums)
        bias = tl.load(bias_ptr + column + tl.arange(0, COLUMNS)).to(tl.float32)
        half = 0.5 * sums + 0.5 * bias[None, :]
        out = (half + half * _tanh(half, TURNS > 0)).to(out_desc.dtype)
        # Half a tile at a time leaves by way of shared memory, where there is no room for more.
        out = tl.permute(tl.reshape(out, [ROWS, 2, COLUMNS // 2]), [0, 2, 1])
        left, right = tl.split(out)
        out_desc.store([row, column], left)
        out_desc.store([row, column + COLUMNS // 2], right)
