"""How the pulls of InfoNCE on a text cancel, and what an increment of its own receives.

Shapes: T texts, V videos, D embedding, N rows; text i belongs to video i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gare.analysis.distributions import Spread
from gare.analysis.numbers import Numbers
from gare.analysis.pair_gradients import Pulls, cancellation, increment_gradients, text_pulls
from gare.analysis.pairs import PairVectors, negatives, positives
from gare.analysis.presentation import (
    BASELINE,
    BLACK,
    BLUE,
    COLUMN,
    NEGATIVE,
    POSITIVE,
    Picture,
    legend_above,
    number,
    spread,
)
from gare.analysis.probe import Claim, Probe, videos
from gare.analysis.study import Study, View

CANCELS = 0.1
"""Pulls count as cancelling when less than this share of them is left."""
PLAIN = "needs a --baseline without increments"
TEXT = {"positive": "positive pair", "negative": "negative pairs", "sum": "sum"}
DELTA = {"delta_positive": "on Δ of matching pairs", "delta_negative": "on Δ of other pairs"}


class TensionProbe(Probe):
    """How the pulls of InfoNCE on a text cancel."""

    title = "Optimisation tension"
    intro = (
        "InfoNCE pulls a text towards its own video and pushes it away from all others. Where those videos "
        "lie in nearly the same direction, the pulls cancel and little is learned; an increment of its own "
        "gives each pair somewhere to put its gradient."
    )
    needs = (videos(2),)

    def measure(self, study: Study) -> Numbers:
        """The pulls of InfoNCE on texts and on increments, dimension by dimension."""
        values: dict[str, Any] = {}
        tables: dict[str, dict[str, Tensor]] = {}
        for role, view in study.views.items():
            values[role], tables[role] = tension_of(view)
        return Numbers.of(values, tables)

    def figures(self, numbers: Numbers, study: Study) -> Sequence[Picture]:
        pictures = []
        for role, found in numbers.values.items():
            table = numbers.tables[role]
            draw = partial(_dimensions, table=table, labels=TEXT, by="positive")
            pictures.append(Picture(f"tension-text-{role}", _text_caption(found), draw, (COLUMN, 2.9)))
            if found["label"] == "GARE":
                draw = partial(_dimensions, table=table, labels=DELTA, by="delta_positive")
                pictures.append(Picture("tension-delta", _delta_caption(found), draw, (COLUMN, 2.9)))
        ratios = " ".join(
            f"{found['label']}: {number(found['cancellation']['median'])} (text→video half of the loss "
            f"alone: {number(found['cancellation_one_way']['median'])})."
            for found in numbers.values.values()
        )
        pictures.append(
            Picture(
                "tension-ratio",
                "How much of the pull on a text survives: |sum| / (|positive| + |negative|), median and the "
                f"middle 90 % of texts. 0 means the pulls cancel, 1 that they agree. {ratios}",
                partial(_ratios, values=numbers.values),
                (COLUMN, 0.55 + 0.42 * len(numbers.values)),
            )
        )
        return pictures

    def claims(self) -> Sequence[Claim]:
        return (
            Claim(
                "Without increments, the mean pulls of positive and negative pairs nearly cancel",
                f"|sum| / (|positive| + |negative|) of the means over texts below {CANCELS}",
                _mean_pulls_cancel,
                PLAIN,
            ),
            Claim(
                "Without increments, the two pulls on a single text nearly cancel",
                f"the same ratio of each text, median below {CANCELS}",
                _single_pulls_cancel,
                PLAIN,
            ),
        )


# Numbers


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


@dataclass(frozen=True)
class DimensionStatistics:
    """Mean and variance over the rows, one number a dimension."""

    mean_D: Tensor
    variance_D: Tensor

    @classmethod
    def of(cls, rows_ND: Tensor) -> DimensionStatistics:
        """Mean and variance of each column."""
        return cls(rows_ND.mean(dim=0), rows_ND.var(dim=0, correction=0))


def _columns(name: str, found: DimensionStatistics) -> dict[str, Tensor]:
    return {f"{name}_mean": found.mean_D, f"{name}_variance": found.variance_D}


def common_cancellation(pulls: Pulls) -> float:
    """The cancellation of the mean pulls: how much is left of what pulls all texts of a batch together.

    This belongs to a figure that draws the mean of each dimension. It says nothing of single texts, whose own
    parts need not cancel.

    >>> there, back = torch.tensor([[1.0, 1.0], [1.0, -1.0]]), torch.tensor([[-1.0, 0.0], [-1.0, 0.0]])
    >>> common_cancellation(Pulls(there, back))
    0.0
    """
    means = (pulls.positive_TD.mean(dim=0, keepdim=True), pulls.negative_TD.mean(dim=0, keepdim=True))
    return float(cancellation(Pulls(*means)))


def opposition(pulls: Pulls) -> Tensor:
    """Cosine between the two pulls of each text: −1 when they point against each other."""
    return F.cosine_similarity(pulls.positive_TD, pulls.negative_TD, dim=-1)


@dataclass(frozen=True)
class GradientNorms:
    """|dL/dDelta_ij|, mean over the pairs of a kind."""

    positive: float
    negative: float

    @classmethod
    def of(cls, gradient_TVD: Tensor) -> GradientNorms:
        """Mean gradient lengths on the diagonal and off it."""
        norm_TV = gradient_TVD.norm(dim=-1)
        return cls(float(positives(norm_TV).mean()), float(negatives(norm_TV).mean()))


@torch.enable_grad()
def autograd_difference(vectors: PairVectors, *, temperature: float) -> float:
    """Largest difference of closed form and autograd, on increments and on texts, relative to the largest."""
    on_text = vectors.corrected_side == "text"
    increment_TVD = vectors.increment_TVD.detach().double().requires_grad_()
    own_TVD, other_TVD = vectors.own_TVD.double(), vectors.other_TVD.double()
    doubled = PairVectors(own_TVD, other_TVD, increment_TVD.detach(), vectors.corrected_side)
    text_TD = (own_TVD if on_text else other_TVD)[:, 0].clone().requires_grad_()
    text_TVD = text_TD[:, None].expand_as(own_TVD)
    own_TVD, other_TVD = (text_TVD, other_TVD) if on_text else (own_TVD, text_TVD)
    logits_TV = F.cosine_similarity(own_TVD + increment_TVD, other_TVD, dim=-1) / temperature
    target = torch.arange(len(logits_TV))
    loss = (F.cross_entropy(logits_TV, target) + F.cross_entropy(logits_TV.mT, target)) / 2
    expected = torch.autograd.grad(loss, (increment_TVD, text_TD))
    pulls = text_pulls(doubled, temperature=temperature)
    actual = (increment_gradients(doubled, temperature=temperature), pulls.total_TD)
    differences = []
    for found, wanted in zip(actual, expected, strict=True):
        scale = wanted.abs().max()
        differences.append((found - wanted).abs().max() / scale.where(scale > 0, torch.ones_like(scale)))
    return float(torch.stack(differences).max())


# Figures


def _text_caption(found: dict[str, Any]) -> str:
    return (
        f"Gradient of InfoNCE on t_i, dimension by dimension ({found['label']}): mean and variance over "
        f"{found['batch_size'] * found['num_batches']} texts in batches of {found['batch_size']}, "
        "dimensions sorted by the pull of the positive pair. The pull of the positive pair (mean length "
        f"{number(found['positive_norm'], 4)}) and that of the negatives "
        f"({number(found['negative_norm'], 4)}) have a cosine of {spread(found['opposition'])}. What is "
        f"left has length {number(found['sum_norm'], 4)}; |sum| / (|positive| + |negative|) is "
        f"{spread(found['cancellation'])} for single texts, and {number(found['common_cancellation'])} for "
        "the mean pulls that are drawn."
    )


def _delta_caption(found: dict[str, Any]) -> str:
    return (
        "Gradient of InfoNCE on the increments themselves, mean and variance over pairs. A matching pair "
        f"receives a gradient of mean length {number(found['delta_norm_positive'], 5)}, another pair "
        f"{number(found['delta_norm_negative'], 5)}: the two no longer share one vector, so they need not "
        f"cancel. Closed form and autograd differ by at most {_power(found['autograd_difference'])} of "
        "the largest gradient."
    )


def _power(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.0e}".replace("-", "−")


def _dimensions(figure: Any, table: dict[str, list[Any]], labels: dict[str, str], by: str) -> None:
    colours = dict(zip(labels, (POSITIVE, NEGATIVE, BLACK), strict=False))
    order = sorted(range(len(table["dimension"])), key=lambda d: table[f"{by}_mean"][d])
    mean, variance = figure.subplots(2, 1, sharex=True)
    for name, label in labels.items():
        mean.plot([table[f"{name}_mean"][d] for d in order], color=colours[name], linewidth=0.8, label=label)
        variance.plot([table[f"{name}_variance"][d] for d in order], color=colours[name], linewidth=0.8)
    mean.set_ylabel("mean")
    variance.set_ylabel("variance")
    variance.set_yscale("log")
    variance.yaxis.set_minor_formatter("")
    variance.set_xlabel("dimension (sorted)")
    legend_above(mean, columns=len(labels))


def _ratios(figure: Any, values: dict[str, Any]) -> None:
    axes = figure.subplots()
    rows = list(reversed(values.items()))
    for place, (role, found) in enumerate(rows):
        ratio = found["cancellation"]
        colour = BASELINE if role == "baseline" else BLUE
        axes.plot([ratio["low"], ratio["high"]], [place, place], color=colour, linewidth=2)
        axes.plot(ratio["median"], place, "o", color=colour, markersize=5)
        axes.annotate(
            number(ratio["median"]),
            (ratio["median"], place),
            xytext=(0, 5),
            textcoords="offset points",
            ha="center",
            fontsize=7,
        )
    axes.set_yticks(range(len(rows)), [found["label"].replace(" without", "\nwithout") for _, found in rows])
    axes.set_ylim(-0.5, len(rows) - 0.4)
    axes.set_xlim(0, 1)
    axes.set_xlabel("|sum| / (|positive| + |negative|)")


# Claims


def _without_increments(values: dict[str, Any]) -> dict[str, Any] | None:
    """What is said of a model without increments is judged on one: the baseline, or else the model itself."""
    return next((found for found in values.values() if not found["with_increments"]), None)


def _mean_pulls_cancel(values: dict[str, Any]) -> tuple[bool, str] | None:
    found = _without_increments(values)
    if found is None:
        return None
    return found["common_cancellation"] < CANCELS, f"{found['label']}: {number(found['common_cancellation'])}"


def _single_pulls_cancel(values: dict[str, Any]) -> tuple[bool, str] | None:
    found = _without_increments(values)
    if found is None:
        return None
    median = found["cancellation"]["median"]
    return median < CANCELS, (
        f"{found['label']}: {number(median)}, text→video half of the loss alone "
        f"{number(found['cancellation_one_way']['median'])}; cosine of the two pulls "
        f"{number(found['opposition']['median'])}"
    )
