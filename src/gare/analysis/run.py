"""One call from a model to a report: encode, measure, draw. What is there already is not done again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gare.analysis.claims import Claim, judge_claims
from gare.analysis.probes import PROBES, Probe, probe_fingerprint
from gare.analysis.store import Numbers, NumberStore
from gare.analysis.study import NotMeasured, Study
from gare.analysis.style import Picture, save_picture
from gare.analysis.subject import Gallery, Progress, encode_subject
from gare.model import GARE

Say = Callable[[str], None]


@dataclass(frozen=True)
class Section:
    """A probe with what it found, or why it found nothing."""

    probe: Probe
    numbers: Numbers | None
    reason: str = ""
    pictures: list[Picture] = field(default_factory=list)


@dataclass(frozen=True)
class Analysis:
    """Everything the report shows."""

    study: Study
    sections: list[Section]
    claims: list[Claim]
    folder: Path
    seconds: float

    @property
    def numbers(self) -> dict[str, Numbers]:
        return {part.probe.name: part.numbers for part in self.sections if part.numbers is not None}


def open_study(
    model: GARE,
    gallery: Gallery,
    folder: Path,
    *,
    baseline: GARE | None = None,
    run: Path | None = None,
    ablations: Sequence[Path] = (),
    num_workers: int = 0,
    on_progress: Progress | None = None,
) -> Study:
    """Encode the gallery with the model and the baseline, or read what an earlier call kept in the folder."""
    device, cache = model.device, folder / "cache"
    subject = encode_subject("model", model, gallery, cache, num_workers=num_workers, on_progress=on_progress)
    other = None
    if baseline is not None:
        other = encode_subject(
            "baseline", baseline, gallery, cache, num_workers=num_workers, on_progress=on_progress
        )
    return Study(gallery, subject, other, run, tuple(ablations), folder / "thumbnails", device)


def analyse(
    study: Study, probes: Sequence[Probe], folder: Path, *, force: bool = False, say: Say = print
) -> Analysis:
    """Run the probes that have no numbers for this model and data yet; draw all of them."""
    start = time.perf_counter()
    store = NumberStore(folder / "numbers")
    sections = []
    for probe in probes:
        numbers, reason = _measure(probe, study, store, force=force, say=say)
        pictures = [] if numbers is None else probe.draw(numbers, study.thumbnails)
        for picture in pictures:
            save_picture(picture, folder / "figures")
        sections.append(Section(probe, numbers, reason, pictures))
    known = {part.probe.name: part.numbers for part in sections if part.numbers is not None}
    left_out = {name: "left out by --only" for name in PROBES}
    left_out |= {part.probe.name: part.reason for part in sections}
    left_out = {name: reason for name, reason in left_out.items() if reason}
    return Analysis(study, sections, judge_claims(known, left_out), folder, time.perf_counter() - start)


def _measure(
    probe: Probe, study: Study, store: NumberStore, *, force: bool, say: Say
) -> tuple[Numbers | None, str]:
    mark = probe_fingerprint(probe, study)
    if not force and (stored := store.load(probe.name, mark)) is not None:
        say(f"{probe.name}: kept from before")
        return stored, ""
    began = time.perf_counter()
    try:
        with torch.no_grad():
            numbers = probe.measure(study)
    except NotMeasured as why:
        say(f"{probe.name}: left out. {why}")
        return None, str(why)
    finally:
        study.subject.model.cpu()  # a probe may have timed it elsewhere
        if study.baseline is not None:
            study.baseline.model.cpu()
    seconds = time.perf_counter() - began
    store.save(probe.name, mark, numbers, seconds)
    say(f"{probe.name}: {seconds:.1f} s")
    return numbers, ""
