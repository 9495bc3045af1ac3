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
ROWS, STAGES, WARPS = 1, 2, 8
"""How many rows a program of backward has before it, how many it fetches ahead, and by how many warps."""


def add_norm(
    states: Tensor,
    branches: Sequence[Tensor],
    weight_E: Tensor,
    bias_E: Tensor,
    eps: float,
    *,
    dtype: torch.dtype = torch.bfloat16,
    keeps_sum: bool = True,
    statistics_R2: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """States plus up to two branches in the precision of the states, and their norm in `dtype`.

    Without branches, or if the sum is not to be kept, the first of the two are the states as they came.

    Args:
        states: in float32; or in float16, and then their sum is kept in it too, though it is made and normed
            in float32.
        branches: in any precision.
        weight_E, bias_E, eps: of the norm.
        dtype: of the norm's values.
        keeps_sum: whether the sum is written.
        statistics_R2: where given, filled with what backward needs of each row: its mean, and one over its
            standard deviation.
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
        states_RE if statistics_R2 is None else statistics_R2,
        eps,
        WIDTH=width,
        BLOCK_E=padded,
        BRANCHES=len(branches),
        KEEPS_SUM=keeps_sum,
        KEEPS_STATISTICS=statistics_R2 is not None,
        num_warps=_warps(padded),
    )
    return sums_RE.view(states.shape), normed_RE.view(states.shape)


def embed_norm(
    embedded_NSE: Tensor,
    moved_PE: Tensor,
    first: tuple[Tensor, Tensor, float],
    second: tuple[Tensor, Tensor, float],
    *,
    dtype: torch.dtype = torch.bfloat16,
    states_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """The states [N, P, E] before a tower's first layer, and their norm in `dtype`.

    Args:
        embedded_NSE: the patches' vectors, S = P - 1: the first place has none.
        moved_PE: what is added to each place, in float32.
        first: weight, bias and epsilon of the norm that gives the states.
        second: those of the norm after it.
        dtype: of the second norm's values.
        states_dtype: of the states.
    """
    pictures, (places, width) = len(embedded_NSE), moved_PE.shape
    states_NPE = moved_PE.new_empty(pictures, places, width, dtype=states_dtype)
    normed_NPE = torch.empty_like(states_NPE, dtype=dtype)
    padded = triton.next_power_of_2(width)
    _embed_kernel[(pictures * places,)](
        embedded_NSE.contiguous(),
        moved_PE.contiguous(),
        *first[:2],
        *second[:2],
        states_NPE,
        normed_NPE,
        first[2],
        second[2],
        PLACES=places,
        WIDTH=width,
        BLOCK_E=padded,
        num_warps=_warps(padded),
    )
    return states_NPE, normed_NPE


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
    branches: Sequence[Tensor],
    statistics_R2: Tensor,
    norm: tuple[Tensor, Tensor],
) -> AddNormGradients:
    """The gradients of states and branches, of which `add_norm` kept nothing but its statistics.

    Args:
        gradient_RE: of the norm, in the precision of products.
        above_RE: of the sum, in float32, from what else reads it. If it has fewer rows, it is that of the
            first of every so many rows, and the others have none.
        states_RE: as `add_norm` had them.
        branches: likewise.
        statistics_R2: what `add_norm` made.
        norm: its weight and bias.
    """
    rows, width = states_RE.shape
    weight_E, bias_E = norm
    one_RE, other_RE = [*branches, states_RE, states_RE][:2]
    states_G = torch.empty_like(states_RE)
    branch_G, normed_RE = torch.empty_like(gradient_RE), torch.empty_like(gradient_RE)
    programs, padded = min(triton.cdiv(rows, ROWS), PROGRAMS), triton.next_power_of_2(width)
    sums = torch.empty(programs, 3, width, dtype=torch.float32, device=states_RE.device)
    _backward_kernel[(programs,)](
        gradient_RE,
        above_RE,
        states_RE,
        one_RE,
        other_RE,
        statistics_R2,
        weight_E,
        bias_E,
        states_G,
        branch_G,
        normed_RE,
        sums,
        rows,
        WIDTH=width,
        BLOCK_E=padded,
        ROWS=ROWS,
        BRANCHES=len(branches),
        EVERY=rows // len(above_RE),
        TURNS=triton.cdiv(rows, programs * ROWS),  # Triton's interpreter wants to know it
        STAGES=STAGES,
        num_warps=WARPS if padded >= 1024 else 4,
    )
    return AddNormGradients(states_G, branch_G, normed_RE, *sums.sum(dim=0))


def _warps(padded: int) -> int:
    """One warp adds a row up without waiting for others: the faster way for rows of 768 on an H200."""
    return max(1, padded // 1024)


@triton.jit
def _finite(x, out_ptr):
    """As it is to be stored; in float16, what is too large for it becomes the largest number."""
    if out_ptr.dtype.element_ty == tl.float16:
        x = tl.clamp(x, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    return x


@triton.jit
def _kernel(
    states_ptr,
    one_ptr,
    other_ptr,
    weight_ptr,
    bias_ptr,
    sums_ptr,
    normed_ptr,
    statistics_ptr,
    eps,
    WIDTH: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BRANCHES: tl.constexpr,
    KEEPS_SUM: tl.constexpr,
    KEEPS_STATISTICS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * WIDTH  # a large batch has more numbers than 32 bits count
    width = tl.arange(0, BLOCK_E)
    inside = width < WIDTH
    states = tl.load(states_ptr + row + width, mask=inside, other=0.0).to(tl.float32)
    if BRANCHES > 0:
        states += tl.load(one_ptr + row + width, mask=inside, other=0.0).to(tl.float32)
    if BRANCHES > 1:
        states += tl.load(other_ptr + row + width, mask=inside, other=0.0).to(tl.float32)
    if KEEPS_SUM:
        tl.store(sums_ptr + row + width, _finite(states, sums_ptr), mask=inside)
    mean = tl.sum(states, axis=0) / WIDTH
    centred = tl.where(inside, states - mean, 0.0)
    variance = tl.sum(centred * centred, axis=0) / WIDTH
    scale = tl.rsqrt(variance + eps)
    if KEEPS_STATISTICS:
        statistics = statistics_ptr + 2 * tl.program_id(0)
        tl.store(statistics, mean)
        tl.store(statistics + 1, scale)
    weight = tl.load(weight_ptr + width, mask=inside, other=0.0)
    bias = tl.load(bias_ptr + width, mask=inside, other=0.0)
    normed = centred * scale * weight + bias
    tl.store(normed_ptr + row + width, normed.to(normed_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _norm(x, inside, weight_ptr, bias_ptr, width, eps, WIDTH: tl.constexpr):
    centred = tl.where(inside, x - tl.sum(x, axis=0) / WIDTH, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / WIDTH + eps)
    weight = tl.load(weight_ptr + width, mask=inside, other=0.0)
    return centred * scale * weight + tl.load(bias_ptr + width, mask=inside, other=0.0)


@triton.jit
def _embed_kernel(
    embedded_ptr,
    moved_ptr,
    weight1_ptr,
    bias1_ptr,
    weight2_ptr,
    bias2_ptr,
    states_ptr,
    normed_ptr,
    eps1,
    eps2,
    PLACES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    picture, place = (tl.program_id(0) // PLACES).to(tl.int64), tl.program_id(0) % PLACES
    width = tl.arange(0, BLOCK_E)
    inside = width < WIDTH
    patch = embedded_ptr + (picture * (PLACES - 1) + place - 1) * WIDTH
    states = tl.load(patch + width, mask=inside & (place > 0), other=0.0).to(tl.float32)
    states += tl.load(moved_ptr + place * WIDTH + width, mask=inside, other=0.0)
    states = _norm(states, inside, weight1_ptr, bias1_ptr, width, eps1, WIDTH)
    row = (picture * PLACES + place) * WIDTH
    tl.store(states_ptr + row + width, _finite(states, states_ptr), mask=inside)
    normed = _norm(states, inside, weight2_ptr, bias2_ptr, width, eps2, WIDTH)
    tl.store(normed_ptr + row + width, normed.to(normed_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_pairs(one, other, one_more, other_more):
    return one + one_more, other + other_more


@triton.jit
def _backward_kernel(
    gradient_ptr,
    above_ptr,
    states_ptr,
    one_ptr,
    other_ptr,
    statistics_ptr,
    weight_ptr,
    bias_ptr,
    states_out,
    branch_out,
    normed_out,
    sums_ptr,
    rows,
    WIDTH: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
    BRANCHES: tl.constexpr,
    EVERY: tl.constexpr,
    TURNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    width = tl.arange(0, BLOCK_E)[None, :]
    weight = tl.load(weight_ptr + width, mask=width < WIDTH, other=0.0)
    bias = tl.load(bias_ptr + width, mask=width < WIDTH, other=0.0)
    by_weight = tl.zeros([ROWS, BLOCK_E], dtype=tl.float32)
    by_bias = tl.zeros([ROWS, BLOCK_E], dtype=tl.float32)
    by_branch = tl.zeros([ROWS, BLOCK_E], dtype=tl.float32)
    for turn in tl.range(0, TURNS, num_stages=STAGES):
        first = (turn * tl.num_programs(0) + tl.program_id(0)) * ROWS
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (width < WIDTH)
        place = row.to(tl.int64) * WIDTH + width  # a large batch has more numbers than 32 bits count
        mean = tl.load(statistics_ptr + 2 * row, mask=row < rows, other=0.0)
        scale = tl.load(statistics_ptr + 2 * row + 1, mask=row < rows, other=0.0)
        gradient = tl.load(gradient_ptr + place, mask=inside, other=0.0).to(tl.float32)
        if EVERY == 1:
            above = tl.load(above_ptr + place, mask=inside, other=0.0)
        else:
            place_above = (row // EVERY).to(tl.int64) * WIDTH + width
            above = tl.load(above_ptr + place_above, mask=inside & (row % EVERY == 0), other=0.0)
        states = tl.load(states_ptr + place, mask=inside, other=0.0)
        if BRANCHES > 0:
            states += tl.load(one_ptr + place, mask=inside, other=0.0).to(tl.float32)
        if BRANCHES > 1:
            states += tl.load(other_ptr + place, mask=inside, other=0.0).to(tl.float32)
        unit = tl.where(inside, (states - mean) * scale, 0.0)
        by_unit = gradient * weight
        # Both sums at once: each waits for all warps.
        shared, total = tl.reduce((by_unit * unit, by_unit), 1, _add_pairs)
        by_unit = by_unit - total[:, None] / WIDTH - unit * (shared[:, None] / WIDTH)
        above += tl.where(inside, by_unit * scale, 0.0)
        tl.store(states_out + place, above, mask=inside)
        tl.store(branch_out + place, above.to(branch_out.dtype.element_ty), mask=inside)
        normed = unit * weight + bias
        tl.store(normed_out + place, normed.to(normed_out.dtype.element_ty), mask=inside)
        by_weight += gradient * unit
        by_bias += gradient
        by_branch += above
    sums = sums_ptr + tl.program_id(0) * 3 * WIDTH + tl.arange(0, BLOCK_E)
    inside = tl.arange(0, BLOCK_E) < WIDTH
    tl.store(sums, tl.sum(by_weight, axis=0), mask=inside)
    tl.store(sums + WIDTH, tl.sum(by_bias, axis=0), mask=inside)
    tl.store(sums + 2 * WIDTH, tl.sum(by_branch, axis=0), mask=inside)
