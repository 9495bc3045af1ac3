"""Pairs in blocks: how large a block may be, what training keeps of it, and its one large matrix product.

A small file of its own: the fast paths of all interactions share it.

Shapes: O owners, A atoms, P others, D embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gare.cpu_products import multiply

NUMBERS_PER_BLOCK = {"cpu": 2**21, "cuda": 2**27}
"""How many numbers a block's largest tensor may hold: cache-sized on a CPU, 512 MB in float32 on a GPU."""


def block_budget(device: torch.device) -> int:
    """How many numbers the largest tensor of a block may hold on a device."""
    return NUMBERS_PER_BLOCK.get(device.type, NUMBERS_PER_BLOCK["cpu"])


def each_block(function: Callable[[Any], Tensor], blocks: Sequence[Any]) -> list[Tensor]:
    """`function` of every block; in training, what a block needs is computed again in backward, not kept."""
    if torch.is_grad_enabled() and len(blocks) > 1:
        return [
            checkpoint(function, block, use_reentrant=False, preserve_rng_state=False) for block in blocks
        ]
    return [function(block) for block in blocks]


def products(rows_OAD: Tensor, other_PD: Tensor) -> Tensor:
    """All dot products [O, A, P] at once; half precision is multiplied as such and summed in float32."""
    flat_ND = rows_OAD.flatten(0, 1)
    if flat_ND.dtype == full_precision(flat_ND).dtype:
        product_NP = multiply(flat_ND, other_PD.to(flat_ND.dtype))
    elif flat_ND.is_cuda and not torch.is_grad_enabled():
        product_NP = torch.mm(flat_ND, other_PD.mT.to(flat_ND.dtype), out_dtype=torch.float32)
    else:
        product_NP = multiply(flat_ND.float(), other_PD.float())
    return product_NP.view(*rows_OAD.shape[:2], -1)


def full_precision(x: Tensor) -> Tensor:
    """Half precision is widened to float32; float32 and float64 are left alone."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def centre(x: Tensor) -> Tensor:
    """Each vector less the mean of its numbers."""
    return x - x.mean(dim=-1, keepdim=True)
