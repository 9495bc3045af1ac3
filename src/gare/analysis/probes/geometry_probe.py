"""Lengths, distances and angles of all pairs of a split, and how texts and videos share the sphere.

Shapes: T texts, V videos, D embedding, N vectors of one set; text i belongs to video i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gare.analysis.distributions import Paired, PairSpread, histograms
from gare.analysis.numbers import Numbers
from gare.analysis.pairs import PairGeometry, negatives, positives, unit
from gare.analysis.presentation import (
    GREY,
    NEGATIVE,
    POSITIVE,
    Picture,
    Series,
    Table,
    draw_histogram,
    number,
    percent,
    side_note,
)
from gare.analysis.probe import Claim, Probe
from gare.analysis.study import Study, Subject, View
from gare.evaluate.rank_metrics import ranks_of_targets
from gare.evaluate.significance import paired_permutation_test

FOLDS = 5
RIDGE = 1e-2
SURE = 0.05
"""A paired permutation test below this level counts as a difference."""
HISTOGRAMS = {
    "norm": ("own_norm", "shifted_norm"),
    "distance": ("distance", "shifted_distance"),
    "angle": ("angle_to_gap", "angle_to_own"),
}


class GeometryProbe(Probe):
    """Scores, lengths, distances and angles of all pairs of a split."""

    title = "Geometry at inference"
    intro = (
        "All pairs of the split: scores, lengths, distances and angles, and how texts and videos share the "
        "sphere."
    )

    def measure(self, study: Study) -> Numbers:
        """Cosines, lengths, distances and angles of all pairs, and how texts and videos share the space."""
        subject, geometry, view = study.subject, study.subject.geometry, study.model_view
        values: dict[str, Any] = {
            "side": subject.model.interaction.corrected_side,
            "pairs": {field.name: PairSpread.of(getattr(geometry, field.name)) for field in fields(geometry)},
            "space": {"model": _space(subject)},
            "retrieval": {"model": _recall(view)},
        }
        columns = {"cosine": positives(view.cosine_TV), "negative cosine": negatives(geometry.cosine)}
        if study.has_increments:
            values["space"]["shifted"] = shared_space(*_shifted_matches(subject))
            values["norm"] = _paired(geometry.shifted_norm, geometry.own_norm)
            values["distance"] = _paired(geometry.shifted_distance, geometry.distance)
        if (baseline := study.baseline_view) is not None:
            values["baseline_label"] = baseline.label
            columns["baseline cosine"] = positives(baseline.cosine_TV)
            columns["baseline negative cosine"] = negatives(baseline.cosine_TV)
            values["cosine"] = _paired(view.cosine_TV, baseline.cosine_TV)
            values["space"]["baseline"] = _space(baseline.subject)
            values["retrieval"] |= {"baseline": _recall(baseline), "p_value": _p_value(baseline, view)}
        tables = {"cosine": histograms(columns)}
        if study.has_increments:
            tables |= {name: histograms(_columns(geometry, pair)) for name, pair in HISTOGRAMS.items()}
        return Numbers.of(values, tables)

    def figures(self, numbers: Numbers, study: Study) -> Sequence[Picture]:
        values = numbers.values
        series: Series = {
            "cosine": ("matching, this model", POSITIVE, "-"),
            "negative cosine": ("others, this model", NEGATIVE, "-"),
            "baseline cosine": ("matching, compared", POSITIVE, ":"),
            "baseline negative cosine": ("others, compared", NEGATIVE, ":"),
        }
        draw = partial(draw_histogram, table=numbers.tables["cosine"], series=series, axis="score")
        pictures = [Picture("geometry-cosine", _cosine_caption(values, values.get("baseline_label")), draw)]
        if "norm" in values:
            own = "t" if values["side"] == "text" else "v"
            after = "|t + Δ − v|" if own == "t" else "|t − v − Δ|"
            pictures += [
                _before_and_after(numbers, "norm", f"|{own}|", f"|{own} + Δ|"),
                _before_and_after(numbers, "distance", "|t − v|", after),
                _angles(numbers, own),
            ]
        return pictures

    def tables(self, numbers: Numbers) -> Sequence[Table]:
        return (_space_table(numbers.values), _recall_table(numbers.values))

    def claims(self) -> Sequence[Claim]:
        compared, increments = "needs --baseline, or a model with increments", "needs a model with increments"
        return (
            Claim(
                "Cosine of matching pairs is lower than the baseline's",
                "mean difference below 0",
                _positive_cosine,
                compared,
            ),
            Claim(
                "|t + Δ| > |t|",
                "mean difference above 0 for matching pairs",
                partial(_larger, "norm"),
                increments,
            ),
            Claim(
                "t + Δ is farther from v than t",
                "the same for distances",
                partial(_larger, "distance"),
                increments,
            ),
            Claim(
                "Retrieval is better than the baseline's",
                f"R@1 text→video is higher, p below {SURE:g}",
                _retrieval,
                compared,
            ),
        )


# Numbers


def _columns(geometry: PairGeometry, names: Sequence[str]) -> dict[str, Tensor]:
    found = {}
    for name in names:
        found[f"{name}/positive"] = positives(getattr(geometry, name))
        found[f"{name}/negative"] = negatives(getattr(geometry, name))
    return found


def _paired(first_TV: Tensor, second_TV: Tensor) -> dict[str, Paired]:
    return {
        "positive": Paired.of(positives(first_TV), positives(second_TV)),
        "negative": Paired.of(negatives(first_TV), negatives(second_TV)),
    }


def _recall(view: View) -> dict[str, float]:
    ranks = ranks_of_targets(view.cosine_TV, torch.arange(len(view.cosine_TV)))
    return {f"recall_at_{k}": float((ranks <= k).double().mean()) for k in (1, 5, 10)}


def _p_value(first: View, second: View) -> float:
    ranks = [ranks_of_targets(view.cosine_TV, torch.arange(len(view.cosine_TV))) for view in (first, second)]
    return float(paired_permutation_test(ranks[0], ranks[1])["recall_at_1"].p_value)


@dataclass(frozen=True)
class SharedSpace:
    """How two sets of vectors share a sphere; row i of one belongs to row i of the other."""

    alignment: float
    """Mean squared distance of matching unit vectors: 0 is perfect, 2 is unrelated."""
    left_uniformity: float
    """log mean exp(−2 d²) over all pairs of one set: lower is more evenly spread."""
    right_uniformity: float
    centroid_distance: float
    """The distance between the means of the unit vectors: the modality gap."""
    separability: float
    """Accuracy of a linear classifier that tells the sets apart, on unseen vectors; 0.5 is chance."""


def _shifted_matches(subject: Subject) -> tuple[Tensor, Tensor]:
    """Texts and videos of matching pairs with the increment added to its side, [N, D] each.

    Videos are mean frame vectors, or the pooled vectors the increment is added to.
    """
    interaction, text, video = subject.model.interaction, subject.text, subject.video
    pairs = [interaction.pair_vectors(text[i : i + 1], video[i : i + 1]) for i in range(len(text))]
    shifted_ND = torch.stack([(pair.own_TVD + pair.increment_TVD)[0, 0] for pair in pairs])
    if interaction.corrected_side == "text":
        return shifted_ND, video.mean()
    return text.text_TD, shifted_ND


def _space(subject: Subject) -> SharedSpace:
    return shared_space(subject.text.text_TD, subject.video_mean_VD)


def shared_space(left_ND: Tensor, right_ND: Tensor) -> SharedSpace:
    """Measure how two sets of vectors share the unit sphere."""
    left_ND, right_ND = unit(left_ND.double()), unit(right_ND.double())
    return SharedSpace(
        alignment=alignment(left_ND, right_ND),
        left_uniformity=uniformity(left_ND),
        right_uniformity=uniformity(right_ND),
        centroid_distance=float((left_ND.mean(dim=0) - right_ND.mean(dim=0)).norm()),
        separability=separability(left_ND, right_ND),
    )


def alignment(left_ND: Tensor, right_ND: Tensor) -> float:
    """The mean squared distance of matching unit vectors.

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


