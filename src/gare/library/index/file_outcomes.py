"""What becomes of each file of a run: copied rows, items of its own, a second reading, a line in the ledger.

`index_run` waits for hashes, segments and vectors, in a run of `gare index`, a shard of one and a repair, and
tells `FileOutcomes` of each.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from gare.data.decoder_messages import Facts, Failure
from gare.data.workers import Event, Limits, WorkerLost
from gare.library.index.commit import Catalogue, Copy, Row, Writer, copy_rows, make_frames, make_items
from gare.library.index.content_hash import Hashed
from gare.library.index.encode_segments import EncodedItem, EncodeQueue
from gare.library.index.extract import Job
from gare.library.index.extract_task import Changed, Extracted, Segment
from gare.library.index.index_report import FileFailure, IndexProgress, IndexReport
from gare.library.index.object_files import Scratch, Unreachable
from gare.library.index.plan import Plan
from gare.library.index.scan import FoundFile, explain
from gare.library.store import Store
from gare.model import GARE

_COPIES_AT_ONCE = 200
_TIMES_READ = 3  # a file that is another one each time is still being written


@dataclass(frozen=True)
class Kept:
    """What an item keeps when it is made anew from the same content."""

    tags: tuple[str, ...]
    added: datetime


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


class FileOutcomes:
    """Told what happened to the files of one run, this decides what becomes of them and writes it down."""

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


def _explain_loss(lost: WorkerLost, limits: Limits) -> Failure:
    """Why a decoder had to be stopped, and which option lets it go on."""
    kinds = {"timeout": "timeout", "memory": "out_of_memory", "misbehaved": "decoder_misbehaved"}
    advice = ""
    if lost.kind == "memory":
        advice = f" ({limits.memory_bytes / 1e9:.2g} GB; allow more with --memory)"
    elif lost.kind == "timeout":
        advice = " (allow more with --seconds)"
    return Failure(kinds.get(lost.kind, "decoder_crashed"), f"its decoder was stopped: {lost}{advice}")
