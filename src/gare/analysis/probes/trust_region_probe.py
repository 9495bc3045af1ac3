"""The paper's trust region against what was learned. Shapes: T texts, V videos, D embedding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gare.analysis.distributions import Spread, histograms
from gare.analysis.numbers import Numbers, file_fingerprint
from gare.analysis.pair_gradients import increment_gradients, infonce
from gare.analysis.pairs import PairVectors, negatives, positives
from gare.analysis.presentation import (
    BASELINE,
    BLUE,
    COLUMN,
    GREEN,
    NEGATIVE,
    ORANGE,
    POSITIVE,
    Columns,
    Picture,
    draw_curves,
    draw_histogram,
    legend_above,
    number,
    percent,
)
from gare.analysis.probe import Claim, Probe, videos, with_increments
from gare.analysis.study import Study
from gare.analysis.training_probe import PROBE_FILE, read_records
from gare.theory.trust_region import coupled_step, uncoupled_step

BARS = {
    "loss_plain": ("no increment", BASELINE),
    "loss_learned": ("learned", BLUE),
    "loss_coupled": ("learned + coupled step", GREEN),
    "loss_uncoupled": ("closed form from 0", ORANGE),
}
LOSSES = ("loss_plain", "loss_learned", "loss_uncoupled", "loss_coupled", "first_order")
LEVEL = 1.1
"""An error counts as levelled off when its last quarter is at most this many times the one before."""


class TrustRegionProbe(Probe):
    """Learned increments and updates against the closed form of the trust region."""

    title = "Trust region"
    intro = (
        "The paper derives the increment as the step of a trust region. Here the learned increments and "
        "updates are held against that closed form."
    )
    needs = (with_increments, videos(2))

    def depends_on(self, study: Study) -> Sequence[object]:
        return () if study.run is None else (file_fingerprint(study.run, PROBE_FILE),)

    def measure(self, study: Study) -> Numbers:
        """Learned increments against the closed form; with a run, every recorded update against its own."""
        agreement: dict[str, list[Tensor]] = {"positive": [], "negative": []}
        losses: dict[str, list[float]] = {name: [] for name in LOSSES}
        for vectors in study.model_view.batches():
            found = compare_direction(vectors, temperature=study.subject.temperature)
            agreement["positive"].append(positives(found.agreement_TV))
            agreement["negative"].append(negatives(found.agreement_TV))
            for name in LOSSES:
                losses[name].append(getattr(found, name))
        values: dict[str, Any] = {
            "agreement": {kind: Spread.of(torch.cat(rows)) for kind, rows in agreement.items()},
            "losses": {name: sum(rows) / len(rows) for name, rows in losses.items()},
        }
        tables = {"agreement": histograms({kind: torch.cat(rows) for kind, rows in agreement.items()})}
        if study.run is not None and (steps := _recorded_steps(read_records(study.run))):
            tables["steps"], values["run"] = steps, step_summary(steps)
        return Numbers.of(values, tables)

    def figures(self, numbers: Numbers, study: Study) -> Sequence[Picture]:
        agreement, losses = numbers.values["agreement"], numbers.values["losses"]
        series = {"positive": ("matching pairs", POSITIVE, "-"), "negative": ("other pairs", NEGATIVE, "-")}
        pictures = [
            Picture(
                "trust-agreement",
                "Cosine between the learned increment and the steepest descent of InfoNCE at Δ = 0: "
                f"{number(agreement['positive']['mean'])} on average for matching pairs, "
                f"{number(agreement['negative']['mean'])} for others. 1 would be the step the trust region "
                "gives.",
                partial(
                    draw_histogram, table=numbers.tables["agreement"], series=series, axis="cos(Δ, −gradient)"
                ),
            ),
            Picture("trust-loss", _loss_caption(losses), partial(_losses, losses=losses), (COLUMN, 1.6)),
        ]
        if "run" in numbers.values:
            draw = partial(_steps, steps=numbers.tables["steps"])
            pictures.append(
                Picture("trust-steps", _steps_caption(numbers.values["run"]), draw, (COLUMN, 3.4))
            )
        return pictures

    def claims(self) -> Sequence[Claim]:
        run, increments = "needs --run FOLDER of a 'gare train … --probe'", "needs a model with increments"
        return (
            Claim(
                "The step error of matching pairs levels off",
                f"mean of the last quarter of training at most {LEVEL:g} times the third quarter's",
                _levels_off,
                run,
            ),
            Claim(
                "The step error of matching pairs does not grow",
                "mean of the last quarter of training at most the largest of the first",
                _does_not_grow,
                run,
            ),
            Claim(
                "The coupled step descends",
                "it lowers the loss on this split, radii kept, and in most records of training",
                _descends,
                increments,
            ),
        )


# Numbers


@dataclass(frozen=True)
class LearnedDirection:
    """Increments of a trained model against the best first-order step of the same length from zero."""

    agreement_TV: Tensor
    """Cosine of Delta_ij and −gradient at Delta = 0."""
    loss_plain: float
    loss_learned: float
    loss_uncoupled: float
    """The loss with −|Delta_ij| ĝ_ij in place of the learned increments."""
    loss_coupled: float
    """The loss after one coupled step from the learned increments, radii kept."""
    first_order: float
    """What the coupled step promises to first order: Σ −alpha_ij |g_ij|, never positive."""


def compare_direction(vectors: PairVectors, *, temperature: float) -> LearnedDirection:
    """Compare the learned increments of a trained model with the closed form."""
    increment_TVD = vectors.increment_TVD
    zero_TVD = torch.zeros_like(increment_TVD)
    plain = PairVectors(vectors.own_TVD, vectors.other_TVD, zero_TVD, vectors.corrected_side)
    at_zero_TVD = increment_gradients(plain, temperature=temperature)
    at_learned_TVD = increment_gradients(vectors, temperature=temperature)
    radius_TV = increment_TVD.norm(dim=-1)
    coupled = coupled_step(increment_TVD, at_learned_TVD, radius_TV)
    return LearnedDirection(
        agreement_TV=F.cosine_similarity(increment_TVD, -at_zero_TVD, dim=-1),
        loss_plain=infonce(vectors, zero_TVD, temperature),
        loss_learned=infonce(vectors, increment_TVD, temperature),
        loss_uncoupled=infonce(vectors, uncoupled_step(at_zero_TVD, radius_TV), temperature),
        loss_coupled=infonce(vectors, coupled.increment_TVD, temperature),
        first_order=-float((coupled.length_TV * at_learned_TVD.norm(dim=-1)).sum()),
    )


def _recorded_steps(records: dict[str, list[float]]) -> dict[str, Tensor]:
    """The columns about steps; none if no matching pair ever had a closed-form step."""
    if not any(math.isfinite(error) for error in records.get("step_error/positive", [])):
        return {}
    names = [name for name in records if name == "step" or name.startswith(("step_", "loss_"))]
    return {name: torch.tensor(records[name]) for name in names}


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


# Figures


def _loss_caption(losses: dict[str, float]) -> str:
    return (
        f"InfoNCE of batches of the split: without increments {number(losses['loss_plain'])}, with the "
        f"learned ones {number(losses['loss_learned'])}; with closed-form steps of the same lengths "
        f"from zero {number(losses['loss_uncoupled'])}, and after one coupled step from the learned "
        f"ones, lengths kept, {number(losses['loss_coupled'])}: a change of "
        f"{number(losses['loss_coupled'] - losses['loss_learned'])}, where the gradient alone promises "
        f"{number(losses['first_order'])}. The closed forms use the labels; the increment net does not."
    )


def _steps_caption(run: dict[str, Any]) -> str:
    return (
        f"Every recorded update of the training run ({run['num_records']}): the closed-form step α to the "
        "new radius, the step η really taken along the gradient, and their difference. Mean error "
        f"{number(run['error/positive'], 4)} for matching pairs, {number(run['error/negative'], 4)} for "
        f"others; a closed-form step exists for {percent(run['feasible/positive'], 0)} and "
        f"{percent(run['feasible/negative'], 0)} of them (only those count here), and taking it lowered the "
        f"loss in {percent(run['loss_descended'], 0)} of the {run['num_stepped']} records that have one."
    )


def _losses(figure: Any, losses: dict[str, float]) -> None:
    axes = figure.subplots()
    labels, colours = zip(*BARS.values(), strict=True)
    bars = axes.barh(labels, [losses[name] for name in BARS], color=colours, height=0.6)
    axes.bar_label(bars, [number(losses[name]) for name in BARS], padding=2, fontsize=7)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("InfoNCE")


def _steps(figure: Any, steps: Columns) -> None:
    lengths, errors = figure.subplots(2, 1, sharex=True)
    draw_curves(
        lengths,
        steps,
        {
            "step_analytic/positive": ("α, matching", POSITIVE, "-"),
            "step_learned/positive": ("η, matching", POSITIVE, ":"),
            "step_analytic/negative": ("α, others", NEGATIVE, "-"),
            "step_learned/negative": ("η, others", NEGATIVE, ":"),
        },
    )
    lengths.set_ylabel("step")
    lengths.set_xlabel("")
    legend_above(lengths)
    draw_curves(
        errors,
        steps,
        {
            "step_error/positive": ("matching", POSITIVE, "-"),
            "step_error/negative": ("others", NEGATIVE, "-"),
        },
    )
    errors.set_ylabel("|η − α|")


# Claims


def _levels_off(values: dict[str, Any]) -> tuple[bool, str] | None:
    run = values.get("run")
    if run is None:
        return None
    return run["error_last_quarter"] <= LEVEL * run["error_third_quarter"], (
        f"third quarter {number(run['error_third_quarter'])}, last {number(run['error_last_quarter'])}, "
        f"largest {number(run['error_largest'])}; other pairs {number(run['error/negative'])} on average"
    )


def _does_not_grow(values: dict[str, Any]) -> tuple[bool, str] | None:
    run = values.get("run")
    if run is None:
        return None
    first, last = run["error_first_quarter"], run["error_last_quarter"]
    return last <= first, f"largest of the first quarter {number(first)}, mean of the last {number(last)}"


def _descends(values: dict[str, Any]) -> tuple[bool, str] | None:
    losses, run = values["losses"], values.get("run")
    before, after = losses["loss_learned"], losses["loss_coupled"]
    measured = f"batches of the split: loss {number(before)} → {number(after)}"
    if run is None or run["loss_descended"] is None:
        return after < before, f"{measured}; no training run was given"
    return after < before and run["loss_descended"] > 0.5, (
        f"{measured}; in training lower in {percent(run['loss_descended'], 0)} of {run['num_stepped']} "
        f"records, the step positive for {percent(run['descends/positive'], 0)} of matching pairs that have "
        f"one, {percent(run['descends/negative'], 0)} of others"
    )
