"""One check of a library from end to end: tables, rows, files on the disk, and as much data as is asked for.

A check writes nothing into the library. How far it came is noted in a file of the user (`read_share`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from gare.errors import DamagedLibraryError, LibraryError
from gare.interrupts import note_interrupt
from gare.library.check.check_report import CheckReport, Finding
from gare.library.check.library_rows import LibraryRows, find_file_changes, find_mismatches, read_rows
from gare.library.check.read_share import ReadShare, choose_items, load_place, place_after, save_place
from gare.library.check.row_data import ROWS_AT_ONCE, DataDamage, read_items
from gare.library.store import Store, find_surgeon, open_store
from gare.library.store.store_damage import Surgeon
from gare.library.store.store_protocol import no_library

if TYPE_CHECKING:
    from gare.model import GARE

CheckProgress = Callable[[str, int, int], None]
"""Called with what is being done, how much is done and how much there is."""

_SAMPLE = 8
_NEAREST = 20
_SAME_SCORE = 1e-3
_LEAST_RECALL = 0.5  # a sound index has .95 and more
_ABOUT_FILES = ("lost_items", "lost_ledger", "mixed_items", "ledger_mismatch", "item_without_frames")


def check_library(
    address: str | os.PathLike[str],
    *,
    read_data: str | None = None,
    max_duration: float | None = None,
    with_files: bool = True,
    model: GARE | None = None,
    on_progress: CheckProgress = lambda what, done, total: None,
    beside: str | None = None,
    with_rows: bool = True,
) -> CheckReport:
    """Check the library at this address, even one that cannot be opened any more. It writes nothing there.

    It looks at one set of vectors: the first, or the one named by `beside`. `gare.library.vector_set_checks`
    goes through all of them.

    Args:
        read_data: how much of the bulk data to read: "all", a percentage such as "2.5%" (the next ones go on
            where it ended), or "n/t", the n-th of t equal parts. None reads none.
        max_duration: seconds after which no more data is read; the next check goes on from there.
        with_files: compare the ledger with size and date of the files on the disk.
        model: also compute stage-1 vectors anew from the frames that are read, and compare them.
        beside: the name of another set of vectors of this library.
        with_rows: False looks at the tables alone.

    Raises:
        MissingLibraryError: there is nothing of a library.
        LibraryError: it is out of reach, or newer than this gare.
    """
    started = time.monotonic()
    share = ReadShare.parse(read_data) if read_data else None
    address = os.fspath(address)
    surgeon = surgeon_of(address, beside)
    report = CheckReport(surgeon.uri if surgeon else address, vector_set=beside or "")
    if surgeon is not None:
        on_progress("looking at the tables", 0, 1)
        if not surgeon.exists():
            raise no_library(report.library)
        for damage in surgeon.examine():
            report.add(damage.kind, damage.what)
        is_unfinished = surgeon.is_unfinished()
        surgeon.close()
        if is_unfinished:
            report.add("unfinished_library", "its making was cut short; the next 'gare index' finishes it")
            return report
    try:
        store = open_part(address, beside, read_only=True)
    except LibraryError as error:
        if not report.damage:
            if not isinstance(error, DamagedLibraryError):
                raise
            report.add("unreadable", error.reason)
    else:
        try:
            if with_rows:
                _check_opened(store, report, share, started, max_duration, with_files, model, on_progress)
        except DamagedLibraryError as error:  # what is wrong below the rows is known already, or is this
            report.add("unreadable", error.reason)
        except (ValueError, TypeError, LookupError) as error:  # rows that nobody wrote
            if not report.damage:
                raise
            report.add("unreadable", f"{type(error).__name__}: {error}")
        finally:
            store.close()
    report.seconds = time.monotonic() - started
    return report


def surgeon_of(address: str, beside: str | None) -> Surgeon | None:
    """What looks below the rows of a set of vectors."""
    surgeon = find_surgeon(address)
    if surgeon is None or beside is None:
        return surgeon
    try:
        return surgeon.beside(beside)
    finally:
        surgeon.close()


def open_part(address: str, beside: str | None, *, read_only: bool) -> Store:
    """The store of the first set of vectors, or of another one."""
    home = open_store(address, read_only=read_only)
    if beside is None:
        return home
    try:
        return home.beside(beside, stamp=None, create=False, read_only=read_only)
    finally:
        home.close()


def check_store(
    store: Store,
    *,
    read_data: str | None = None,
    with_files: bool = True,
    model: GARE | None = None,
) -> CheckReport:
    """Check what an open store holds; arguments as for `check_library`. Tables are not looked at."""
    started = time.monotonic()
    report = CheckReport(store.uri)
    share = ReadShare.parse(read_data) if read_data else None
    _check_opened(store, report, share, started, None, with_files, model, lambda what, done, total: None)
    report.seconds = time.monotonic() - started
    return report


def _check_opened(
    store: Store,
    report: CheckReport,
    share: ReadShare | None,
    started: float,
    max_duration: float | None,
    with_files: bool,
    model: GARE | None,
    on_progress: CheckProgress,
) -> None:
    try:
        rows = check_rows(store, report, with_files=with_files, on_progress=on_progress)
    except DamagedLibraryError as error:
        if not report.damage:
            report.add("unreadable", error.reason)
        return
    if share is not None:
        deadline = None if max_duration is None else started + max_duration
        read_share(store, rows, report, share, deadline, model, on_progress)


def check_rows(
    store: Store, report: CheckReport, *, with_files: bool, on_progress: CheckProgress
) -> LibraryRows:
    """Everything but the bulk data. What is found twice in a row is no trace of somebody who writes."""
    on_progress("comparing rows", 0, 2)
    rows = read_rows(store)
    findings = list(find_mismatches(rows))
    if any(finding.kind in _ABOUT_FILES for finding in findings):
        on_progress("comparing rows", 1, 2)
        rows = read_rows(store)
        before = {(finding.kind, finding.path, finding.item) for finding in findings}
        findings = [f for f in find_mismatches(rows) if (f.kind, f.path, f.item) in before]
    for item in store.misnamed():
        path = rows.items[item].path if item in rows.items else ""
        findings.append(Finding("misnamed_item", f"item {item} of {path} has a wrong name", path, item))
    if with_files:
        on_progress("looking at the files", 0, 1)
        findings += find_file_changes(rows)
    findings += _check_index(store, rows)
    report.findings += findings
    report.num_items, report.num_files = len(rows.items), len(rows.ledger)
    report.num_frames = None if rows.frames is None else len(rows.frames)
    return rows


def _check_index(store: Store, rows: LibraryRows) -> list[Finding]:
    """The vector index must find what a full reading finds, for a few items as queries."""
    import numpy as np

    try:
        num_indexed = store.num_indexed()
        sample = choose_items(rows.items, 0.0, min(1.0, _SAMPLE / max(len(rows.items), 1)))[:_SAMPLE]
        if not num_indexed or not sample:
            return []
        vectors = store.fetch(sample, ["id", "vector"])["vector"].to_pylist()
        queries = np.array(vectors, np.float32)
        if not len(queries) or not np.isfinite(queries).all():
            return []  # reading the data says so
        quick = store.search(queries, _NEAREST)
        exact = store.search(queries, _NEAREST, exact=True)
    except DamagedLibraryError as error:
        return [Finding("broken_index", f"stage 1 cannot be searched: {error.reason}")]
    # By score: of copies, which have the same vector, one is as good as another.
    found = [
        float((hits.scores >= best.scores[-1] - _SAME_SCORE).mean()) if len(best.scores) else 1.0
        for hits, best in zip(quick, exact, strict=True)
    ]
    recall = sum(found) / len(found)
    if recall < _LEAST_RECALL:
        return [Finding("broken_index", f"the vector index finds {recall:.0%} of the nearest items")]
    if num_indexed < len(rows.items):
        message = f"the vector index does not cover {len(rows.items) - num_indexed:,} items yet"
        return [Finding("unindexed_items", message)]
    return []


def read_share(
    store: Store,
    rows: LibraryRows,
    report: CheckReport,
    share: ReadShare,
    deadline: float | None,
    model: GARE | None,
    on_progress: CheckProgress,
) -> DataDamage:
    """Read the data of a share of the items; Ctrl-C and the deadline end it between two blocks."""
    keeps_place = share.start is None
    start = load_place(report.library + report.vector_set) if share.start is None else share.start
    ids = choose_items(rows.items, start, share.size)
    report.num_to_read = len(ids)
    damage = DataDamage()

    def path_of(item: str) -> str:
        return rows.items[item].path

    with note_interrupt() as interrupted:
        for first in range(0, len(ids), ROWS_AT_ONCE):
            on_progress("reading data", first, len(ids))
            if interrupted.is_set() or (deadline is not None and time.monotonic() >= deadline):
                report.is_complete = False
                break
            block = ids[first : first + ROWS_AT_ONCE]
            read_items(store, block, path_of, model, damage)
            report.num_read += len(block)
            if keeps_place:
                save_place(report.library + report.vector_set, place_after(block[-1]))
    if report.is_complete and keeps_place:
        save_place(report.library + report.vector_set, (start + share.size) % 1.0)
    on_progress("reading data", report.num_read, len(ids))
    report.findings += damage.findings
    return damage
