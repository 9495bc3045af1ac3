"""Attention of short sequences on a GPU, forward and backward in one Triton kernel each.

A ViT-B/32 has 50 places. Flash attention walks over blocks of keys and keeps what backward needs; here all
places of one head fit into one block, so that a program reads its query, key and value once, and backward
computes the weights again instead of reading anything forward left. It then takes as long as reading and
writing takes: 0.21 ms instead of torch's 0.34 for 1,536 pictures on an H200, 0.73 instead of 1.24 with
backward.

Encoding alone uses it. In a training step torch.compile fuses less around it, and the step takes longer
(docs/benchmarks.md).

transformers is told of it under `NAME`. Elsewhere (on a CPU, in float32, with a mask, for longer sequences)
torch's own attention runs, which is the reference in the tests.

Shapes: N pictures, H heads, P places, E width of a head.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

NAME = "gare_short"
MOST_PLACES = 128
"""Their weights, 128 × 128 in float32, are what the registers of a program hold."""
MOST_WIDTH = 128


def use_short_attention(tower: Any) -> None:
    """Have a tower of transformers attend by this file."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    tower.config._attn_implementation = NAME  # set_attn_implementation is not in every version's towers


def attend(
    module: Any,
    query_NHPE: Tensor,
    key_NHPE: Tensor,
    value_NHPE: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: attended values [N, P, H, E], and no weights."""
    if is_short(query_NHPE, key_NHPE) and attention_mask is None and not dropout and not module.is_causal:
        scale = query_NHPE.shape[-1] ** -0.5 if scaling is None else scaling
        attended_NPHE: Tensor = short_attention(query_NHPE, key_NHPE, value_NHPE, scale)
        return attended_NPHE, None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    attended, _ = sdpa_attention_forward(
        module,
        query_NHPE,
        key_NHPE,
        value_NHPE,
        attention_mask,
        scaling=scaling,
        dropout=dropout,
        **others,
    )
    return attended, None


@cache
def has_triton() -> bool:
    """Whether kernels can be compiled; Triton has no wheels for some systems."""
    return find_spec("triton") is not None


def is_short(query_NHPE: Tensor, key_NHPE: Tensor) -> bool:
    """Whether the kernels take it, and are faster."""
    return _has_few_keys(key_NHPE) and query_NHPE.shape == key_NHPE.shape


def is_one_query(query_NHPE: Tensor, key_NHPE: Tensor) -> bool:
    """Whether `attend_once` takes it, and is faster."""
    return _has_few_keys(key_NHPE) and query_NHPE.shape[2] == 1


def _has_few_keys(key_NHPE: Tensor) -> bool:
    _, _, places, width = key_NHPE.shape
    return (
        not torch.is_grad_enabled()
        and key_NHPE.is_cuda
        and has_triton()
        and key_NHPE.dtype in (torch.bfloat16, torch.float16)
        and places <= MOST_PLACES
        and width <= MOST_WIDTH
    )


def attend_once(query_NH1E: Tensor, key_NHPE: Tensor, value_NHPE: Tensor, scale: float) -> Tensor:
    """Attended values [N, 1, H, E] of one query, without gradients."""
    from gare.encoders.short_attention_cuda import attend_once

    return attend_once(query_NH1E, key_NHPE, value_NHPE, scale)


# --- two operators ------------------------------------------------------------------------------------------

# Operators rather than a torch.autograd.Function: torch.compile sees one node, and may compute it again.


@torch.library.custom_op("gare::short_attention", mutates_args=())
def short_attention(query_NHPE: Tensor, key_NHPE: Tensor, value_NHPE: Tensor, scale: float) -> Tensor:
    """Attended values [N, P, H, E]."""
    from gare.encoders.short_attention_cuda import forward

    return forward(query_NHPE, key_NHPE, value_NHPE, scale)


@torch.library.custom_op("gare::short_attention_backward", mutates_args=())
def _short_attention_backward(
    gradient_NPHE: Tensor, query_NHPE: Tensor, key_NHPE: Tensor, value_NHPE: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, each [N, P, H, E]."""
    from gare.encoders.short_attention_cuda import backward

    return backward(gradient_NPHE, query_NHPE, key_NHPE, value_NHPE, scale)


def _empty(query_NHPE: Tensor) -> Tensor:
    pictures, heads, places, width = query_NHPE.shape
    return query_NHPE.new_empty(pictures, places, heads, width)


@short_attention.register_fake
def _(query_NHPE: Tensor, key_NHPE: Tensor, value_NHPE: Tensor, scale: float) -> Tensor:
    return _empty(query_NHPE)


@_short_attention_backward.register_fake
def _(
    gradient_NPHE: Tensor, query_NHPE: Tensor, key_NHPE: Tensor, value_NHPE: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(query_NHPE), _empty(query_NHPE), _empty(query_NHPE)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient_NPHE: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _short_attention_backward(gradient_NPHE, *ctx.saved_tensors, ctx.scale)
    return *(gradient.transpose(1, 2) for gradient in gradients), None


short_attention.register_autograd(_backward, setup_context=_keep)
