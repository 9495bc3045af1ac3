"""Probes of pairs at inference: gradients, geometry, trust region, bottleneck. Each returns its numbers.

Shapes: T texts, V videos, D embedding.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from gare.analysis.bottleneck import effective_dimension, gather_moments, kl_per_video, match_information
from gare.analysis.dynamics import read_probe
from gare.analysis.geometry import shared_space
from gare.analysis.gradients import (
    DimensionStatistics,
    GradientNorms,
    Pulls,
    autograd_difference,
    cancellation,
    common_cancellation,
    increment_gradients,
    opposition,
    text_pulls,
)
from gare.analysis.pairs import increments, negatives, positives
from gare.analysis.statistics import Paired, PairSpread, Spread, histograms
from gare.analysis.store import Numbers
from gare.analysis.study import Study, View
from gare.analysis.subject import Subject
from gare.analysis.trust import compare_direction
from gare.evaluate.ranks import ranks_of_targets
from gare.evaluate.significance import paired_permutation_test
from gare.scoring import dense
from gare.scoring.pooling import mean_weights, weighted_mean

MOST_VIDEOS = 1000
"""For the probe that must form every increment: a million of them."""


def measure_tension(study: Study) -> Numbers:
    """The pulls of InfoNCE on texts and on increments, dimension by dimension."""
    study.need_videos(2)
    values: dict[str, Any] = {}
    tables: dict[str, dict[str, Tensor]] = {}
    for role, view in study.views.items():
        values[role], tables[role] = tension_of(view)
    return Numbers.of(values, tables)


def tension_of(view: View) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Values, and a table with one row a dimension."""
    temperature = view.subject.temperature
    parts: dict[str, list[Tensor]] = {"positive": [], "negative": [], "sum": []}
    found: dict[str, list[Tensor]] = {"cancellation": [], "cancellation_one_way": [], "opposition": []}
    on_positive: list[Tensor] = []
    on_negative: list[Tensor] = []
    norms: list[GradientNorms] = []
    differences: list[float] = []
    for vectors in view.batches():
        pulls = text_pulls(vectors, temperature=temperature)
        parts["positive"].append(pulls.positive_TD)
        parts["negative"].append(pulls.negative_TD)
        parts["sum"].append(pulls.total_TD)
        found["cancellation"].append(cancellation(pulls))
        found["opposition"].append(opposition(pulls))
        one_way = text_pulls(vectors, temperature=temperature, direction="text_to_video")
        found["cancellation_one_way"].append(cancellation(one_way))
        gradient_TVD = increment_gradients(vectors, temperature=temperature)
        norms.append(GradientNorms.of(gradient_TVD))
        on_positive.append(gradient_TVD[range(len(gradient_TVD)), range(len(gradient_TVD))])
        # Batches are of one size, so their means and mean squares give mean and variance over all pairs.
        others = ~torch.eye(len(gradient_TVD), dtype=torch.bool)
        flat = gradient_TVD[others]
        on_negative.append(torch.stack([flat.mean(dim=0), flat.square().mean(dim=0)]))
        differences.append(autograd_difference(vectors.few(16), temperature=temperature))
    table = {"dimension": torch.arange(parts["sum"][0].shape[1])}
    for name, rows in parts.items():
        table |= _columns(name, DimensionStatistics.of(torch.cat(rows)))
    table |= _columns("delta_positive", DimensionStatistics.of(torch.cat(on_positive)))
    moments = torch.stack(on_negative).mean(dim=0)
    table |= _columns("delta_negative", DimensionStatistics(moments[0], moments[1] - moments[0].square()))
    values: dict[str, Any] = {name: Spread.of(torch.cat(rows)) for name, rows in found.items()}
    everything = Pulls(torch.cat(parts["positive"]), torch.cat(parts["negative"]))
    values["common_cancellation"] = common_cancellation(everything)
    lengths = {f"{name}_norm": float(torch.cat(rows).norm(dim=-1).mean()) for name, rows in parts.items()}
    return {
        "label": view.label,
        "with_increments": view.with_increments,
        "batch_size": len(parts["sum"][0]),
        "num_batches": len(norms),
        "temperature": temperature,
        **values,
        **lengths,
        "delta_norm_positive": sum(x.positive for x in norms) / len(norms),
        "delta_norm_negative": sum(x.negative for x in norms) / len(norms),
        "autograd_difference": float(torch.tensor(differences, dtype=torch.float64).max()),
    }, table


def _columns(name: str, found: DimensionStatistics) -> dict[str, Tensor]:
    return {f"{name}_mean": found.mean_D, f"{name}_variance": found.variance_D}


