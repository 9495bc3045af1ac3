"""Which ranges of a block of dense frames become items: the candidates of a search.

The numbers were chosen on planted scenes and on short clips (docs/library.md, `experiments/moment_rule.py`).

Shapes: F frames, D embedding.
"""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor

_CUT_COSINE = 0.65  # of neighbouring frames, below which another shot begins
_WINDOW, _HOP = 8, 4  # frames, and from one window to the next
_FEW = 12  # a block that a model takes as a whole, such as a short clip


def moment_ranges(frames_FD: Tensor) -> list[tuple[int, int]]:
    """First frame and frame after the last of every range; the first is the whole block.

    Ranges of several lengths: the block, its shots, and windows of eight frames within longer shots, which
    overlap by half.

    >>> import torch
    >>> moment_ranges(torch.ones(5, 3))
    [(0, 5)]
    >>> moment_ranges(torch.ones(14, 3))
    [(0, 14), (0, 8), (4, 12), (6, 14)]
    """
    count = len(frames_FD)
    ranges = {(0, count): None}
    if count > _FEW:
        for first, last in _shots(frames_FD):
            ranges |= dict.fromkeys([(first, last), *_windows(first, last)])
    return list(ranges)


def _windows(first: int, last: int) -> list[tuple[int, int]]:
    """Windows that cover a shot; the last one ends with it."""
    if last - first <= _WINDOW:
        return []
    starts = [*range(first, last - _WINDOW, _HOP), last - _WINDOW]
    return [(start, start + _WINDOW) for start in starts]


def _shots(frames_FD: Tensor) -> list[tuple[int, int]]:
    unit_FD = F.normalize(frames_FD.float(), dim=-1)
    cosine_F = (unit_FD[1:] * unit_FD[:-1]).sum(dim=-1)
    cuts = [0, *((cosine_F < _CUT_COSINE).nonzero()[:, 0] + 1).tolist(), len(frames_FD)]
    return list(pairwise(cuts))