# Figures


def _cosine_caption(values: dict[str, Any], label: str | None) -> str:
    pairs = values["pairs"]["cosine"]
    if "cosine" not in values:
        return (
            f"Cosine of matching pairs {number(pairs['positive']['mean'])} on average, of other pairs "
            f"{number(pairs['negative']['mean'])}."
        )
    positive, negative = values["cosine"]["positive"], values["cosine"]["negative"]
    return (
        f"Cosine of matching pairs: {number(positive['first'])} here, {number(positive['second'])} for the "
        f"{label} (dotted); higher here for {percent(positive['first_is_larger'], 0)} of the pairs. Other "
        f"pairs: {number(negative['first'])} and {number(negative['second'])}."
    )


def _before_and_after(numbers: Numbers, name: str, before: str, after: str) -> Picture:
    plain, shifted = HISTOGRAMS[name]
    positive, negative = numbers.values[name]["positive"], numbers.values[name]["negative"]
    series: Series = {
        f"{plain}/positive": (f"{before}, matching", POSITIVE, ":"),
        f"{plain}/negative": (f"{before}, others", NEGATIVE, ":"),
        f"{shifted}/positive": (f"{after}, matching", POSITIVE, "-"),
        f"{shifted}/negative": (f"{after}, others", NEGATIVE, "-"),
    }
    axis = "length" if name == "norm" else "distance"
    return Picture(
        f"geometry-{name}",
        f"{before} and {after}: matching pairs {number(positive['second'], 2)} and "
        f"{number(positive['first'], 2)} on average (larger with Δ for "
        f"{percent(positive['first_is_larger'], 0)}), other pairs {number(negative['second'], 2)} and "
        f"{number(negative['first'], 2)} ({percent(negative['first_is_larger'], 0)}).",
        partial(draw_histogram, table=numbers.tables[name], series=series, axis=axis),
    )


