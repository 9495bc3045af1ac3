"""A sum between layers and the norm after it in one kernel (Triton): read once, written in two precisions.

Imports Triton, so `bfloat16_layers.py` imports it only when it runs. Tests run it in Triton's interpreter.

Shapes: R rows, E width. In the kernel E is padded to a power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn


def add_norm(states: Tensor, branch: Tensor | None, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """States plus branch in float32, and their norm in bfloat16; without a branch the states as they are."""
    states_RE = states.reshape(-1, states.shape[-1]).contiguous()
    rows, width = states_RE.shape
    normed_RE = torch.empty_like(states_RE, dtype=torch.bfloat16)
    has_branch = branch is not None
    branch_RE = branch.reshape(rows, width).contiguous() if branch is not None else states_RE
    sums_RE = torch.empty_like(states_RE) if has_branch else states_RE
    padded = triton.next_power_of_2(width)
    _kernel[(rows,)](
        states_RE,
        branch_RE,
        norm.weight,
        norm.bias,
        sums_RE,
        normed_RE,
        norm.eps,
        WIDTH=width,
        BLOCK_E=padded,
        HAS_BRANCH=has_branch,
        num_warps=4 if padded <= 1024 else 8,
    )
    return sums_RE.view(states.shape), normed_RE.view(states.shape)


@triton.jit
def _kernel(
    states_ptr,
    branch_ptr,
    weight_ptr,
    bias_ptr,
    sums_ptr,
    normed_ptr,
    eps,
    WIDTH: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_BRANCH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * WIDTH  # a large batch has more numbers than 32 bits count
    width = tl.arange(0, BLOCK_E)
    inside = width < WIDTH
    states = tl.load(states_ptr + row + width, mask=inside, other=0.0)
    if HAS_BRANCH:
        states += tl.load(branch_ptr + row + width, mask=inside, other=0.0).to(tl.float32)
        tl.store(sums_ptr + row + width, states, mask=inside)
    mean = tl.sum(states, axis=0) / WIDTH
    centred = tl.where(inside, states - mean, 0.0)
    variance = tl.sum(centred * centred, axis=0) / WIDTH
    weight = tl.load(weight_ptr + width, mask=inside, other=0.0)
    bias = tl.load(bias_ptr + width, mask=inside, other=0.0)
    normed = centred * tl.rsqrt(variance + eps) * weight + bias
    tl.store(normed_ptr + row + width, normed.to(tl.bfloat16), mask=inside)
