"""A sum between layers and the norm after it in one kernel (Triton), and its gradients in another.

Imports Triton, so it is imported only where its kernels run. Tests run them in Triton's interpreter.

Shapes: R rows, E width. In the kernels E is padded to a power of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 1056
"""How many share the rows of a backward, each with sums of its own: eight a multiprocessor of an H200."""


def add_norm(
    states: Tensor,
    branches: Sequence[Tensor],
    weight_E: Tensor,
    bias_E: Tensor,
    eps: float,
    *,
    dtype: torch.dtype = torch.bfloat16,
    keeps_sum: bool = True,
) -> tuple[Tensor, Tensor]:
    """States plus up to two branches in float32, and their norm in `dtype`.

    Without branches, or if the sum is not to be kept, the first of the two are the states as they came.
    """
    states_RE = states.reshape(-1, states.shape[-1]).contiguous()
    rows, width = states_RE.shape
    branches_RE = [branch.reshape(rows, width).contiguous() for branch in branches]
    one_RE, other_RE = [*branches_RE, states_RE, states_RE][:2]
    normed_RE = torch.empty_like(states_RE, dtype=dtype)
    keeps_sum = keeps_sum and bool(branches)
    sums_RE = torch.empty_like(states_RE) if keeps_sum else states_RE
    padded = triton.next_power_of_2(width)
    _kernel[(rows,)](
        states_RE,
        one_RE,
        other_RE,
        weight_E,
        bias_E,
        sums_RE,
        normed_RE,
        eps,
        WIDTH=width,
        BLOCK_E=padded,
        BRANCHES=len(branches),
        KEEPS_SUM=keeps_sum,
        num_warps=_warps(padded),
    )
    return sums_RE.view(states.shape), normed_RE.view(states.shape)


class AddNormGradients(NamedTuple):
    """What backward through `add_norm` gives."""

    states_RE: Tensor
    """The gradient of the sum in float32."""
    branch_RE: Tensor
    """The same in the precision of products."""
    normed_RE: Tensor
    """The norm again: nobody has to keep it."""
    weight_E: Tensor
    bias_E: Tensor
    sum_E: Tensor
    """The sum of `states_RE` over rows: what the bias of the branch gets."""


def add_norm_backward(
    gradient_RE: Tensor,
    above_RE: Tensor,
    states_RE: Tensor,
    branch_RE: Tensor | None,
    norm: tuple[Tensor, Tensor, float],
) -> AddNormGradients:
    """The gradients of states and branch, of which `add_norm` kept nothing else.

    Args:
        gradient_RE: of the norm, in the precision of products.
        above_RE: of the sum, in float32, from what else reads it.
        norm: its weight, bias and epsilon.
    """
    rows, width = states_RE.shape
    weight_E, bias_E, eps = norm
    states_G = torch.empty_like(states_RE)
    branch_G, normed_RE = torch.empty_like(gradient_RE), torch.empty_like(gradient_RE)
    programs, padded = min(rows, PROGRAMS), triton.next_power_of_2(width)
    sums = torch.empty(programs, 3, width, dtype=torch.float32, device=states_RE.device)
    _backward_kernel[(programs,)](
        gradient_RE,
        above_RE,
        states_RE,
        states_RE if branch_RE is None else branch_RE,
        weight_E,
        bias_E,
        states_G,
        branch_G,
        normed_RE,
        sums,
        rows,
        eps,
        WIDTH=width,
        BLOCK_E=padded,
        HAS_BRANCH=branch_RE is not None,
        num_warps=_warps(padded),
    )
    return AddNormGradients(states_G, branch_G, normed_RE, *sums.sum(dim=0))


def _warps(padded: int) -> int:
    return 4 if padded <= 1024 else 8


@triton.jit
def _kernel(
    states_ptr,
    one_ptr,
    other_ptr,
    weight_ptr,
    bias_ptr,
    sums_ptr,
    normed_ptr,
    eps,
    WIDTH: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BRANCHES: tl.constexpr,
    KEEPS_SUM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * WIDTH  # a large batch has more numbers than 32 bits count
    width = tl.arange(0, BLOCK_E)
    inside = width < WIDTH
    states = tl.load(states_ptr + row + width, mask=inside, other=0.0)
    if BRANCHES > 0:
        states += tl.load(one_ptr + row + width, mask=inside, other=0.0).to(tl.float32)
    if BRANCHES > 1:
        states += tl.load(other_ptr + row + width, mask=inside, other=0.0).to(tl.float32)
    if KEEPS_SUM:
        tl.store(sums_ptr + row + width, states, mask=inside)
    mean = tl.sum(states, axis=0) / WIDTH
    centred = tl.where(inside, states - mean, 0.0)
    variance = tl.sum(centred * centred, axis=0) / WIDTH
    weight = tl.load(weight_ptr + width, mask=inside, other=0.0)
    bias = tl.load(bias_ptr + width, mask=inside, other=0.0)
    normed = centred * tl.rsqrt(variance + eps) * weight + bias
    tl.store(normed_ptr + row + width, normed.to(normed_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    gradient_ptr,
    above_ptr,
    states_ptr,
    branch_ptr,
    weight_ptr,
    bias_ptr,
    states_out,
    branch_out,
    normed_out,
    sums_ptr,
    rows,
    eps,
    WIDTH: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_BRANCH: tl.constexpr,
):
    width = tl.arange(0, BLOCK_E)
    inside = width < WIDTH
    weight = tl.load(weight_ptr + width, mask=inside, other=0.0)
    bias = tl.load(bias_ptr + width, mask=inside, other=0.0)
    by_weight = tl.zeros([BLOCK_E], dtype=tl.float32)
    by_bias = tl.zeros([BLOCK_E], dtype=tl.float32)
    by_branch = tl.zeros([BLOCK_E], dtype=tl.float32)
    number = tl.program_id(0)
    while number < rows:
        row = number.to(tl.int64) * WIDTH
        number += tl.num_programs(0)
        gradient = tl.load(gradient_ptr + row + width, mask=inside, other=0.0).to(tl.float32)
        above = tl.load(above_ptr + row + width, mask=inside, other=0.0)
        states = tl.load(states_ptr + row + width, mask=inside, other=0.0)
        if HAS_BRANCH:
            states += tl.load(branch_ptr + row + width, mask=inside, other=0.0).to(tl.float32)
        mean = tl.sum(states, axis=0) / WIDTH
        centred = tl.where(inside, states - mean, 0.0)
        scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / WIDTH + eps)
        unit = centred * scale
        by_unit = gradient * weight
        shared = tl.sum(by_unit * unit, axis=0) / WIDTH
        by_unit = by_unit - tl.sum(by_unit, axis=0) / WIDTH - unit * shared
        above += by_unit * scale
        tl.store(states_out + row + width, above, mask=inside)
        tl.store(branch_out + row + width, above.to(branch_out.dtype.element_ty), mask=inside)
        tl.store(
            normed_out + row + width, (unit * weight + bias).to(normed_out.dtype.element_ty), mask=inside
        )
        by_weight += gradient * unit
        by_bias += gradient
        by_branch += tl.where(inside, above, 0.0)
    sums = sums_ptr + tl.program_id(0) * 3 * WIDTH + width
    tl.store(sums, by_weight, mask=inside)
    tl.store(sums + WIDTH, by_bias, mask=inside)
    tl.store(sums + 2 * WIDTH, by_branch, mask=inside)