def measure_geometry(study: Study) -> Numbers:
    """Cosines, lengths, distances and angles of all pairs, and how texts and videos share the space."""
    subject, geometry = study.subject, study.subject.geometry
    values: dict[str, Any] = {
        "side": subject.model.config.interaction.corrected_side,
        "pairs": {field.name: PairSpread.of(getattr(geometry, field.name)) for field in fields(geometry)},
        "space": {"model": _space(subject, shifted=False)},
        "retrieval": {"model": _recall(study.model_view)},
    }
    columns = {"cosine": positives(study.model_view.cosine_TV), "negative cosine": negatives(geometry.cosine)}
    if study.has_increments:
        values["space"]["shifted"] = _space(subject, shifted=True)
        values["norm"] = _paired(geometry.shifted_norm, geometry.own_norm)
        values["distance"] = _paired(geometry.shifted_distance, geometry.distance)
    tables = {}
    baseline = study.baseline_view
    if baseline is not None:
        values["baseline_label"] = baseline.label
        columns["baseline cosine"] = positives(baseline.cosine_TV)
        columns["baseline negative cosine"] = negatives(baseline.cosine_TV)
        values["cosine"] = _paired(study.model_view.cosine_TV, baseline.cosine_TV)
        values["space"]["baseline"] = _space(baseline.subject, shifted=False)
        values["retrieval"] |= {
            "baseline": _recall(baseline),
            "p_value": _p_value(baseline, study.model_view),
        }
    tables["cosine"] = histograms(columns)
    for name in ("norm", "distance", "angle"):
        if study.has_increments:
            tables[name] = histograms(_histogram_columns(name, study))
    return Numbers.of(values, tables)


def _histogram_columns(name: str, study: Study) -> dict[str, Tensor]:
    geometry = study.subject.geometry
    names = {
        "norm": ("own_norm", "shifted_norm"),
        "distance": ("distance", "shifted_distance"),
        "angle": ("angle_to_gap", "angle_to_own"),
    }[name]
    found = {}
    for field in names:
        found[f"{field}/positive"] = positives(getattr(geometry, field))
        found[f"{field}/negative"] = negatives(getattr(geometry, field))
    return found


def _paired(first_TV: Tensor, second_TV: Tensor) -> dict[str, Paired]:
    return {
        "positive": Paired.of(positives(first_TV), positives(second_TV)),
        "negative": Paired.of(negatives(first_TV), negatives(second_TV)),
    }


def _space(subject: Subject, *, shifted: bool) -> object:
    """Texts against videos; shifted, the positive pair's own vector with its increment."""
    text, video, model = subject.text, subject.video, subject.model
    weights_VF = mean_weights(video.mask_VF, mask_frames=True, dtype=torch.float32)
    mean_VD = weighted_mean(video.frames_VFD.masked_fill(~video.mask_VF[..., None], 0), weights_VF)
    if not shifted:
        return shared_space(text.text_TD, mean_VD)
    own = [increments(model, text[i : i + 1], video[i : i + 1])[0, 0] for i in _indices(text.text_TD)]
    increment_ND = torch.stack(own)
    if model.config.interaction.corrected_side == "text":
        return shared_space(text.text_TD + increment_ND, mean_VD)
    interaction = model.config.interaction
    pooled = [
        dense.pool(text.text_TD[i : i + 1], video[i : i + 1], interaction)[0, 0] for i in _indices(mean_VD)
    ]
    return shared_space(text.text_TD, torch.stack(pooled) + increment_ND)


def _indices(rows: Tensor) -> range:
    return range(len(rows))


def _recall(view: View) -> dict[str, float]:
    ranks = ranks_of_targets(view.cosine_TV, torch.arange(len(view.cosine_TV)))
    return {f"recall_at_{k}": float((ranks <= k).double().mean()) for k in (1, 5, 10)}


def _p_value(first: View, second: View) -> float:
    ranks = [ranks_of_targets(view.cosine_TV, torch.arange(len(view.cosine_TV))) for view in (first, second)]
    return float(paired_permutation_test(ranks[0], ranks[1])["recall_at_1"].p_value)


