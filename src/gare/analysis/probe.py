"""What a probe is: one section of the report, with its numbers, pictures, tables and claims.

A probe is a class in one file. `gare.analysis.probes.PROBES` lists them; the name it has there is that of
`--only`, of its files and of its section.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gare.analysis.numbers import Numbers, fingerprint
from gare.analysis.presentation import Picture, Table
from gare.analysis.study import Study


class NotMeasured(Exception):
    """A study lacks what a probe measures; the message says how to provide it."""


Need = Callable[[Study], None]
"""Raises NotMeasured where a study lacks something."""


@dataclass(frozen=True)
class Claim:
    """A sentence that the numbers of a probe confirm or refute."""

    says: str
    rule: str
    """When it counts as holding."""
    judge: Callable[[dict[str, Any]], tuple[bool, str] | None]
    """Judges a probe's values: whether the claim holds, and the numbers as text. None if they do not tell."""
    needs: str
    """What is missing when there is nothing to judge by."""


class Probe(ABC):
    """One section of the report. Subclass it, and register the class in `PROBES`.

    Only `title`, `intro` and `measure` are needed.
    """

    title: str
    intro: str
    """What the section shows, below its title; `…` is set as code."""
    needs: Sequence[Need] = ()
    """Checked in this order before anything is measured: `with_increments`, `videos(2)`, …"""
    version: int = 2
    """Raise it when the numbers change their meaning: stored ones are then measured again."""

    @abstractmethod
    def measure(self, study: Study) -> Numbers:
        """The numbers; they are stored, and what follows is made from them alone."""

    def figures(self, numbers: Numbers, study: Study) -> Sequence[Picture]:
        """Pictures of the numbers; names must be unique in a report."""
        return ()

    def tables(self, numbers: Numbers) -> Sequence[Table]:
        """Tables of the numbers."""
        return ()

    def claims(self) -> Sequence[Claim]:
        """What the values are held against."""
        return ()

    def depends_on(self, study: Study) -> Sequence[object]:
        """What the numbers depend on besides model, baseline and gallery, such as `file_fingerprint(…)`."""
        return ()


def probe_fingerprint(name: str, probe: Probe, study: Study) -> str:
    """Changes with everything the numbers of a probe depend on."""
    baseline = None if study.baseline is None else study.baseline.fingerprint
    return fingerprint(probe.version, name, study.subject.fingerprint, baseline, *probe.depends_on(study))


def with_increments(study: Study) -> None:
    """Require a model with increments."""
    if not study.has_increments:
        raise NotMeasured(
            "This model has no increments: it is a baseline. Analyse a GARE model to fill this part."
        )


def with_run(study: Study) -> None:
    """Require the folder of a training run that was recorded."""
    if study.run is None:
        raise NotMeasured("No training run was given: pass --run FOLDER of a 'gare train … --probe'.")


def with_ablations(study: Study) -> None:
    """Require at least one table of `gare ablate`."""
    if not study.ablations:
        raise NotMeasured("No ablation was given: pass --ablation FOLDER, the --out of 'gare ablate'.")


def videos(number: int) -> Need:
    """Require at least so many videos in the split."""

    def check(study: Study) -> None:
        if len(study.gallery.videos) < number:
            raise NotMeasured(f"The split has {len(study.gallery.videos)} videos; this part needs {number}.")

    return check
