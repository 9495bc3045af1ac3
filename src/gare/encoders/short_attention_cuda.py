"""The kernels of `short_attention.py`: one program for the places of one head of one picture.

Imports Triton, so `short_attention.py` imports it only when it runs. Tests run it in Triton's interpreter.

Shapes: N pictures, H heads, P places, E width of a head. In the kernels P and E are padded to powers of two.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def forward(
    query_NHPE: Tensor,
    key_NHPE: Tensor,
    value_NHPE: Tensor,
    scale: float,
    *,
    mask_NP: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Attended values [N, P, H, E].

    Args:
        query_NHPE, key_NHPE, value_NHPE: of each place.
        scale: what logits are multiplied by.
        mask_NP: true where a place is seen, as bool. A place that sees none has any value, but a number.
        is_causal: whether a place sees itself and what is before it alone.
    """
    pictures, heads, places, width = query_NHPE.shape
    attended_NPHE = query_NHPE.new_empty(pictures, places, heads, width)
    tensors = (*_side_by_side(query_NHPE, key_NHPE, value_NHPE), attended_NPHE.transpose(1, 2))
    _forward_kernel[(pictures * heads,)](
        *tensors,
        query_NHPE if mask_NP is None else _bytes(mask_NP),
        *_strides(tensors),
        scale,
        **_sizes(query_NHPE),
        HAS_MASK=mask_NP is not None,
        IS_CAUSAL=is_causal,
    )
    return attended_NPHE


def attend_once(query_NH1E: Tensor, key_NHPE: Tensor, value_NHPE: Tensor, scale: float) -> Tensor:
    """Attended values [N, 1, H, E] of one query: sums over keys and values that are read once."""
    pictures, heads, _, width = query_NH1E.shape
    attended_N1HE = query_NH1E.new_empty(pictures, 1, heads, width)
    tensors = (*_side_by_side(query_NH1E, key_NHPE, value_NHPE), attended_N1HE.transpose(1, 2))
    sizes = _sizes(key_NHPE)
    _one_query_kernel[(pictures * heads,)](*tensors, *_strides(tensors), scale, **sizes)
    return attended_N1HE


