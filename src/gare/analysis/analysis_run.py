"""From a study to what a report shows: measure, draw, judge. What is there already is not done again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gare.analysis.numbers import Numbers, NumberStore
from gare.analysis.presentation import Picture, Table, save_picture
from gare.analysis.probe import NotMeasured, Probe, probe_fingerprint
from gare.analysis.study import Study
from gare.registry import Registry

Say = Callable[[str], None]


@dataclass(frozen=True)
class Section:
    """A probe with what it found, or why it found nothing."""

    name: str
    probe: Probe
    numbers: Numbers | None
    reason: str = ""
    pictures: Sequence[Picture] = field(default_factory=list)
    tables: Sequence[Table] = field(default_factory=list)


@dataclass(frozen=True)
class JudgedClaim:
    """One line of the table of claims."""

    says: str
    holds: bool | None
    """Whether the claim holds; None if its probe was not run."""
    measured: str
    rule: str
    """When it counts as holding."""
    section: str
    """The probe behind it."""

    @property
    def verdict(self) -> str:
        """The judgement in words."""
        return {True: "holds", False: "does not hold here", None: "not measured"}[self.holds]


@dataclass(frozen=True)
class Analysis:
    """Everything the report shows."""

    study: Study
    sections: list[Section]
    claims: list[JudgedClaim]
    folder: Path
    seconds: float

    @property
    def numbers(self) -> dict[str, Numbers]:
        """The numbers of every probe that was measured, by its name."""
        return {part.name: part.numbers for part in self.sections if part.numbers is not None}


def analyse(
    study: Study,
    probes: Registry[type[Probe]],
    folder: Path,
    *,
    only: Sequence[str] = (),
    force: bool = False,
    say: Say = print,
) -> Analysis:
    """Run the probes that have no numbers for this model and data yet; draw and judge all of them.

    Args:
        probes: `gare.analysis.probes.PROBES`.
        folder: gets numbers/ and figures/.
        only: names of probes; all of them if it is empty. Sections come in the order of the registry.
        force: measure again what the folder holds.
        say: called with a line for each probe.
    """
    start = time.perf_counter()
    store = NumberStore(folder / "numbers")
    known = {name: probes[name]() for name in probes}
    sections = []
    for name in chosen(probes, only):
        probe = known[name]
        numbers, reason = _measure(name, probe, study, store, force=force, say=say)
        if numbers is None:
            sections.append(Section(name, probe, None, reason))
            continue
        pictures = probe.figures(numbers, study)
        for picture in pictures:
            save_picture(picture, folder / "figures")
        sections.append(Section(name, probe, numbers, "", pictures, probe.tables(numbers)))
    found = {part.name: part.numbers for part in sections if part.numbers is not None}
    reasons = {name: "left out by --only" for name in known}
    reasons |= {part.name: part.reason for part in sections}
    return Analysis(study, sections, judge_claims(known, found, reasons), folder, time.perf_counter() - start)


def chosen(probes: Registry[type[Probe]], only: Sequence[str]) -> list[str]:
    """The names asked for, in the order of the registry; all of them if none is."""
    for name in only:
        probes[name]  # a miss raises and lists what there is
    return [name for name in probes if not only or name in only]


def judge_claims(
    probes: Mapping[str, Probe], numbers: Mapping[str, Numbers], reasons: Mapping[str, str] | None = None
) -> list[JudgedClaim]:
    """Every claim of every probe; `reasons` say why a probe has no numbers."""
    judged = []
    for name, probe in probes.items():
        for claim in probe.claims():
            found = claim.judge(numbers[name].values) if name in numbers else None
            missing = (reasons or {}).get(name) or claim.needs
            holds, measured = (None, missing) if found is None else found
            judged.append(JudgedClaim(claim.says, holds, measured, claim.rule, name))
    return judged


def _measure(
    name: str, probe: Probe, study: Study, store: NumberStore, *, force: bool, say: Say
) -> tuple[Numbers | None, str]:
    mark = probe_fingerprint(name, probe, study)
    if not force and (stored := store.load(name, mark)) is not None:
        say(f"{name}: kept from before")
        return stored, ""
    began = time.perf_counter()
    try:
        for need in probe.needs:
            need(study)
        with torch.no_grad():
            numbers = probe.measure(study)
    except NotMeasured as why:
        say(f"{name}: left out. {why}")
        return None, str(why)
    finally:
        study.subject.model.cpu()  # a probe may have timed it elsewhere
        if study.baseline is not None:
            study.baseline.model.cpu()
    seconds = time.perf_counter() - began
    store.save(name, mark, numbers, seconds)
    say(f"{name}: {seconds:.1f} s")
    return numbers, ""
