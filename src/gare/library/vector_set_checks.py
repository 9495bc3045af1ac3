"""Checks and repairs a whole library: its first set of vectors, and those of other models."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from gare.errors import LibraryError, MissingLibraryError
from gare.library.check import CheckReport, Finding, check_library, repair_library
from gare.library.check.repair_run import LoadModel
from gare.library.store import ModelStamp, open_store
from gare.library.vector_sets import VectorSet, VectorSets
from gare.model import GARE

_HAS_ROWS = ("complete", "building")  # the others are being removed, and may be half gone


def check_sets(
    address: str | os.PathLike[str],
    *,
    load_model: Callable[[ModelStamp], GARE] | None = None,
    with_files: bool = True,
    **how: Any,
) -> CheckReport:
    """Check all sets of vectors of a library; arguments as for `gare.library.check.check_library`.

    Args:
        load_model: with it, stage-1 vectors are compared with what the model of each set makes of the frames.
    """
    address = os.fspath(address)
    sets = _sets(address)

    def check(found: VectorSet | None, beside: str | None) -> CheckReport:
        is_current = found is None or found.is_current
        model = load_model(found.stamp) if load_model is not None and found is not None else None
        return check_library(
            address,
            with_files=with_files and is_current,
            model=model,
            beside=beside,
            with_rows=found is None or found.state in _HAS_ROWS,
            **how,
        )

    report = check(sets[0] if sets else None, None)
    for found in sets[1:]:
        if found.state in _HAS_ROWS:
            try:
                _add(report, check(found, found.name), found)
            except MissingLibraryError:
                report.add("missing_set", _describe_missing(found))
    return report


def repair_sets(address: str | os.PathLike[str], load_model: LoadModel, **how: Any) -> CheckReport:
    """Repair all sets of vectors of a library; arguments as for `gare.library.check.repair_library`."""
    address = os.fspath(address)
    before = _sets(address)
    report = repair_library(address, load_model, with_rows=not before or before[0].state in _HAS_ROWS, **how)
    for found in _sets(address)[1:]:
        if found.state in _HAS_ROWS:
            try:
                _add(report, repair_library(address, load_model, beside=found.name, **how), found)
            except MissingLibraryError:
                report.add("missing_set", _describe_missing(found))
    return report


def _describe_missing(found: VectorSet) -> str:
    name = found.stamp.name
    return f"there are no vectors of {name} ({found.name}); gare index --model {name} makes them"


def _sets(address: str) -> list[VectorSet]:
    """The sets that a library knows of, the first one first; none where it cannot be opened."""
    try:
        home = open_store(address, read_only=True)
    except LibraryError:
        return []
    try:
        sets = VectorSets(home, read_only=True)
        return sorted(sets.all(), key=lambda found: found.name != sets.home_name) or []
    except (LibraryError, json.JSONDecodeError, KeyError, TypeError):
        return []
    finally:
        home.close()


def _add(report: CheckReport, part: CheckReport, found: VectorSet) -> None:
    """Add what was found in another set; the numbers are those of the current one."""
    label = f"vectors of {found.stamp.name} ({found.name})"

    def named(finding: Finding) -> Finding:
        return Finding(finding.kind, f"{label}: {finding.message}", finding.path, finding.item)

    report.findings += map(named, part.findings)
    report.left += map(named, part.left)
    report.mended += [f"{label}: {line}" for line in part.mended]
    report.num_read += part.num_read
    report.num_to_read += part.num_to_read
    report.is_complete = report.is_complete and part.is_complete
    report.seconds += part.seconds
    if found.is_current:
        report.num_items, report.num_files = part.num_items, part.num_files
        report.num_frames = part.num_frames