def backward(
    gradient_NPHE: Tensor, query_NHPE: Tensor, key_NHPE: Tensor, value_NHPE: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, each [N, P, H, E]."""
    pictures, heads, places, width = query_NHPE.shape
    query_G, key_G, value_G = (query_NHPE.new_empty(pictures, places, heads, width) for _ in range(3))
    inputs = _side_by_side(query_NHPE, key_NHPE, value_NHPE, gradient_NPHE.transpose(1, 2))
    tensors = (*inputs, query_G.transpose(1, 2))
    _backward_kernel[(pictures * heads,)](
        *inputs,
        *(query_G, key_G, value_G, query_G, query_G, query_G),
        *_strides(tensors),
        scale,
        **_sizes(query_NHPE),
        GIVES_MORE=False,
        HAS_MASK=False,
        IS_CAUSAL=False,
    )
    return query_G, key_G, value_G


def packed_backward(
    gradient_NPHE: Tensor,
    packed_NP3HE: Tensor,
    scale: float,
    *,
    mask_NP: Tensor | None = None,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value side by side, the sum of these, and the attended values again.

    Nobody has to keep the attended values, and the bias of query, key and value costs no pass of its own.
    """
    pictures, _, _, heads, width = packed_NP3HE.shape
    query_NHPE, key_NHPE, value_NHPE = packed_NP3HE.permute(2, 0, 3, 1, 4)
    packed_G = torch.empty_like(packed_NP3HE)
    query_G, key_G, value_G = packed_G.permute(2, 0, 3, 1, 4)
    attended_NPHE = torch.empty_like(gradient_NPHE)
    sums = torch.empty(pictures, 3, heads, width, dtype=torch.float32, device=packed_G.device)
    inputs = (query_NHPE, key_NHPE, value_NHPE, gradient_NPHE.transpose(1, 2))
    _backward_kernel[(pictures * heads,)](
        *inputs,
        *(query_G, key_G, value_G, attended_NPHE, sums),
        packed_NP3HE if mask_NP is None else _bytes(mask_NP),
        *_strides((*inputs, query_G)),
        scale,
        **_sizes(query_NHPE),
        GIVES_MORE=True,
        HAS_MASK=mask_NP is not None,
        IS_CAUSAL=is_causal,
    )
    return packed_G, sums.sum(dim=0), attended_NPHE


def _bytes(mask_NP: Tensor) -> Tensor:
    return mask_NP.bool().contiguous().view(torch.uint8)


def _side_by_side(*tensors: Tensor) -> tuple[Tensor, ...]:
    """With the numbers of a place next to each other, as a tower has them; the gradient of a sum has not."""
    return tuple(tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors)


def _strides(tensors: tuple[Tensor, ...]) -> list[int]:
    """Strides over pictures, heads and places of each tensor."""
    return [stride for tensor in tensors for stride in tensor.stride()[:-1]]


def _sizes(query_NHPE: Tensor) -> dict[str, Any]:
    _, heads, places, width = query_NHPE.shape
    padded = max(16, triton.next_power_of_2(places))
    return {
        "HEADS": heads,
        "PLACES": places,
        "WIDTH": width,
        "BLOCK_P": padded,
        "BLOCK_E": max(16, triton.next_power_of_2(width)),
        "num_warps": 4 if padded <= 64 else 8,
    }


@triton.jit
def _load(base, picture, head, by_picture, by_head, by_place, place, width, inside):
    pointers = base + picture * by_picture + head * by_head + place[:, None] * by_place + width[None, :]
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _weights(
    query,
    key,
    place,
    scale,
    mask_ptr,
    PLACES: tl.constexpr,
    HAS_MASK: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):
    """The softmax of a row for each query; keys that are padding weigh nothing."""
    logits = tl.dot(query, tl.trans(key)) * scale
    if HAS_MASK:
        is_seen = tl.load(mask_ptr + place, mask=place < PLACES, other=0) != 0
        logits = tl.where(is_seen[None, :], logits, -1e30)
    if IS_CAUSAL:
        logits = tl.where(place[None, :] <= place[:, None], logits, -1e30)
    logits = tl.where(place[None, :] < PLACES, logits, float("-inf"))
    powers = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    return powers / tl.sum(powers, axis=1)[:, None]


@triton.jit
def _forward_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    out_ptr,
    mask_ptr,
    query_n,
    query_h,
    query_p,
    key_n,
    key_h,
    key_p,
    value_n,
    value_h,
    value_p,
    out_n,
    out_h,
    out_p,
    scale,
    HEADS: tl.constexpr,
    PLACES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_MASK: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):
    picture = (tl.program_id(0) // HEADS).to(tl.int64)  # a large batch has more numbers than 32 bits count
    head = tl.program_id(0) % HEADS
    place, width = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_E)
    inside = (place[:, None] < PLACES) & (width[None, :] < WIDTH)
    query = _load(query_ptr, picture, head, query_n, query_h, query_p, place, width, inside)
    key = _load(key_ptr, picture, head, key_n, key_h, key_p, place, width, inside)
    value = _load(value_ptr, picture, head, value_n, value_h, value_p, place, width, inside)
    weights = _weights(query, key, place, scale, mask_ptr + picture * PLACES, PLACES, HAS_MASK, IS_CAUSAL)
    attended = tl.dot(weights.to(value.dtype), value)
    out = out_ptr + picture * out_n + head * out_h + place[:, None] * out_p + width[None, :]
    tl.store(out, attended.to(value.dtype), mask=inside)