def measure_trust_region(study: Study) -> Numbers:
    """Learned increments against the closed form; with a run, every recorded update against its own."""
    study.need_increments()
    study.need_videos(2)
    agreement: dict[str, list[Tensor]] = {"positive": [], "negative": []}
    losses: dict[str, list[float]] = {}
    for vectors in study.model_view.batches():
        found = compare_direction(vectors, temperature=study.subject.temperature)
        agreement["positive"].append(positives(found.agreement_TV))
        agreement["negative"].append(negatives(found.agreement_TV))
        for name in ("loss_plain", "loss_learned", "loss_uncoupled", "loss_coupled", "first_order"):
            losses.setdefault(name, []).append(getattr(found, name))
    values: dict[str, Any] = {
        "agreement": {kind: Spread.of(torch.cat(rows)) for kind, rows in agreement.items()},
        "losses": {name: sum(rows) / len(rows) for name, rows in losses.items()},
    }
    tables = {"agreement": histograms({kind: torch.cat(rows) for kind, rows in agreement.items()})}
    if study.run is not None:
        records = read_probe(study.run)
        kept = {
            name: records[name] for name in records if name == "step" or name.startswith(("step_", "loss_"))
        }
        if any(math.isfinite(error) for error in kept.get("step_error/positive", [])):
            tables["steps"] = {name: torch.tensor(column) for name, column in kept.items()}
            values["run"] = step_summary(tables["steps"])
    return Numbers.of(values, tables)


def step_summary(steps: dict[str, Tensor]) -> dict[str, Any]:
    """The recorded updates of a run in a few numbers."""
    error = steps["step_error/positive"]
    error = error[error.isfinite()]
    quarter = max(1, len(error) // 4)
    third = error[-2 * quarter : -quarter] if len(error) >= 2 * quarter else error
    # Where no pair has a closed-form step nothing moved, which is neither descent nor the lack of it.
    feasible = [steps[f"step_feasible/{kind}"].nan_to_num() for kind in ("positive", "negative")]
    moved = torch.stack(feasible).sum(dim=0) > 0
    descended = (steps["loss_analytic"] < steps["loss_before"])[moved]
    summary: dict[str, Any] = {
        "num_records": len(steps["step"]),
        "error_first_quarter": float(error[:quarter].max()),
        "error_third_quarter": float(third.mean()),
        "error_last_quarter": float(error[-quarter:].mean()),
        "error_largest": float(error.max()),
        "num_stepped": int(moved.sum()),
        "loss_descended": float(descended.double().mean()),
    }
    for name in ("error", "feasible", "descends", "learned", "analytic"):
        for kind in ("positive", "negative"):
            summary[f"{name}/{kind}"] = float(steps[f"step_{name}/{kind}"].nanmean())
    return summary


def measure_bottleneck(study: Study) -> Numbers:
    """Increments of the whole split a few videos at a time: distance to the prior, spectra, information."""
    study.need_increments()
    study.need_videos(2)
    subject, size = study.subject, min(len(study.subject.video), MOST_VIDEOS)
    generator = torch.Generator().manual_seed(0)
    offset = torch.randint(1, size, (size,), generator=generator)
    negative_of = (torch.arange(size) + offset) % size
    moments = gather_moments(
        lambda rows: increments(subject.model, subject.text[:size], subject.video[rows]), size, negative_of
    )
    kl_V = kl_per_video(moments.mean_VD, moments.std_VD)
    radius = subject.geometry.radius[:size, :size]
    bits = {
        "increment": match_information(moments.positive_TD, moments.negative_TD),
        "text_part": match_information(
            moments.positive_TD - moments.mean_VD, moments.negative_TD - moments.mean_VD[negative_of]
        ),
        "radius": match_information(
            moments.positive_TD.norm(dim=-1, keepdim=True), moments.negative_TD.norm(dim=-1, keepdim=True)
        ),
    }
    values = {
        "num_videos": size,
        "kl": Spread.of(kl_V),
        "bits": bits,
        "dimension": study.subject.text.dim,
        "effective_dimension": effective_dimension(moments.covariance_DD),
        "effective_dimension_within": effective_dimension(moments.within_DD),
        "share_within": float(moments.within_DD.diagonal().sum() / moments.covariance_DD.diagonal().sum()),
        "mean_abs": float(moments.mean_VD.abs().mean()),
        "std_mean": float(moments.std_VD.mean()),
        "radius_std_over_videos": float(radius.std(dim=1).mean()),
    }
    spectra = {
        "mu": moments.mean_VD.square().mean(dim=0).sqrt().sort(descending=True).values,
        "sigma": moments.std_VD.square().mean(dim=0).sqrt().sort(descending=True).values,
        "eigenvalue": torch.linalg.eigvalsh(moments.covariance_DD).flip(0).clamp_min(0),
        "eigenvalue_within": torch.linalg.eigvalsh(moments.within_DD).flip(0).clamp_min(0),
    }
    ids = [video.video_id for video in study.gallery.videos[:size]]
    videos: dict[str, Any] = {"video_id": ids, "kl": kl_V, "radius": radius.mean(dim=0)}
    return Numbers.of(values, {"spectra": spectra, "videos": videos})