def _angles(numbers: Numbers, own: str) -> Picture:
    gap, to_own = numbers.values["pairs"]["angle_to_gap"], numbers.values["pairs"]["angle_to_own"]
    series: Series = {
        "angle_to_gap/positive": ("to the gap, matching", POSITIVE, "-"),
        "angle_to_gap/negative": ("to the gap, others", NEGATIVE, "-"),
        "angle_to_own/positive": (f"to {own}, matching", POSITIVE, ":"),
        "angle_to_own/negative": (f"to {own}, others", NEGATIVE, ":"),
    }

    def draw(figure: Any) -> None:
        draw_histogram(figure, numbers.tables["angle"], series, "angle of Δ (degrees)")
        figure.axes[0].axvline(90, color=GREY, linewidth=0.8)

    return Picture(
        "geometry-angle",
        f"Angle between Δ and the gap: {number(gap['positive']['mean'], 1)}° for matching pairs, "
        f"{number(gap['negative']['mean'], 1)}° for others; above 90° (line) the increment leads away from "
        f"the {'video' if own == 't' else 'text'}. Angle between Δ and {own}: "
        f"{number(to_own['positive']['mean'], 1)}° and {number(to_own['negative']['mean'], 1)}°.",
        draw,
    )


# Tables


def _space_table(values: dict[str, Any]) -> Table:
    names = {
        "baseline": values.get("baseline_label", "baseline"),
        "model": "this model, t and v",
        "shifted": "this model, with Δ",
    }
    rows = [
        [
            label,
            number(space["alignment"]),
            number(space["left_uniformity"]),
            number(space["right_uniformity"]),
            number(space["centroid_distance"]),
            percent(space["separability"]),
        ]
        for key, label in names.items()
        if (space := values["space"].get(key)) is not None
    ]
    return Table(
        "How texts and videos share the unit sphere",
        ["", "alignment", "uniformity, texts", "uniformity, videos", "centroid distance", "told apart"],
        rows,
        note="Alignment: mean squared distance of matching unit vectors, 0 is perfect. Uniformity is log "
        "mean exp(−2d²), lower is more evenly spread. Centroid distance is the modality gap; “told apart” "
        "is the accuracy of a linear classifier on unseen vectors, 50 % is chance. Videos are mean frame "
        "vectors; Δ is that of the matching pair.",
    )


def _recall_table(values: dict[str, Any]) -> Table:
    names = {"baseline": values.get("baseline_label", "baseline"), "model": "this model"}
    rows = [
        [label, *(percent(values["retrieval"][role][f"recall_at_{k}"]) for k in (1, 5, 10))]
        for role, label in names.items()
        if role in values["retrieval"]
    ]
    return Table("Retrieval, text→video, first captions", ["", "R@1", "R@5", "R@10"], rows)


# Claims


def _positive_cosine(values: dict[str, Any]) -> tuple[bool, str] | None:
    if "cosine" not in values:
        return None
    found = values["cosine"]["positive"]
    return found["difference"] < 0, (
        f"{number(found['first'])} against {number(found['second'])} ({values['baseline_label']}); lower "
        f"for {percent(1 - found['first_is_larger'], 0)} of the pairs"
    )


def _larger(name: str, values: dict[str, Any]) -> tuple[bool, str] | None:
    if name not in values:
        return None
    positive, negative = values[name]["positive"], values[name]["negative"]
    return positive["difference"] > 0, (
        f"matching pairs {number(positive['first'], 2)} against {number(positive['second'], 2)} (larger "
        f"for {percent(positive['first_is_larger'], 0)}), others {number(negative['first'], 2)} against "
        f"{number(negative['second'], 2)}{side_note(values)}"
    )


def _retrieval(values: dict[str, Any]) -> tuple[bool, str] | None:
    found = values["retrieval"]
    if "baseline" not in found:
        return None
    model, baseline = found["model"]["recall_at_1"], found["baseline"]["recall_at_1"]
    return model > baseline and found["p_value"] < SURE, (
        f"R@1 {percent(model)} against {percent(baseline)} ({values['baseline_label']}), paired p = "
        f"{number(found['p_value'])}"
    )
