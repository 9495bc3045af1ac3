"""How much of a full ranking a cheap first stage keeps. Shapes: T texts, V videos."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gare.evaluate.ranks import ranks_of_targets

TOP = 10


@dataclass(frozen=True)
class CoverageCurve:
    """For one gallery size: the share of the full top 10 among the first k of the first stage."""

    gallery: int
    k: list[int]
    coverage: list[float]
    needed_for_99: int | None
    """Smallest k that keeps 99 % of the full top 10."""


def depths_of_top(plain_TV: Tensor, full_TV: Tensor, top: int = TOP) -> Tensor:
    """The first-stage rank (from 1) of each of the `top` best videos of the full ranking, [T, top].

    >>> plain, full = torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[1.0, 2.0, 3.0]])
    >>> depths_of_top(plain, full, top=2)
    tensor([[3, 2]])
    """
    best_TK = full_TV.topk(min(top, full_TV.shape[1]), dim=1).indices
    return torch.stack([ranks_of_targets(plain_TV, best_T) for best_T in best_TK.T.contiguous()], dim=1)


def coverage_curve(depth_TK: Tensor, gallery: int) -> CoverageCurve:
    """The share of depths within k, for every k."""
    ks = torch.arange(1, gallery + 1)
    within = torch.bincount(depth_TK.flatten(), minlength=gallery + 1)[1 : gallery + 1].cumsum(0)
    coverage = within.double() / depth_TK.numel()
    enough = (coverage >= 0.99).nonzero()
    return CoverageCurve(
        gallery, ks.tolist(), coverage.tolist(), int(ks[enough[0, 0]]) if len(enough) else None
    )


def gallery_coverage(
    plain_TV: Tensor, full_TV: Tensor, sizes: Sequence[int], *, draws: int, generator: torch.Generator
) -> list[CoverageCurve]:
    """Curves over random galleries of each size; every text is asked, whether its own video is in or not."""
    curves = []
    for size in sizes:
        depths = []
        for _ in range(1 if size == plain_TV.shape[1] else draws):
            chosen = torch.randperm(plain_TV.shape[1], generator=generator)[:size]
            depths.append(depths_of_top(plain_TV[:, chosen], full_TV[:, chosen]))
        curves.append(coverage_curve(torch.cat(depths), size))
    return curves
