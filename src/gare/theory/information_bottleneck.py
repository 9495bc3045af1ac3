"""The derivation of the bottleneck term, step by step, on distributions small enough to sum over.

The paper bounds what an increment tells about its pair, I(Δ; T, V), and relaxes the bound to one distribution
for each video. Every step is an (in)equality of sums, so it can be computed and tested:

1. VIB: I(Δ; T, V) = E_tv KL(q(Δ|t,v) ‖ q(Δ)) ≤ E_tv KL(q(Δ|t,v) ‖ r), for any prior r.
2. Jensen (KL is convex): E_tv KL(q(Δ|t,v) ‖ r) ≥ E_v KL(q̄(Δ|v) ‖ r), q̄ the mixture over the texts of v.
3. Chain rule: I(Δ; T, V) = I(Δ; V) + I(Δ; T | V) ≥ I(Δ; V).

Step 2 points the other way than step 1: the relaxed term is below the bound, so a small value of it does not
bound I(Δ; T, V). It bounds I(Δ; V).

Shapes: T texts, V videos, K values an increment may take, D embedding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BottleneckSteps:
    """The quantities of the derivation, in nats."""

    information_pair: Tensor
    """I(Δ; T, V)."""
    information_video: Tensor
    """I(Δ; V)."""
    information_text_given_video: Tensor
    """I(Δ; T | V)."""
    variational_bound: Tensor
    """E_tv KL(q(Δ|t,v) ‖ r)."""
    relaxed_bound: Tensor
    """E_v KL(q̄(Δ|v) ‖ r), what the training term estimates with Gaussians."""


def bottleneck_steps(increment_TVK: Tensor, pair_TV: Tensor, prior_K: Tensor) -> BottleneckSteps:
    """Every quantity of the derivation.

    Args:
        increment_TVK: q(Δ|t,v), rows that sum to one.
        pair_TV: p(t, v), summing to one.
        prior_K: r(Δ), summing to one.

    >>> half = torch.tensor([0.5, 0.5])
    >>> steps = bottleneck_steps(torch.eye(2)[:, None], half[:, None], half)
    >>> steps.information_pair, steps.information_video
    (tensor(0.6931), tensor(0.))
    """
    for name, tensor, over in (
        ("increment_TVK", increment_TVK, -1),
        ("pair_TV", pair_TV, (0, 1)),
        ("prior_K", prior_K, -1),
    ):
        if (tensor < 0).any() or not torch.allclose(
            tensor.sum(dim=over), torch.ones_like(tensor.sum(dim=over))
        ):
            raise ValueError(f"{name} is not a distribution: it must be non-negative and sum to one")
    video_V = pair_TV.sum(dim=0)
    marginal_K = torch.einsum("tv,tvk->k", pair_TV, increment_TVK)
    weighted_VK = torch.einsum("tv,tvk->vk", pair_TV, increment_TVK)
    mixture_VK = weighted_VK / video_V.clamp_min(torch.finfo(video_V.dtype).tiny)[:, None]
    return BottleneckSteps(
        information_pair=(pair_TV * divergence(increment_TVK, marginal_K)).sum(),
        information_video=(video_V * divergence(mixture_VK, marginal_K)).sum(),
        information_text_given_video=(pair_TV * divergence(increment_TVK, mixture_VK)).sum(),
        variational_bound=(pair_TV * divergence(increment_TVK, prior_K)).sum(),
        relaxed_bound=(video_V * divergence(mixture_VK, prior_K)).sum(),
    )


def divergence(left: Tensor, right: Tensor) -> Tensor:
    """KL(left ‖ right) over the last dimension; 0 log 0 is 0."""
    return (torch.xlogy(left, left) - torch.xlogy(left, right)).sum(dim=-1)


def least_largest_distance(video_VD: Tensor) -> Tensor:
    """How far a point is at least from the further one of each two videos: half of their distance, [V, V].

    By the triangle inequality |v_j − v_k| ≤ |v_j − t| + |t − v_k|, and the larger of two is at least half.
    One text vector cannot be near two videos that lie apart; a text with an increment for each pair can.
    """
    return torch.cdist(video_VD, video_VD) / 2
