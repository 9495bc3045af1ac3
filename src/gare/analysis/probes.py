"""The parts of a report: what each measures and how it is drawn. A probe is added here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gare.analysis import measure_pairs, measure_rest
from gare.analysis.figures import bottleneck, geometry, ranking, tension, training, trust
from gare.analysis.store import Numbers, fingerprint
from gare.analysis.study import Study
from gare.analysis.style import Picture
from gare.errors import EvaluationError

VERSION = 2
"""Raise it when the numbers of a probe change their meaning: stored ones are then measured again."""


@dataclass(frozen=True)
class Probe:
    """One section of the report."""

    name: str
    title: str
    intro: str
    measure: Callable[[Study], Numbers]
    draw: Callable[[Numbers, Path], list[Picture]]


def _plain(draw: Callable[[Numbers], list[Picture]]) -> Callable[[Numbers, Path], list[Picture]]:
    return lambda numbers, _: draw(numbers)


_ALL = (
    Probe(
        "tension",
        "Optimisation tension",
        "InfoNCE pulls a text towards its own video and pushes it away from all others. Where those videos "
        "lie in nearly the same direction, the pulls cancel and little is learned; an increment of its own "
        "gives each pair somewhere to put its gradient.",
        measure_pairs.measure_tension,
        _plain(tension.draw_tension),
    ),
    Probe(
        "geometry",
        "Geometry at inference",
        "All pairs of the split: scores, lengths, distances and angles, and how texts and videos share the "
        "sphere.",
        measure_pairs.measure_geometry,
        _plain(geometry.draw_geometry),
    ),
    Probe(
        "dynamics",
        "Dynamics during training",
        "What `gare train --probe` wrote down: batches seen without dropout, before each recorded update. "
        "Faint lines are single batches, strong ones their running mean.",
        measure_rest.measure_dynamics,
        _plain(training.draw_dynamics),
    ),
    Probe(
        "trust_region",
        "Trust region",
        "The paper derives the increment as the step of a trust region. Here the learned increments and "
        "updates are held against that closed form.",
        measure_pairs.measure_trust_region,
        _plain(trust.draw_trust_region),
    ),
    Probe(
        "hard_negatives",
        "Hard and false negatives",
        "Videos that are close to a text without belonging to it: what the increment does to them, and "
        "which of them probably do belong.",
        measure_rest.measure_hard_negatives,
        ranking.draw_hard_negatives,
    ),
    Probe(
        "coverage",
        "Coverage of a first stage",
        "Large galleries are searched in two stages. This is what a first stage that knows nothing of "
        "increments would lose.",
        measure_rest.measure_coverage,
        _plain(ranking.draw_coverage),
    ),
    Probe(
        "efficiency",
        "Efficiency",
        "Parameters and operations by module, and time and memory beside the baseline, measured in turns on "
        "the same machine.",
        measure_rest.measure_efficiency,
        _plain(ranking.draw_efficiency),
    ),
    Probe(
        "ablations",
        "Ablations",
        "Tables of `gare ablate`.",
        measure_rest.measure_ablations,
        _plain(training.draw_ablations),
    ),
    Probe(
        "bottleneck",
        "Information bottleneck",
        "The objective keeps the increments of a video close to a Gaussian. This is how close, in how many "
        "directions, and what they still tell.",
        measure_pairs.measure_bottleneck,
        _plain(bottleneck.draw_bottleneck),
    ),
)
PROBES = {probe.name: probe for probe in _ALL}


def choose_probes(names: str) -> list[Probe]:
    """The probes of a comma-separated list, in the order of the report; all of them if it is empty.

    >>> [probe.name for probe in choose_probes("coverage, tension")]
    ['tension', 'coverage']
    """
    wanted = [name.strip().replace("-", "_") for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in PROBES:
            raise EvaluationError(f"there is no probe '{name}'; choose from {', '.join(PROBES)}")
    return [probe for probe in PROBES.values() if not wanted or probe.name in wanted]


def probe_fingerprint(probe: Probe, study: Study) -> str:
    """Of everything the numbers of a probe depend on."""
    parts: list[object] = [VERSION, probe.name, study.subject.fingerprint]
    parts.append(None if study.baseline is None else study.baseline.fingerprint)
    if probe.name in ("dynamics", "trust_region") and study.run is not None:
        parts.append(_digest(study.run, "probe.jsonl"))
    if probe.name == "ablations":
        parts += [_digest(folder, "table.json") for folder in study.ablations]
    if probe.name == "efficiency":
        parts.append(study.device)
    return fingerprint(*parts)


def _digest(folder: Path, name: str) -> str:
    path = folder / name if folder.is_dir() else folder
    return fingerprint(path.read_bytes()) if path.is_file() else str(path)
