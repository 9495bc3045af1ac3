"""From folders of videos to rows in a store: only what is new or changed is decoded and encoded.

walk ─▶ compare with the ledger ─▶ hash ─▶ content known? ─ yes ─▶ copy its rows ─▶ commit
                                              └─ no ─▶ decode (processes) ─▶ encode (batches) ─▶ commit
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from gare.data.workers import Limits, WorkerPool
from gare.errors import LibraryError
from gare.interrupts import note_interrupt
from gare.library.extract import Extracted, Job, extract
from gare.library.hashing import HashQueue
from gare.library.plan import check_roots, make_plan, read_ledger
from gare.library.report import IndexProgress, IndexReport
from gare.library.run import Run
from gare.library.splitting import parse_split
from gare.library.store.base import Store
from gare.library.walk import FoundFile, Walk, printable, walk
from gare.model import GARE

_WAIT_S = 0.05

Extractor = Callable[[Job], Iterable[Extracted]]


@dataclass(frozen=True)
class IndexOptions:
    """What a run may be told."""

    split: str | None = None
    """whole, window:SECONDS, shots or auto; None is how the library was split before, or whole."""
    exclude: tuple[str, ...] = ()
    """Patterns of names, or of whole paths where a pattern has a slash."""
    hidden: bool = False
    """Look into files and folders whose name begins with a dot as well."""
    tags: tuple[str, ...] = ()
    """Given to the items of files that are new, moved or changed."""
    num_workers: int = 0
    """Processes that decode; 0 is one per core."""
    retry_failed: bool = False
    prune: bool = False
    """Believe it when a whole folder that had videos is empty or gone."""
    keep_damaged: bool = False
    """Index what a truncated or corrupt file still gives."""
    settle_seconds: float = 0.0
    """Leave files alone that changed within so many seconds: they may still be written."""
    commit_seconds: float = 5.0
    """How much work a crash may cost."""
    limits: Limits = field(default_factory=Limits)
    """Of each process that decodes."""


def index_folders(
    store: Store,
    model: GARE,
    roots: Sequence[str | os.PathLike[str]],
    *,
    options: IndexOptions | None = None,
    on_progress: Callable[[IndexProgress], None] = lambda progress: None,
    extractor: Extractor = extract,
) -> IndexReport:
    """Bring the store up to date with these files and folders.

    Ctrl-C ends it after a commit, with `interrupted` set in the report; running it again goes on from there.

    Args:
        store: made for this model.
        model: in evaluation mode, on the device to encode on.
        roots: folders, searched to the bottom, and single files.
        options: what to leave out, how to split, and so on.
        on_progress: called when a file is done.
        extractor: what a worker process does with a file.
    """
    options = options or IndexOptions()
    _check_model(store, model)
    if not all(tag.strip() for tag in options.tags):
        raise LibraryError("a tag is empty; give it a name, or leave it out")
    split = parse_split(options.split or store.get_notes().get("split", "whole"))
    started = time.monotonic()
    with note_interrupt() as interrupted:
        ledger = read_ledger(store)
        checked = check_roots([os.fspath(root) for root in roots], ledger, prune=options.prune)
        walked = walk(checked.usable, exclude=options.exclude, hidden=options.hidden, skip=[store.uri])
        unsettled = _set_unsettled_aside(walked, options.settle_seconds)
        plan = make_plan(
            walked,
            ledger,
            checked.usable,
            split=str(split),
            retry_failed=options.retry_failed,
            keep=unsettled,
        )
        job = Job("", split, model.config.num_frames, model.backbone.image_format.size, options.keep_damaged)
        run = Run(store, model, plan, job, options.tags, options.commit_seconds, on_progress)
        run.report.skipped_roots = checked.skipped
        run.note_problems()
        if plan.files:
            num_workers = min(options.num_workers or os.cpu_count() or 1, len(plan.files))
            _work(run, plan.files, num_workers, options.limits, extractor, interrupted.is_set)
        run.finish(interrupted=interrupted.is_set())
        _note_source(store, checked.usable, str(split))
    run.report.seconds = time.monotonic() - started
    return run.report


def _work(
    run: Run,
    files: Sequence[FoundFile],
    num_workers: int,
    limits: Limits,
    extractor: Extractor,
    is_interrupted: Callable[[], bool],
) -> None:
    """The loop. Hashing runs in threads, decoding in processes; everything else happens here, in turn."""
    hashes = HashQueue(files)
    pool: WorkerPool[Job, Extracted] = WorkerPool(extractor, num_workers, limits=limits)
    try:
        while (hashes or pool.unfinished or run.is_busy) and not is_interrupted():
            while hashes and pool.unfinished < 2 * num_workers:
                hashed = hashes.next(timeout=0.0 if pool.unfinished else _WAIT_S)
                if hashed is None:
                    break
                run.take_hashed(*hashed)
            for job in run.pop_jobs():
                pool.submit(job)
            if pool.unfinished and (event := pool.next_event(_WAIT_S)) is not None:
                run.take_event(event)
            run.advance(is_idle=not pool.unfinished, is_all_hashed=not hashes)
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


def _note_source(store: Store, roots: Sequence[str], split: str) -> None:
    """The library knows what it was made of, and how."""
    known = store.get_notes()
    folders = sorted({*json.loads(known.get("folders", "[]")), *map(printable, roots)})
    notes = {"folders": json.dumps(folders, ensure_ascii=False), "split": split}
    if any(known.get(name) != value for name, value in notes.items()):
        store.set_notes(notes)


def _set_unsettled_aside(walked: Walk, seconds: float) -> set[str]:
    """Take files that may still be written off the list; their paths."""
    if not seconds:
        return set()
    now = time.time_ns()
    # A date in the future, from a camera whose clock is wrong, says nothing: such a file would never settle.
    unsettled = {file.path for file in walked.files if 0 <= now - file.mtime_ns < seconds * 1e9}
    walked.files = [file for file in walked.files if file.path not in unsettled]
    return unsettled
