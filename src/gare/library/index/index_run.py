"""From folders of videos to rows in a store: only what is new or changed is decoded and encoded.

scan ─▶ plan ─▶ hash ─▶ content known? ─ yes ─▶ copy its rows ────────────────────────────▶ commit
                             └─ no ─▶ segment and decode (processes) ─▶ encode (batches) ─▶ commit

It is long because one object decides what becomes of a file, in a run of `gare index` and in a repair.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from gare.data.decoder_messages import Facts, Failure
from gare.data.workers import Event, Limits, WorkerLost, WorkerPool
from gare.errors import LibraryError
from gare.interrupts import note_interrupt
from gare.library.index.commit import Catalogue, Copy, Row, Writer, copy_rows, make_frames, make_items
from gare.library.index.content_hash import Hashed, HashQueue
from gare.library.index.encode_segments import EncodedItem, EncodeQueue
from gare.library.index.extract import Job, Message, extract
from gare.library.index.extract_task import Changed, Extracted, ExtractTask, Segment
from gare.library.index.index_report import FileFailure, IndexProgress, IndexReport
from gare.library.index.object_files import SCRATCH_BYTES, Scratch, Unreachable, scan_sources
from gare.library.index.plan import Known, Plan, check_roots, make_plan, read_ledger
from gare.library.index.scan import FoundFile, Scan, explain, printable
from gare.library.index.segment import Segmentation, default_segmentation, parse_segmentation
from gare.library.store import Store
from gare.library.store.store_protocol import damaged_library
from gare.model import GARE

_WAIT_S = 0.05
_COPIES_AT_ONCE = 200
_TIMES_READ = 3  # a file that is another one each time is still being written


@dataclass(frozen=True)
class Kept:
    """What an item keeps when it is made anew from the same content."""

    tags: tuple[str, ...]
    added: datetime


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
    run = _IndexRun(
        store, model, plan, job, options.tags, options.commit_seconds, on_progress, options.limits, scratch
    )
    run.note_problems()
    if plan.files:
        num_workers = min(options.num_workers or os.cpu_count() or 1, len(plan.files))
        _work(run, plan.files, num_workers, options.limits, extractor, is_interrupted)
    run.finish(interrupted=is_interrupted(), keep_gone=keep_gone)
    return run.report


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
        run = _IndexRun(store, model, plan, job, (), seconds, on_progress, limits, scratch, kept=kept)
        workers = min(num_workers or os.cpu_count() or 1, max(len(files), 1))
        if files:
            _work(run, plan.files, workers, limits, extract, interrupted.is_set)
        run.finish(interrupted=interrupted.is_set())
    return run.report


def _work(
    run: _IndexRun,
    files: Sequence[FoundFile],
    num_workers: int,
    limits: Limits,
    extractor: Extractor,
    is_interrupted: Callable[[], bool],
) -> None:
    """Work until all files are done: hash in threads, decode in processes, do the rest here, in turn."""
    hashes = HashQueue(files, run.scratch)
    pool: WorkerPool[Job, Extracted] = WorkerPool(extractor, num_workers, task=ExtractTask, limits=limits)
    try:
        while (hashes or pool.unfinished or run.is_busy) and not is_interrupted():
            while hashes and pool.unfinished < 2 * num_workers:
                hashed = hashes.next(timeout=0.0 if pool.unfinished else _WAIT_S)
                if hashed is None:
                    break
                run.take_hashed(*hashed)
            for job in run.pop_jobs():
                pool.submit(job)
            for file in run.pop_changed():
                hashes.add(file)
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


def _explain_loss(lost: WorkerLost, limits: Limits) -> Failure:
    """Why a decoder had to be stopped, and which option lets it go on."""
    kinds = {"timeout": "timeout", "memory": "out_of_memory", "misbehaved": "decoder_misbehaved"}
    advice = ""
    if lost.kind == "memory":
        advice = f" ({limits.memory_bytes / 1e9:.2g} GB; allow more with --memory)"
    elif lost.kind == "timeout":
        advice = " (allow more with --seconds)"
    return Failure(kinds.get(lost.kind, "decoder_crashed"), f"its decoder was stopped: {lost}{advice}")


@dataclass(eq=False)
class _FileInWork:
    """A file between its first frame and its commit."""

    file: FoundFile
    content: str
    place: str
    """Where its bytes are: its path, or that of a copy."""
    encoded: list[tuple[str, EncodedItem]] = field(default_factory=list)
    """Its items so far, each with the key of its frames."""
    num_waiting: int = 0
    facts: Facts | None = None


class _IndexRun:
    """One run: told what happened to files, it decides what becomes of them and writes it down."""

    def __init__(
        self,
        store: Store,
        model: GARE,
        plan: Plan,
        job: Job,
        tags: Sequence[str],
        commit_seconds: float,
        on_progress: Callable[[IndexProgress], None],
        limits: Limits,
        scratch: Scratch,
        kept: Mapping[str, Kept] | None = None,
    ) -> None:
        self._limits = limits
        self.scratch = scratch
        self._kept = kept or {}
        self._is_repair = kept is not None
        self.report = IndexReport(unchanged=plan.num_unchanged, failed_before=len(plan.failed_before))
        self._store, self._plan, self._job, self._tags = store, plan, job, tags
        self._segmentation = str(job.segmentation)
        self._on_progress = on_progress
        self._catalogue = Catalogue(store)
        if self._is_repair:
            for file in plan.changed:  # their rows may be incomplete
                self._catalogue.forget(file.path)
        known = {file.path for file in plan.changed}
        self._writer = Writer(store, self._catalogue, commit_seconds, known)
        self._queue: EncodeQueue[_FileInWork] = EncodeQueue(model, job.segmentation)
        self._jobs: list[Job] = []
        self._in_work: dict[str, _FileInWork] = {}
        self._contents: set[str] = set()  # in work or failed in this run
        self._failed_contents: dict[str, Failure] = {}
        self._twins: list[tuple[FoundFile, Hashed]] = []  # of files that are in work
        self._changed: list[FoundFile] = []  # to be hashed again
        self._times_changed: Counter[str] = Counter()
        self._copies: list[Copy] = []
        self._copies_since = 0.0
        self._commit_seconds = commit_seconds
        self._new = {file.path for file in plan.new}
        self._gone = set(plan.gone)  # and not yet found under another name
        self._num_done = 0

    # --- what happens ---------------------------------------------------------------------------------------

    def note_problems(self) -> None:
        """Report what the scan could not read; files go into the ledger as well."""
        for problem in self._plan.problems:
            if not problem.is_folder:
                file = FoundFile(problem.path, 0, 0)
                self._writer.add_failed(file, "", self._segmentation, problem.kind, problem.message)
            self._note_failure(
                FileFailure(problem.path, problem.kind, problem.message, is_folder=problem.is_folder)
            )

    def take_hashed(self, file: FoundFile, hashed: Hashed | OSError) -> None:
        """A file's content is known: copy rows that the library has of it, or decode the file."""
        if isinstance(hashed, Unreachable):
            return self._note_failure(FileFailure(file.path, "unreachable", str(hashed)))
        if isinstance(hashed, OSError):
            return self._fail(file, "", Failure(*explain(hashed)))
        if not hashed.is_steady:
            return self._read_again(file)
        if not hashed.local:
            # The ledger is to know the file that was hashed; the scan may have seen another one.
            _, _, size, mtime_ns, _ = hashed.identity
            file = replace(file, size=size, mtime_ns=mtime_ns)
        if hashed.content in self._contents:
            self._twins.append((file, hashed))
        elif not self._copy(file, hashed.content):
            return self._decode(file, hashed)
        self._release(hashed.local)

    def pop_jobs(self) -> list[Job]:
        """The files to decode now."""
        jobs, self._jobs = self._jobs, []
        return jobs

    def pop_changed(self) -> list[FoundFile]:
        """The files to hash again."""
        changed, self._changed = self._changed, []
        return changed

    def take_event(self, event: Event[Job, Extracted]) -> None:
        """A decoding process gave a segment, ended, or was lost."""
        work = self._in_work.get(event.item.path)
        if work is None:
            return  # it failed before its end
        if event.lost is not None:
            self._give_up(work, _explain_loss(event.lost, self._limits))
        elif isinstance(event.result, Failure):
            self._give_up(work, event.result)
        elif isinstance(event.result, Changed):
            self._let_go(work)
            self._contents.discard(work.content)
            self._read_again(work.file)
        elif isinstance(event.result, Segment):
            work.num_waiting += 1
            self._queue.add(work, event.result)
        elif isinstance(event.result, Facts):
            work.facts = event.result
            self._finish_if_complete(work)

    @property
    def is_busy(self) -> bool:
        """Whether there is something to do besides hashing and decoding."""
        return bool(self._queue or self._copies or self._twins or self._jobs or self._changed)

    def advance(self, *, is_idle: bool, is_all_hashed: bool) -> None:
        """Encode and write what is due."""
        for work, encoded in self._queue.run(is_idle=is_idle):
            self.report.num_items_encoded += len(encoded.items)
            work.num_waiting -= 1
            frames = make_frames(work.content, self._segmentation, encoded)
            self._writer.add_frames([frames])
            work.encoded += [(frames["frames_key"], item) for item in encoded.items]
            self._tell(work.file.path, at=encoded.end)
            self._finish_if_complete(work)
        if is_idle and is_all_hashed and self._twins:
            twins, self._twins = self._twins, []
            for file, hashed in twins:
                if hashed.content in self._failed_contents:
                    self._fail(file, hashed.content, self._failed_contents[hashed.content])
                elif not self._copy(file, hashed.content):
                    # A copy of an object was released while its twin was decoded.
                    self._changed.append(file) if hashed.local else self._decode(file, hashed)
        if self._copies and (is_all_hashed or self._copies_are_due()):
            self._write_copies()
        self._writer.commit_if_due()

    def finish(self, *, interrupted: bool, keep_gone: bool = False) -> None:
        """Commit the rest. Files that are gone leave last: a moved one still gave its vectors."""
        self._writer.commit()
        self.report.interrupted = interrupted
        if not interrupted and not keep_gone:
            self._writer.forget(self._plan.gone)
            self.report.deleted = len(self._gone)

    # --- what becomes of a file -----------------------------------------------------------------------------

    def _decode(self, file: FoundFile, hashed: Hashed) -> None:
        place = hashed.local or file.path
        self._contents.add(hashed.content)
        self._in_work[place] = _FileInWork(file, hashed.content, place)
        self._jobs.append(replace(self._job, path=place, identity=hashed.identity))

    def _release(self, place: str) -> None:
        """Remove the copy of an object, once its bytes are not needed any more."""
        if place:
            self.scratch.release(place)

    def _read_again(self, file: FoundFile) -> None:
        """The file changed while it was read. One that never holds still stays as it was for now."""
        self._times_changed[file.path] += 1
        if self._times_changed[file.path] < _TIMES_READ:
            self._changed.append(file)
        else:
            message = "it changed while it was read; it is tried again in the next run"
            self._note_failure(FileFailure(file.path, "changing", message))

    def _copy(self, file: FoundFile, content: str) -> bool:
        """Use vectors the store has of this content; False when it has none."""
        source = self._catalogue.find(content, self._segmentation, file.path, preferred=self._gone)
        if source is None:
            return False
        is_move = source.path in self._gone
        if is_move:
            self._gone.discard(source.path)
        if not self._copies:
            self._copies_since = time.monotonic()
        self._copies.append(Copy(file, content, source, is_move))
        return True

    def _copies_are_due(self) -> bool:
        """They are written together, but not so late that a crash costs the hashes of many large files."""
        is_old = time.monotonic() - self._copies_since >= self._commit_seconds
        return is_old or len(self._copies) >= _COPIES_AT_ONCE

    def _write_copies_of(self, path: str) -> None:
        """A file is about to get other items, or none: first write what others take over from it."""
        if any(copy.source.path == path for copy in self._copies):
            self._write_copies()

    def _write_copies(self) -> None:
        self._writer.commit()  # a source may have been written just now
        copies, self._copies = self._copies, []
        for copy, items, frames in copy_rows(self._store, copies, self._segmentation, self._tags):
            if not items:  # another process deleted the source just now, or gave it another content
                self._catalogue.forget(copy.source.path)
                self._changed.append(copy.file)
                continue
            if copy.source.path == copy.file.path:
                self.report.unchanged += 1  # only touched, or seen again after a crash
            elif copy.is_move:
                self.report.moved += 1
            else:
                self.report.duplicate += 1
            self.report.num_items_reused += len(items)
            self._write(copy.file, copy.content, items, frames)
            self._count(copy.file.path)

    def _finish_if_complete(self, work: _FileInWork) -> None:
        if work.facts is None or work.num_waiting:
            return
        del self._in_work[work.place]
        self._release(work.place if work.place != work.file.path else "")
        self._contents.discard(work.content)  # from now on the catalogue knows it
        self._write_copies_of(work.file.path)
        tags = sorted({*self._tags, *self._kept_tags(work.file.path)})
        self.report.video_seconds += work.facts.duration
        items = make_items(work.file, work.content, work.facts, work.encoded, tags)
        self._write(work.file, work.content, items, [])
        if work.file.path in self._new:
            self.report.new += 1
        else:
            self.report.changed += 1
        self._count(work.file.path)

    def _write(self, file: FoundFile, content: str, items: list[Row], frames: list[Row]) -> None:
        for row in items:
            if (kept := self._kept.get(row["id"])) is not None:
                row |= {"tags": list(kept.tags), "added": kept.added}
        self._writer.add_indexed(file, content, self._segmentation, items, frames)

    def _kept_tags(self, path: str) -> set[str]:
        """A file that is encoded again keeps its tags."""
        ids = sorted(self._catalogue.item_ids(path))
        if not ids:
            return set()
        return {tag for tags in self._store.fetch(ids, ["tags"]).column("tags").to_pylist() for tag in tags}

    def _give_up(self, work: _FileInWork, failure: Failure) -> None:
        self._let_go(work)
        self._failed_contents[work.content] = failure
        self._fail(work.file, work.content, failure)

    def _let_go(self, work: _FileInWork) -> None:
        del self._in_work[work.place]
        self._release(work.place if work.place != work.file.path else "")
        self._queue.drop(work)
        self._writer.drop_frames({key for key, _ in work.encoded})

    def _fail(self, file: FoundFile, content: str, failure: Failure) -> None:
        self._write_copies_of(file.path)
        if not self._is_repair:  # a repair throws nothing away
            self._writer.add_failed(file, content, self._segmentation, failure.kind, failure.message)
        self._note_failure(FileFailure(file.path, failure.kind, failure.message))

    def _note_failure(self, failure: FileFailure) -> None:
        self.report.failures.append(failure)
        self._count(failure.path)

    def _count(self, path: str) -> None:
        self._num_done += 1
        self._tell(path)

    def _tell(self, path: str, at: float | None = None) -> None:
        done, total = self._num_done, self._plan.num_to_do
        self._on_progress(IndexProgress(done, total, self.report.failed, path, at))
