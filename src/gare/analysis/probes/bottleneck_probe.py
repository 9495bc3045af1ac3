"""The information-bottleneck side of the increments.

How far they are from their prior, how many directions they use, and how much they tell about whether a pair
matches. Shapes: T texts, V videos, D embedding; N samples of K features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gare.analysis.distributions import Spread
from gare.analysis.numbers import Numbers
from gare.analysis.presentation import (
    BLACK,
    BLUE,
    COLUMN,
    GREEN,
    ORANGE,
    Columns,
    Picture,
    legend_above,
    number,
    percent,
)
from gare.analysis.probe import Probe, videos, with_increments
from gare.analysis.study import Study
from gare.objective.bottleneck_term import STD_FLOOR
from gare.types import block_slices

FOLDS = 5
MOST_VIDEOS = 1000
"""Every increment must be formed: a million of them."""
FLOOR = 1e-12
"""The smallest value that is drawn on a logarithmic axis."""


class BottleneckProbe(Probe):
    """How close increments are to their prior, and what they tell about a match."""

    title = "Information bottleneck"
    intro = (
        "The objective keeps the increments of a video close to a Gaussian. This is how close, in how many "
        "directions, and what they still tell."
    )
    needs = (with_increments, videos(2))

    def measure(self, study: Study) -> Numbers:
        """Increments a few videos at a time: distance to the prior, spectra, information."""
        subject, size = study.subject, min(len(study.subject.video), MOST_VIDEOS)
        generator = torch.Generator().manual_seed(0)
        offset = torch.randint(1, size, (size,), generator=generator)
        negative_of = (torch.arange(size) + offset) % size
        moments = gather_moments(
            lambda rows: (
                subject.model.interaction.pair_vectors(subject.text[:size], subject.video[rows]).increment_TVD
            ),
            size,
            negative_of,
        )
        kl_V = kl_per_video(moments.mean_VD, moments.std_VD)
        radius = subject.geometry.radius[:size, :size]
        values = {
            "num_videos": size,
            "kl": Spread.of(kl_V),
            "bits": _bits(moments, negative_of),
            "dimension": study.subject.text.dim,
            "effective_dimension": effective_dimension(moments.covariance_DD),
            "effective_dimension_within": effective_dimension(moments.within_DD),
            "share_within": float(
                moments.within_DD.diagonal().sum() / moments.covariance_DD.diagonal().sum()
            ),
            "mean_abs": float(moments.mean_VD.abs().mean()),
            "std_mean": float(moments.std_VD.mean()),
            "radius_std_over_videos": float(radius.std(dim=1).mean()),
        }
        ids = [video.video_id for video in study.gallery.videos[:size]]
        per_video: dict[str, Any] = {"video_id": ids, "kl": kl_V, "radius": radius.mean(dim=0)}
        return Numbers.of(values, {"spectra": _spectra(moments), "videos": per_video})

    def figures(self, numbers: Numbers, study: Study) -> Sequence[Picture]:
        draw_spectra = partial(_draw_spectra, spectra=numbers.tables["spectra"])
        draw_kl = partial(_draw_kl, videos=numbers.tables["videos"])
        return [
            Picture("bottleneck-spectra", _spectra_caption(numbers.values), draw_spectra, (COLUMN, 2.0)),
            Picture("bottleneck-kl", _kl_caption(numbers.values), draw_kl),
        ]


# Numbers


@dataclass(frozen=True)
class IncrementMoments:
    """Statistics of all increments of a split, gathered a few videos at a time."""

    mean_VD: Tensor
    """mu_j: over the texts."""
    std_VD: Tensor
    """sigma_j: over the texts, unbiased."""
    covariance_DD: Tensor
    """Covariance of all increments around their common mean."""
    within_DD: Tensor
    """Covariance of the increments around the mean of their video: what depends on the text."""
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


def _spectra(moments: IncrementMoments) -> dict[str, Tensor]:
    """What the increments use of each dimension, largest first."""
    return {
        "mu": moments.mean_VD.square().mean(dim=0).sqrt().sort(descending=True).values,
        "sigma": moments.std_VD.square().mean(dim=0).sqrt().sort(descending=True).values,
        "eigenvalue": torch.linalg.eigvalsh(moments.covariance_DD).flip(0).clamp_min(0),
        "eigenvalue_within": torch.linalg.eigvalsh(moments.within_DD).flip(0).clamp_min(0),
    }


def _bits(moments: IncrementMoments, negative_of: Tensor) -> dict[str, float]:
    """What the increment, the part that depends on the text, and the length alone tell about a match."""
    positive_TD, negative_TD = moments.positive_TD, moments.negative_TD
    return {
        "increment": match_information(positive_TD, negative_TD),
        "text_part": match_information(
            positive_TD - moments.mean_VD, negative_TD - moments.mean_VD[negative_of]
        ),
        "radius": match_information(
            positive_TD.norm(dim=-1, keepdim=True), negative_TD.norm(dim=-1, keepdim=True)
        ),
    }


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


# Figures


def _spectra_caption(values: dict[str, Any]) -> str:
    bits = values["bits"]
    return (
        "Left: μ and σ of the increments of a video over the texts, dimensions sorted (root mean square "
        "over videos). Right: eigenvalues of their covariance. The increments use "
        f"{number(values['effective_dimension'], 1)} of {values['dimension']} dimensions (participation "
        f"ratio), and {number(values['effective_dimension_within'], 1)} where only the text changes; "
        f"the text accounts for {percent(values['share_within'])} of their variance. Δ tells at least "
        f"{number(bits['increment'])} bits about whether a pair matches (1 bit is everything), the part "
        f"Δ − μ that the text decides {number(bits['text_part'])}, the length of Δ alone "
        f"{number(bits['radius'])}."
    )


def _kl_caption(values: dict[str, Any]) -> str:
    kl = values["kl"]
    return (
        "KL divergence of each video's increments from the prior N(0, 1), nats a dimension: mean "
        f"{number(kl['mean'])}, 90 % of the videos within {number(kl['low'])} to {number(kl['high'])}. "
        f"On average |μ| is {number(values['mean_abs'])} and σ is {number(values['std_mean'])}."
    )


def _draw_spectra(figure: Any, spectra: Columns) -> None:
    left, right = figure.subplots(1, 2)
    ranks = range(1, len(spectra["mu"]) + 1)
    for name, label, colour in (("mu", "μ", BLUE), ("sigma", "σ", ORANGE)):
        left.plot(ranks, [max(x, FLOOR) for x in spectra[name]], color=colour, label=label)
    left.set_ylabel("root mean square")
    total = sum(spectra["eigenvalue"]) or 1.0
    series = (("eigenvalue", "all", BLACK, "-"), ("eigenvalue_within", "of the text", GREEN, "--"))
    for name, label, colour, line in series:
        right.plot(ranks, [max(x / total, FLOOR) for x in spectra[name]], line, color=colour, label=label)
    right.set_ylabel("share of variance")
    right.set_ylim(bottom=1e-8)
    for axes in (left, right):
        axes.set_yscale("log")
        axes.set_xscale("log")
        axes.set_xlabel("rank")
        legend_above(axes)


def _draw_kl(figure: Any, videos: Columns) -> None:
    axes = figure.subplots()
    axes.scatter(videos["radius"], videos["kl"], s=6, color=BLUE, alpha=0.5, linewidths=0)
    axes.set_xlabel("mean length of Δ of the video")
    axes.set_ylabel("KL (nats a dimension)")