@triton.jit
def _one_query_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    out_ptr,
    query_n,
    query_h,
    query_p,
    key_n,
    key_h,
    key_p,
    value_n,
    value_h,
    value_p,
    out_n,
    out_h,
    out_p,
    scale,
    HEADS: tl.constexpr,
    PLACES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    picture, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    place, width = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_E)
    inside = (place[:, None] < PLACES) & (width[None, :] < WIDTH)
    key = _load(key_ptr, picture, head, key_n, key_h, key_p, place, width, inside).to(tl.float32)
    value = _load(value_ptr, picture, head, value_n, value_h, value_p, place, width, inside).to(tl.float32)
    query = query_ptr + picture * query_n + head * query_h + width
    query = tl.load(query, mask=width < WIDTH, other=0.0).to(tl.float32)
    logits = tl.sum(key * query[None, :], axis=1) * scale
    logits = tl.where(place < PLACES, logits, float("-inf"))
    powers = tl.exp(logits - tl.max(logits, axis=0))
    attended = tl.sum(powers[:, None] * value, axis=0) / tl.sum(powers, axis=0)
    out = out_ptr + picture * out_n + head * out_h + width
    tl.store(out, attended.to(out_ptr.dtype.element_ty), mask=width < WIDTH)


@triton.jit
def _backward_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    gradient_ptr,
    query_out,
    key_out,
    value_out,
    attended_out,
    sums_out,
    mask_ptr,
    query_n,
    query_h,
    query_p,
    key_n,
    key_h,
    key_p,
    value_n,
    value_h,
    value_p,
    gradient_n,
    gradient_h,
    gradient_p,
    out_n,
    out_h,
    out_p,
    scale,
    HEADS: tl.constexpr,
    PLACES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
    GIVES_MORE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):
    picture = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    place, width = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_E)
    inside = (place[:, None] < PLACES) & (width[None, :] < WIDTH)
    query = _load(query_ptr, picture, head, query_n, query_h, query_p, place, width, inside)
    key = _load(key_ptr, picture, head, key_n, key_h, key_p, place, width, inside)
    value = _load(value_ptr, picture, head, value_n, value_h, value_p, place, width, inside)
    gradient = _load(gradient_ptr, picture, head, gradient_n, gradient_h, gradient_p, place, width, inside)
    out = picture * out_n + head * out_h + place[:, None] * out_p + width[None, :]

    weights = _weights(query, key, place, scale, mask_ptr + picture * PLACES, PLACES, HAS_MASK, IS_CAUSAL)
    rounded = weights.to(value.dtype)
    # A query that is padding gets no gradient, nor does what it attends to: its row of `gradient` is zero.
    sums = sums_out + (3 * picture * HEADS + head) * WIDTH + width
    if GIVES_MORE:
        here = ((picture * PLACES + place[:, None]) * HEADS + head) * WIDTH + width[None, :]
        tl.store(attended_out + here, tl.dot(rounded, value).to(value.dtype), mask=inside)
    value_gradient = tl.dot(tl.trans(rounded), gradient)
    tl.store(value_out + out, value_gradient.to(value.dtype), mask=inside)
    if GIVES_MORE:
        tl.store(sums + 2 * HEADS * WIDTH, tl.sum(value_gradient, axis=0), mask=width < WIDTH)
    by_weight = tl.dot(gradient, tl.trans(value))  # the gradient of each weight
    by_logit = weights * (by_weight - tl.sum(weights * by_weight, axis=1)[:, None]) * scale
    by_logit = by_logit.to(query.dtype)
    query_gradient = tl.dot(by_logit, key)
    tl.store(query_out + out, query_gradient.to(query.dtype), mask=inside)
    if GIVES_MORE:
        tl.store(sums, tl.sum(query_gradient, axis=0), mask=width < WIDTH)
    key_gradient = tl.dot(tl.trans(by_logit), query)
    tl.store(key_out + out, key_gradient.to(query.dtype), mask=inside)
    if GIVES_MORE:
        tl.store(sums + HEADS * WIDTH, tl.sum(key_gradient, axis=0), mask=width < WIDTH)
