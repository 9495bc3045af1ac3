"""From folders of videos to rows in a store: only what is new or changed is decoded and encoded.

scan ─▶ plan ─▶ hash ─▶ content known? ─ yes ─▶ copy its rows ────────────────────────────▶ commit
                             └─ no ─▶ segment and decode (processes) ─▶ encode (batches) ─▶ commit

What becomes of each file on this way is decided in `file_outcomes`.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gare.data.workers import Limits, WorkerPool
from gare.errors import LibraryError
from gare.interrupts import note_interrupt
from gare.library.index.content_hash import HashQueue
from gare.library.index.extract import Job, Message, extract
from gare.library.index.extract_task import Extracted, ExtractTask
from gare.library.index.file_outcomes import FileOutcomes, Kept
from gare.library.index.index_report import IndexProgress, IndexReport
from gare.library.index.object_files import SCRATCH_BYTES, Scratch, scan_sources
from gare.library.index.plan import Known, Plan, check_roots, make_plan, read_ledger
from gare.library.index.scan import FoundFile, Scan, printable
from gare.library.index.segment import Segmentation, default_segmentation, parse_segmentation
from gare.library.store import Store
from gare.library.store.store_protocol import damaged_library
from gare.model import GARE

_WAIT_S = 0.05

Extractor = Callable[[Job, int], Iterable[Message]]


@dataclass(frozen=True)
class IndexOptions:
    """The settings of an indexing run."""

    split: str | None = None
    """How files are segmented: moments, whole, window:SECONDS, shots or auto; None is as before."""
    exclude: tuple[str, ...] = ()
    """Patterns of names, or of whole paths where a pattern has a slash."""
    hidden: bool = False
    """Take files and folders whose name begins with a dot as well."""
    tags: tuple[str, ...] = ()
    """Tags for the items of files that are new, moved or changed."""
    num_workers: int = 0
    """Processes that decode; 0 is one per core."""
    retry_failed: bool = False
    prune: bool = False
    """Remove the items of a folder that had videos and is now empty or gone."""
    keep_damaged: bool = False
    """Index what a truncated or corrupt file still gives."""
    settle_seconds: float = 0.0
    """Leave files alone that changed within so many seconds: they may still be written."""
    commit_seconds: float = 5.0
    """Seconds of work that a crash may cost."""
    scratch_bytes: int = SCRATCH_BYTES
    """What objects in work may take of the disk."""
    limits: Limits = field(default_factory=Limits)
    """What each decoding process may use."""


def index_folders(
    store: Store,
    model: GARE,
    roots: Sequence[str | os.PathLike[str]],
    *,
    options: IndexOptions | None = None,
    on_progress: Callable[[IndexProgress], None] = lambda progress: None,
    extractor: Extractor = extract,
    skip: Sequence[str] = (),
    only: Mapping[str, Known] | None = None,
) -> IndexReport:
    """Bring the store up to date with these files and folders.

    Ctrl-C ends it after a commit, with `interrupted` set in the report; running it again goes on from there.

    Args:
        store: made for this model.
        model: in evaluation mode, on the device to encode on.
        roots: folders, searched to the bottom, and single files.
        options: what to leave out, how to segment, and so on.
        on_progress: called when a file is done.
        extractor: what a worker process does with a file.
        skip: folders to leave out besides the store's own.
        only: leave out all files but these: the ledger of another store of the same library.
    """
    options = options or IndexOptions()
    started = time.monotonic()
    with note_interrupt() as interrupted:
        planned = plan_folders(store, model, roots, options=options, skip=skip, only=only)
        report = index_planned(
            store,
            model,
            planned.plan,
            segmentation=planned.segmentation,
            options=options,
            on_progress=on_progress,
            extractor=extractor,
            is_interrupted=interrupted.is_set,
        )
        report.skipped_roots = planned.skipped_roots
        note_source(store, planned.roots, planned.segmentation)
    report.seconds = time.monotonic() - started
    return report


@dataclass(frozen=True)
class PlannedRun:
    """What a run has to do, before anything is read but names and dates."""

    plan: Plan
    segmentation: str
    roots: list[str]
    """The folders and files that are there."""
    skipped_roots: dict[str, str]
    """Why others are left alone, by path."""


def plan_folders(
    store: Store,
    model: GARE,
    roots: Sequence[str | os.PathLike[str]],
    *,
    options: IndexOptions,
    skip: Sequence[str] = (),
    only: Mapping[str, Known] | None = None,
) -> PlannedRun:
    """Compare these files and folders with the ledger; arguments as for `index_folders`."""
    _check_model(store, model)
    if not all(tag.strip() for tag in options.tags):
        raise LibraryError("a tag is empty; give it a name, or leave it out")
    segmentation = str(choose_segmentation(options, store, model))
    store.check()  # what is damaged must not be called unchanged
    ledger = read_ledger(store)
    known = {**(only or {}), **ledger}
    checked = check_roots([os.fspath(root) for root in roots], known, prune=options.prune)
    scan = scan_sources(
        checked.usable, exclude=options.exclude, hidden=options.hidden, skip=[store.uri, *skip]
    )
    if only is not None:
        scan.keep_only(only)
    unsettled = _set_unsettled_aside(scan, options.settle_seconds)
    plan = make_plan(
        scan,
        ledger,
        checked.usable,
        segmentation=segmentation,
        retry_failed=options.retry_failed,
        keep=unsettled,
    )
    _check_counts(store, ledger, scan.files)
    return PlannedRun(plan, segmentation, checked.usable, checked.skipped)


def index_planned(
    store: Store,
    model: GARE,
    plan: Plan,
    *,
    segmentation: str,
    options: IndexOptions,
    on_progress: Callable[[IndexProgress], None] = lambda progress: None,
    extractor: Extractor = extract,
    is_interrupted: Callable[[], bool] = lambda: False,
    keep_gone: bool = False,
) -> IndexReport:
    """Do what a plan says, on this machine: all of a run, or one shard of it.

    Args:
        is_interrupted: asked between two steps; when it says so, what is done is committed and the rest left.
        keep_gone: leave files that are gone to the end of the whole run. Another shard may still find one of
            them under a new name.
    """
    wanted, split = model.encoder.image_format, parse_segmentation(segmentation)
    job = Job("", split, model.config.num_frames, wanted.size, wanted.fit, options.keep_damaged)
    scratch = Scratch(options.scratch_bytes)
    outcomes = FileOutcomes(
        store, model, plan, job, options.tags, options.commit_seconds, on_progress, options.limits, scratch
    )
    outcomes.note_problems()
    if plan.files:
        num_workers = min(options.num_workers or os.cpu_count() or 1, len(plan.files))
        _work(outcomes, plan.files, num_workers, options.limits, extractor, is_interrupted)
    outcomes.finish(interrupted=is_interrupted(), keep_gone=keep_gone)
    return outcomes.report


_MOMENTS_NOTE = "knows_moments"
"""A library without it was made before there were moments."""


def choose_segmentation(options: IndexOptions, store: Store, model: GARE) -> Segmentation:
    """How files are segmented: as asked, as before, or by their moments.

    A library that was made before there were moments is brought up to date, unless it has windows or shots.
    """
    can_share, notes = model.has_independent_frames, store.get_notes()
    if options.split is None and _MOMENTS_NOTE not in notes:
        return default_segmentation(notes.get("split"), has_temporal=not can_share)
    chosen = parse_segmentation(options.split or notes["split"])
    if can_share or not chosen.is_dense:
        return chosen
    if options.split is None:  # of the model that was here before
        return default_segmentation(None, has_temporal=True)
    raise LibraryError(
        f"{store.stamp.name} looks at the frames of a segment together, so items cannot share them; index "
        "with --split auto, window:SECONDS or shots"
    )


def encode_again(
    store: Store,
    model: GARE,
    files: Sequence[FoundFile],
    kept: Mapping[str, Kept],
    *,
    segmentation: str,
    limits: Limits | None = None,
    num_workers: int = 0,
    on_progress: Callable[[IndexProgress], None] = lambda progress: None,
) -> IndexReport:
    """Make the items of these files anew, as a repair does: what the store has of them is not trusted.

    A file that cannot be decoded keeps what it has. Neither the folders nor the segmentation of the library
    change.

    Args:
        kept: what items are to keep, by id, where they come back.
        segmentation: how these files were segmented.
    """
    _check_model(store, model)
    wanted, split = model.encoder.image_format, parse_segmentation(segmentation)
    job = Job("", split, model.config.num_frames, wanted.size, wanted.fit, keep_damaged=True)
    with note_interrupt() as interrupted:
        plan = Plan(changed=list(files))
        limits = limits or Limits()
        seconds = IndexOptions.commit_seconds
        scratch = Scratch()
        outcomes = FileOutcomes(store, model, plan, job, (), seconds, on_progress, limits, scratch, kept=kept)
        workers = min(num_workers or os.cpu_count() or 1, max(len(files), 1))
        if files:
            _work(outcomes, plan.files, workers, limits, extract, interrupted.is_set)
        outcomes.finish(interrupted=interrupted.is_set())
    return outcomes.report


def _work(
    outcomes: FileOutcomes,
    files: Sequence[FoundFile],
    num_workers: int,
    limits: Limits,
    extractor: Extractor,
    is_interrupted: Callable[[], bool],
) -> None:
    """Work until all files are done: hash in threads, decode in processes, do the rest here, in turn."""
    hashes = HashQueue(files, outcomes.scratch)
    pool: WorkerPool[Job, Extracted] = WorkerPool(extractor, num_workers, task=ExtractTask, limits=limits)
    try:
        while (hashes or pool.unfinished or outcomes.is_busy) and not is_interrupted():
            while hashes and pool.unfinished < 2 * num_workers:
                hashed = hashes.next(timeout=0.0 if pool.unfinished else _WAIT_S)
                if hashed is None:
                    break
                outcomes.take_hashed(*hashed)
            for job in outcomes.pop_jobs():
                pool.submit(job)
            for file in outcomes.pop_changed():
                hashes.add(file)
            if pool.unfinished and (event := pool.next_event(_WAIT_S)) is not None:
                outcomes.take_event(event)
            outcomes.advance(is_idle=not pool.unfinished, is_all_hashed=not hashes)
    finally:
        hashes.close()
        pool.close()


def _check_model(store: Store, model: GARE) -> None:
    stamp = store.stamp
    if (stamp.dim, stamp.num_frames) != (model.dim, model.config.num_frames):
        raise LibraryError(
            f"{store.uri} was made by {stamp.name} ({stamp.num_frames} frames of {stamp.dim} numbers), but "
            f"this model gives {model.config.num_frames} of {model.dim}; index with {stamp.name}, or into a "
            "new library"
        )


def _check_counts(store: Store, ledger: Mapping[str, Known], files: Sequence[FoundFile]) -> None:
    """Refuse to call files unchanged that have lost items. Whoever deletes items lowers the count first.

    Raises:
        DamagedLibraryError: it names one of them.
    """
    if not store.counts_deletions or sum(known.num_items for known in ledger.values()) <= store.count():
        return
    there = {file.path for file in files}
    short = {path: known for path, known in ledger.items() if path in there and known.size >= 0}
    for _ in range(2):  # what another process was just writing is complete in the second reading
        counts = Counter(path for batch in store.scan(columns=["path"]) for path in batch["path"].to_pylist())
        now = read_ledger(store)
        short = {
            path: known
            for path, known in short.items()
            if known.num_items > counts[path] and now.get(path) == known
        }
    if short:
        reason = f"{len(short):,} files have fewer items than the ledger counts, such as {min(short)}"
        raise damaged_library(store.uri, reason)


def note_source(store: Store, roots: Sequence[str], segmentation: str) -> None:
    """Note the folders and the segmentation in the library."""
    known = store.get_notes()
    folders = sorted({*json.loads(known.get("folders", "[]")), *map(printable, roots)})
    notes = {
        "folders": json.dumps(folders, ensure_ascii=False),
        "split": segmentation,
        _MOMENTS_NOTE: "1",
    }
    if any(known.get(name) != value for name, value in notes.items()):
        store.set_notes(notes)


def _set_unsettled_aside(scan: Scan, seconds: float) -> set[str]:
    """Take files that may still be written off the list; their paths."""
    if not seconds:
        return set()
    now = time.time_ns()
    # A date in the future, from a camera whose clock is wrong, says nothing: such a file would never settle.
    unsettled = {file.path for file in scan.files if 0 <= now - file.mtime_ns < seconds * 1e9}
    scan.files = [file for file in scan.files if file.path not in unsettled]
    return unsettled
