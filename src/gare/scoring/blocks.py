"""Pairs in blocks: how large one may be, and what training keeps of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

NUMBERS_PER_BLOCK = {"cpu": 2**21, "cuda": 2**27}
"""How many numbers a block's largest tensor may hold: cache-sized on a CPU, 512 MB in float32 on a GPU."""


def block_budget(device: torch.device) -> int:
    return NUMBERS_PER_BLOCK.get(device.type, NUMBERS_PER_BLOCK["cpu"])


def each_block(function: Callable[[Any], Tensor], blocks: Sequence[Any]) -> list[Tensor]:
    """`function` of every block; in training, what a block needs is computed again in backward, not kept."""
    if torch.is_grad_enabled() and len(blocks) > 1:
        return [
            checkpoint(function, block, use_reentrant=False, preserve_rng_state=False) for block in blocks
        ]
    return [function(block) for block in blocks]
