"""Where texts and videos lie in the shared space. Shapes: N vectors, D embedding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gare.analysis.pairs import unit

FOLDS = 5
RIDGE = 1e-2


@dataclass(frozen=True)
class SharedSpace:
    """How two sets of vectors share a sphere; row i of one belongs to row i of the other."""

    alignment: float
    """Mean squared distance of matching unit vectors: 0 is perfect, 2 is unrelated."""
    left_uniformity: float
    """log mean exp(−2 d²) over all pairs of one set: lower is more evenly spread."""
    right_uniformity: float
    centroid_distance: float
    """Between the means of the unit vectors: the modality gap."""
    separability: float
    """Accuracy of a linear classifier that tells the sets apart, on unseen vectors; 0.5 is chance."""


def shared_space(left_ND: Tensor, right_ND: Tensor) -> SharedSpace:
    left_ND, right_ND = unit(left_ND.double()), unit(right_ND.double())
    return SharedSpace(
        alignment=alignment(left_ND, right_ND),
        left_uniformity=uniformity(left_ND),
        right_uniformity=uniformity(right_ND),
        centroid_distance=float((left_ND.mean(dim=0) - right_ND.mean(dim=0)).norm()),
        separability=separability(left_ND, right_ND),
    )


def alignment(left_ND: Tensor, right_ND: Tensor) -> float:
    """
    >>> alignment(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]))
    2.0
    """
    return float((left_ND - right_ND).square().sum(dim=-1).mean())


def uniformity(unit_ND: Tensor) -> float:
    """Two opposite vectors are as far apart as can be, d² = 4:

    >>> uniformity(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    -8.0
    """
    if len(unit_ND) < 2:
        return float("nan")
    return float(
        torch.pdist(unit_ND).square().mul(-2).logsumexp(dim=0) - _log(len(unit_ND) * (len(unit_ND) - 1) / 2)
    )


def separability(left_ND: Tensor, right_ND: Tensor) -> float:
    """Cross-validated accuracy of ridge regression on ±1; both vectors of a pair are in the same fold."""
    size = len(left_ND)
    folds = min(FOLDS, size)
    if folds < 2:
        return float("nan")
    fold_N = torch.arange(size) % folds
    correct = 0
    for fold in range(folds):
        seen = fold_N != fold
        train_MD = torch.cat([left_ND[seen], right_ND[seen]])
        label_M = torch.cat([torch.ones(int(seen.sum())), -torch.ones(int(seen.sum()))]).to(train_MD)
        centre_D = train_MD.mean(dim=0)
        centred_MD = train_MD - centre_D
        gram_DD = centred_MD.mT @ centred_MD
        floor = RIDGE * gram_DD.diagonal().mean() + torch.finfo(gram_DD.dtype).eps
        weight_D = torch.linalg.solve(
            gram_DD + floor * torch.eye(len(gram_DD)).to(gram_DD), centred_MD.mT @ label_M
        )
        correct += int(((left_ND[~seen] - centre_D) @ weight_D > 0).sum())
        correct += int(((right_ND[~seen] - centre_D) @ weight_D <= 0).sum())
    return correct / (2 * size)


def _log(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).log())
