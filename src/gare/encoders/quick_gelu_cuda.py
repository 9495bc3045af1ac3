"""x · sigmoid(1.702 x), the activation of CLIP, in one kernel forward and one backward (Triton).

Imports Triton, so it is imported only where its kernels run. Tests run them in Triton's interpreter.

Shapes: R rows, E width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
ROWS, COLUMNS = 8, 512
"""The tile a program of backward has before it."""
PROGRAMS = 88
"""How many share the rows of a backward, for every `COLUMNS` columns. Each keeps sums of its own."""


def quick_gelu(x_RE: Tensor) -> Tensor:
    """The activation, in the precision of `x_RE`."""
    out_RE = torch.empty_like(x_RE)
    _kernel[(triton.cdiv(x_RE.numel(), BLOCK),)](x_RE, out_RE, x_RE.numel(), BLOCK=BLOCK, num_warps=8)
    return out_RE


def quick_gelu_backward(gradient_RE: Tensor, x_RE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of `x_RE`, its sum over rows in float32, and the activation again.

    The gradient takes the place of `gradient_RE`.
    """
    rows, width = x_RE.shape
    out_RE = torch.empty_like(x_RE)
    programs = min(PROGRAMS, triton.cdiv(rows, ROWS))
    sums = torch.empty(programs, width, dtype=torch.float32, device=x_RE.device)
    grid = (programs, triton.cdiv(width, COLUMNS))
    _backward_kernel[grid](
        gradient_RE, x_RE, out_RE, sums, rows, WIDTH=width, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4
    )
    return gradient_RE, sums.sum(dim=0), out_RE


@triton.jit
def _kernel(x_ptr, out_ptr, total, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < total
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, (x * tl.sigmoid(1.702 * x)).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    gradient_ptr,
    x_ptr,
    out_ptr,
    sums_ptr,
    rows,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    first = tl.program_id(0) * ROWS
    while first < rows:
        row = first + tl.arange(0, ROWS)
        first += tl.num_programs(0) * ROWS
        inside = (row[:, None] < rows) & (column[None, :] < WIDTH)
        place = row[:, None].to(tl.int64) * WIDTH + column[None, :]
        x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(gradient_ptr + place, mask=inside, other=0.0).to(tl.float32)
        share = tl.sigmoid(1.702 * x)
        gradient *= share * (1 + 1.702 * x * (1 - share))
        tl.store(gradient_ptr + place, gradient.to(gradient_ptr.dtype.element_ty), mask=inside)
        tl.store(out_ptr + place, (x * share).to(out_ptr.dtype.element_ty), mask=inside)
        sums += gradient
    here = sums_ptr + tl.program_id(0) * WIDTH + column
    tl.store(here, tl.sum(sums, axis=0), mask=column < WIDTH)
