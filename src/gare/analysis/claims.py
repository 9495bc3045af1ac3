"""What the paper says of its models, held against the numbers of this report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gare.analysis.figures.text import number, percent
from gare.analysis.store import Numbers

CANCELS = 0.1
"""Pulls count as cancelling when less than this share of them is left."""
LEVEL = 1.1
"""An error counts as levelled off when its last quarter is at most this many times the one before."""
SURE = 0.05
"""Of a paired permutation test."""
TURN = 1.0
"""Degrees by which an angle must fall and rise to count as falling and rising."""


@dataclass(frozen=True)
class Claim:
    """One line of the table."""

    says: str
    holds: bool | None
    """None: the probe it needs was not run."""
    measured: str
    rule: str
    """When it counts as holding."""
    section: str
    """The probe behind it."""

    @property
    def verdict(self) -> str:
        return {True: "holds", False: "does not hold here", None: "not measured"}[self.holds]


Judge = Callable[[dict[str, Any]], tuple[bool, str] | None]


def judge_claims(numbers: Mapping[str, Numbers], left_out: Mapping[str, str] | None = None) -> list[Claim]:
    """Every claim, in the order of the paper; `left_out` says why a probe has no numbers."""
    claims = []
    for says, section, rule, judge, missing in CLAIMS:
        found = judge(numbers[section].values) if section in numbers else None
        holds, measured = (None, (left_out or {}).get(section, missing)) if found is None else found
        claims.append(Claim(says, holds, measured, rule, section))
    return claims


def _without_increments(values: dict[str, Any]) -> dict[str, Any] | None:
    """What is said of a model without increments is judged on one: the baseline, or else the model itself."""
    return next((found for found in values.values() if not found["with_increments"]), None)


def _common_cancellation(values: dict[str, Any]) -> tuple[bool, str] | None:
    found = _without_increments(values)
    if found is None:
        return None
    return found["common_cancellation"] < CANCELS, f"{found['label']}: {number(found['common_cancellation'])}"


def _cancellation(values: dict[str, Any]) -> tuple[bool, str] | None:
    found = _without_increments(values)
    if found is None:
        return None
    median = found["cancellation"]["median"]
    return median < CANCELS, (
        f"{found['label']}: {number(median)}, text→video half of the loss alone "
        f"{number(found['cancellation_one_way']['median'])}; cosine of the two pulls "
        f"{number(found['opposition']['median'])}"
    )


def _positive_cosine(values: dict[str, Any]) -> tuple[bool, str] | None:
    if "cosine" not in values:
        return None
    found = values["cosine"]["positive"]
    return found["difference"] < 0, (
        f"{number(found['first'])} against {number(found['second'])} ({values['baseline_label']}); lower "
        f"for {percent(1 - found['first_is_larger'], 0)} of the pairs"
    )


def _larger(name: str) -> Judge:
    def judge(values: dict[str, Any]) -> tuple[bool, str] | None:
        if name not in values:
            return None
        positive, negative = values[name]["positive"], values[name]["negative"]
        return positive["difference"] > 0, (
            f"matching pairs {number(positive['first'], 2)} against {number(positive['second'], 2)} (larger "
            f"for {percent(positive['first_is_larger'], 0)}), others {number(negative['first'], 2)} against "
            f"{number(negative['second'], 2)}{_side(values)}"
        )

    return judge


def _side(values: dict[str, Any]) -> str:
    """The claims are worded for increments on texts, as in the paper."""
    return "; Δ is on the videos here, so read v for t and t for v" if values.get("side") == "video" else ""


def _obtuse(values: dict[str, Any]) -> tuple[bool, str] | None:
    curve = values.get("angle_to_gap/positive")
    if not curve:
        return None
    others = values["angle_to_gap/negative"]
    always = " (obtuse from the first records on)" if min(curve["start"], curve["end"]) > 90 else ""
    return curve["end"] > 90, (
        f"matching pairs {number(curve['start'], 1)}° → {number(curve['end'], 1)}°{always}, others "
        f"{number(others['start'], 1)}° → {number(others['end'], 1)}°{_side(values)}"
    )


def _falls_then_rises(values: dict[str, Any]) -> tuple[bool, str] | None:
    curve = values.get("angle_to_own/positive")
    if not curve:
        return None
    falls, rises = curve["start"] - curve["lowest"], curve["end"] - curve["lowest"]
    return falls > TURN and rises > TURN, (
        f"{number(curve['start'], 1)}° → {number(curve['lowest'], 1)}° (after "
        f"{percent(curve['lowest_at'], 0)} of the run) → {number(curve['end'], 1)}°{_side(values)}"
    )


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


def _retrieval(values: dict[str, Any]) -> tuple[bool, str] | None:
    found = values["retrieval"]
    if "baseline" not in found:
        return None
    model, baseline = found["model"]["recall_at_1"], found["baseline"]["recall_at_1"]
    return model > baseline and found["p_value"] < SURE, (
        f"R@1 {percent(model)} against {percent(baseline)} ({values['baseline_label']}), paired p = "
        f"{number(found['p_value'])}"
    )


def _small_psi(values: dict[str, Any]) -> tuple[bool, str] | None:
    flops = values["flops"]["model"]
    if "psi" not in flops:
        return None
    share, psi = flops["psi"] / sum(flops.values()), values["parameters"]["model"]["increment_net"]
    rows = {row["module"]: row["gflop"] for row in values["paper"]}
    return share < 0.05, (
        f"{percent(share, 2)} of this model's FLOPs and {psi:,} parameters; of ViT-B/32 "
        f"{percent(rows['psi'] / sum(rows.values()), 2)}"
    )


RUN = "needs --run FOLDER of a 'gare train … --probe'"
PLAIN = "needs a --baseline without increments"
PSI = "needs a model with increments"
CLAIMS: list[tuple[str, str, str, Judge, str]] = [
    (
        "Without increments, the mean pulls of positive and negative pairs nearly cancel",
        "tension",
        f"|sum| / (|positive| + |negative|) of the means over texts below {CANCELS}",
        _common_cancellation,
        PLAIN,
    ),
    (
        "Without increments, the two pulls on a single text nearly cancel",
        "tension",
        f"the same ratio of each text, median below {CANCELS}",
        _cancellation,
        PLAIN,
    ),
    (
        "Cosine of matching pairs is lower than the baseline's",
        "geometry",
        "mean difference below 0",
        _positive_cosine,
        "needs --baseline, or a model with increments",
    ),
    ("|t + Δ| > |t|", "geometry", "mean difference above 0 for matching pairs", _larger("norm"), PSI),
    ("t + Δ is farther from v than t", "geometry", "the same for distances", _larger("distance"), PSI),
    (
        "Retrieval is better than the baseline's",
        "geometry",
        f"R@1 text→video is higher, p below {SURE:g}",
        _retrieval,
        "needs --baseline, or a model with increments",
    ),
    (
        "The angle between Δ and the gap becomes obtuse",
        "dynamics",
        "above 90° at the end, matching pairs",
        _obtuse,
        RUN,
    ),
    (
        "The angle between Δ and t falls, then rises",
        "dynamics",
        f"by more than {TURN:g}° each, matching pairs",
        _falls_then_rises,
        RUN,
    ),
    (
        "The step error of matching pairs levels off",
        "trust_region",
        f"mean of the last quarter of training at most {LEVEL:g} times the third quarter's",
        _levels_off,
        RUN,
    ),
    (
        "The step error of matching pairs does not grow",
        "trust_region",
        "mean of the last quarter of training at most the largest of the first",
        _does_not_grow,
        RUN,
    ),
    (
        "The coupled step descends",
        "trust_region",
        "it lowers the loss on this split, radii kept, and in most records of training",
        _descends,
        PSI,
    ),
    ("psi costs little", "efficiency", "below 5 % of the FLOPs of a batch", _small_psi, PSI),
]
"""What the paper says, the probe, the rule, the judge, and what is missing if there is no number."""
