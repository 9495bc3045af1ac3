"""Pictures of the trust region."""

from __future__ import annotations

from functools import partial
from typing import Any

from gare.analysis.figures.histogram import Columns, draw_curves, draw_histogram, legend_above
from gare.analysis.figures.text import number, percent
from gare.analysis.store import Numbers
from gare.analysis.style import BASELINE, BLUE, COLUMN, GREEN, NEGATIVE, ORANGE, POSITIVE, Picture

BARS = {
    "loss_plain": ("no increment", BASELINE),
    "loss_learned": ("learned", BLUE),
    "loss_coupled": ("learned + coupled step", GREEN),
    "loss_uncoupled": ("closed form from 0", ORANGE),
}


def draw_trust_region(numbers: Numbers) -> list[Picture]:
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
        Picture(
            "trust-loss",
            f"InfoNCE of batches of the split: without increments {number(losses['loss_plain'])}, with the "
            f"learned ones {number(losses['loss_learned'])}; with closed-form steps of the same lengths "
            f"from zero {number(losses['loss_uncoupled'])}, and after one coupled step from the learned "
            f"ones, lengths kept, {number(losses['loss_coupled'])}: a change of "
            f"{number(losses['loss_coupled'] - losses['loss_learned'])}, where the gradient alone promises "
            f"{number(losses['first_order'])}. The closed forms look at the labels; psi does not.",
            partial(_losses, losses=losses),
            (COLUMN, 1.6),
        ),
    ]
    if "run" in numbers.values:
        draw = partial(_steps, steps=numbers.tables["steps"])
        pictures.append(Picture("trust-steps", _steps_caption(numbers.values["run"]), draw, (COLUMN, 3.4)))
    return pictures


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
