"""The information-bottleneck side of the increments.

How far they are from their prior, how many directions they use, and how much they tell about whether a pair
matches. Shapes: T texts, V videos, D embedding; N samples of K features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gare.objective.bottleneck import STD_FLOOR
from gare.types import block_slices

FOLDS = 5


@dataclass(frozen=True)
class IncrementMoments:
    """Statistics of all increments of a split, gathered a few videos at a time."""

    mean_VD: Tensor
    """mu_j: over the texts."""
    std_VD: Tensor
    """sigma_j: over the texts, unbiased."""
    covariance_DD: Tensor
    """Of all increments around their common mean."""
    within_DD: Tensor
    """Of the increments of each video around that video's mean: what depends on the text."""
    positive_TD: Tensor
    """Delta_ii."""
    negative_TD: Tensor
    """Delta_ij with j drawn for each i."""


def gather_moments(
    block_of: Callable[[slice], Tensor], num_videos: int, negative_of: Tensor, *, block: int = 16
) -> IncrementMoments:
    """`block_of(videos)` gives Delta for all texts and those videos, [T, B, D]; only one block is held."""
    means, stds, within, positive, negative = [], [], None, {}, {}
    for rows in block_slices(num_videos, block):
        increment_TBD = block_of(rows).double()
        mean_BD = increment_TBD.mean(dim=0)
        centred = (increment_TBD - mean_BD).flatten(0, 1)
        within = centred.mT @ centred if within is None else within + centred.mT @ centred
        means.append(mean_BD)
        stds.append(increment_TBD.std(dim=0, correction=1))
        for place, video in enumerate(range(rows.start, rows.stop)):
            positive[video] = increment_TBD[video, place]
            for text in (negative_of == video).nonzero().flatten().tolist():
                negative[text] = increment_TBD[text, place]
        num_texts = len(increment_TBD)
    assert within is not None
    mean_VD = torch.cat(means)
    within_DD = within / (num_texts * num_videos)
    offset_VD = mean_VD - mean_VD.mean(dim=0)
    return IncrementMoments(
        mean_VD,
        torch.cat(stds),
        within_DD + offset_VD.mT @ offset_VD / num_videos,
        within_DD,
        torch.stack([positive[video] for video in range(num_videos)]),
        torch.stack([negative[text] for text in range(num_texts)]),
    )


def kl_per_video(mean_VD: Tensor, std_VD: Tensor, *, prior_std: float = 1.0) -> Tensor:
    """KL( N(mu_j, sigma_j²) ‖ N(0, prior²) ) a dimension, in nats, [V]: the objective's term before its mean.

    >>> kl_per_video(torch.tensor([[1.0, 0.0]]), torch.ones(1, 2)).round(decimals=4)
    tensor([0.2500])
    """
    std_VD = std_VD + STD_FLOOR
    kl_VD = math.log(prior_std) - std_VD.log() + (std_VD**2 + mean_VD**2) / (2 * prior_std**2) - 0.5
    return kl_VD.mean(dim=-1)


def effective_dimension(covariance_DD: Tensor) -> float:
    """Participation ratio (Σλ)² / Σλ²: 1 for a line, D for a ball.

    >>> effective_dimension(torch.diag(torch.tensor([2.0, 2.0, 0.0])))
    2.0
    """
    total = covariance_DD.diagonal().sum()
    return float(total.square() / covariance_DD.square().sum().clamp_min(1e-300))


def match_information(positive_NK: Tensor, negative_NK: Tensor, *, num_components: int = 16) -> float:
    """Bits that Delta tells about "does this pair match", a lower bound; 1 bit is all there is to know.

    I(Delta; match) ≥ H(match) − cross-entropy of any classifier: here logistic regression on the first
    principal components, on pairs it has not seen. Below zero is rounded up: it learnt nothing.
    """
    features_MK = torch.cat([positive_NK, negative_NK]).double()
    label_M = torch.cat([torch.ones(len(positive_NK)), torch.zeros(len(negative_NK))]).double()
    fold_M = torch.cat([torch.arange(len(positive_NK)), torch.arange(len(negative_NK))]) % FOLDS
    if len(positive_NK) < 2 * FOLDS:
        return float("nan")
    entropy = 0.0
    for fold in range(FOLDS):
        seen = fold_M != fold
        reduced_MK = _principal(features_MK, seen, num_components)
        weight_K = logistic_regression(reduced_MK[seen], label_M[seen])
        logits = reduced_MK[~seen] @ weight_K
        entropy += float(
            torch.nn.functional.binary_cross_entropy_with_logits(logits, label_M[~seen], reduction="sum")
        )
    return max(0.0, 1 - entropy / len(label_M) / math.log(2))


def logistic_regression(
    features_MK: Tensor, label_M: Tensor, *, ridge: float = 1e-2, steps: int = 25
) -> Tensor:
    """Weights of ridge-penalised logistic regression, by Newton's method."""
    weight_K = features_MK.new_zeros(features_MK.shape[1])
    penalty = ridge * len(label_M) * torch.eye(len(weight_K), dtype=weight_K.dtype)
    for _ in range(steps):
        chance_M = torch.sigmoid(features_MK @ weight_K)
        slope_K = features_MK.mT @ (chance_M - label_M) + penalty @ weight_K
        curvature_KK = (features_MK * (chance_M * (1 - chance_M))[:, None]).mT @ features_MK + penalty
        step_K = torch.linalg.solve(curvature_KK, slope_K)
        weight_K = weight_K - step_K
        if step_K.norm() < 1e-10:
            break
    return weight_K


def _principal(features_MK: Tensor, seen: Tensor, num_components: int) -> Tensor:
    """Scores on the first principal components of the seen rows, at unit variance, and a column of ones."""
    mean_K = features_MK[seen].mean(dim=0)
    centred = features_MK - mean_K
    _, size, axes = torch.linalg.svd(centred[seen], full_matrices=False)
    kept = min(num_components, int((size > 1e-9 * size[0].clamp_min(1e-300)).sum()))
    scale = size[:kept] / math.sqrt(int(seen.sum()))
    scores = centred @ axes[:kept].mT / scale
    return torch.cat([scores, torch.ones(len(scores), 1, dtype=scores.dtype)], dim=1)
