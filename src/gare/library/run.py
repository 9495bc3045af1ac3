"""One indexing run: what is known of every file on its way from its hash to its commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from gare.data.workers import Event
from gare.library.catalogue import Catalogue, make_frames_key
from gare.library.encode import Encoded, EncodeQueue
from gare.library.extract import Extracted, Facts, Failure, Job, Stretch
from gare.library.plan import Plan
from gare.library.report import FileFailure, IndexProgress, IndexReport
from gare.library.reuse import Copy, copy_rows, modified_at
from gare.library.schema import item_id
from gare.library.store.base import Store
from gare.library.walk import FoundFile, explain
from gare.library.writer import Row, Writer
from gare.model import GARE

_COPIES_AT_ONCE = 200


@dataclass(eq=False)
class _FileInWork:
    """A file between its first frame and its commit."""

    file: FoundFile
    content: str
    encoded: list[Encoded] = field(default_factory=list)
    num_waiting: int = 0
    facts: Facts | None = None


class Run:
    """Told what happened to files; decides what becomes of them and writes it down."""

    def __init__(
        self,
        store: Store,
        model: GARE,
        plan: Plan,
        job: Job,
        tags: Sequence[str],
        commit_seconds: float,
        on_progress: Callable[[IndexProgress], None],
    ) -> None:
        self.report = IndexReport(unchanged=plan.num_unchanged, failed_before=len(plan.failed_before))
        self._store, self._plan, self._job, self._tags = store, plan, job, tags
        self._split = str(job.split)
        self._on_progress = on_progress
        self._catalogue = Catalogue(store)
        self._writer = Writer(store, self._catalogue, commit_seconds)
        self._queue: EncodeQueue[_FileInWork] = EncodeQueue(model)
        self._jobs: list[Job] = []
        self._in_work: dict[str, _FileInWork] = {}
        self._contents: set[str] = set()  # in work or failed in this run
        self._failed_contents: dict[str, Failure] = {}
        self._twins: list[tuple[FoundFile, str]] = []  # of files that are in work
        self._copies: list[Copy] = []
        self._copies_since = 0.0
        self._commit_seconds = commit_seconds
        self._new = {file.path for file in plan.new}
        self._gone = set(plan.gone)  # and not yet found under another name
        self._num_done = 0

    # --- what happens --------------------------------------------------------------------------------------

    def note_problems(self) -> None:
        """What the walk could not use. Folders are reported, files go into the ledger as well."""
        for problem in self._plan.problems:
            if not problem.is_folder:
                file = FoundFile(problem.path, 0, 0)
                self._writer.add_failed(file, "", self._split, problem.kind, problem.message)
            self._note_failure(
                FileFailure(problem.path, problem.kind, problem.message, is_folder=problem.is_folder)
            )

    def take_hashed(self, file: FoundFile, content: str | OSError) -> None:
        if isinstance(content, OSError):
            self._fail(file, "", Failure(*explain(content)))
        elif content in self._contents:
            self._twins.append((file, content))
        elif not self._copy(file, content):
            self._decode(file, content)

    def pop_jobs(self) -> list[Job]:
        """What is to be decoded."""
        jobs, self._jobs = self._jobs, []
        return jobs

    def take_event(self, event: Event[Job, Extracted]) -> None:
        work = self._in_work.get(event.item.path)
        if work is None:
            return  # it failed before its end
        if event.lost is not None:
            kind = {"timeout": "timeout", "memory": "out_of_memory"}.get(event.lost.kind, "decoder_crashed")
            self._give_up(work, Failure(kind, f"its decoder was stopped: {event.lost}"))
        elif isinstance(event.result, Failure):
            self._give_up(work, event.result)
        elif isinstance(event.result, Stretch):
            work.num_waiting += 1
            self._queue.add(work, event.result)
        elif isinstance(event.result, Facts):
            work.facts = event.result
            self._finish_if_complete(work)

    @property
    def is_busy(self) -> bool:
        """Whether there is something to do besides hashing and decoding."""
        return bool(self._queue or self._copies or self._twins or self._jobs)

    def advance(self, *, is_idle: bool, is_all_hashed: bool) -> None:
        """Encode and write what is due."""
        for work, encoded in self._queue.run(is_idle=is_idle):
            self.report.num_items_encoded += 1
            work.num_waiting -= 1
            work.encoded.append(encoded)
            self._finish_if_complete(work)
        if is_idle and is_all_hashed and self._twins:
            twins, self._twins = self._twins, []
            for file, content in twins:
                if content in self._failed_contents:
                    self._fail(file, content, self._failed_contents[content])
                elif not self._copy(file, content):
                    self._decode(file, content)
        if self._copies and (is_all_hashed or self._copies_are_due()):
            self._write_copies()
        self._writer.commit_if_due()

    def finish(self, *, interrupted: bool) -> None:
        """Commit the rest. Files that are gone leave last: a moved one still gave its vectors."""
        self._writer.commit()
        self.report.interrupted = interrupted
        if not interrupted:
            self._writer.forget(self._plan.gone)
            self.report.deleted = len(self._gone)

    # --- what becomes of a file ----------------------------------------------------------------------------

    def _decode(self, file: FoundFile, content: str) -> None:
        self._contents.add(content)
        self._in_work[file.path] = _FileInWork(file, content)
        self._jobs.append(replace(self._job, path=file.path))

    def _copy(self, file: FoundFile, content: str) -> bool:
        """Use vectors the store has of this content; False when it has none."""
        source = self._catalogue.find(content, self._split, file.path, preferred=self._gone)
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

    def _write_copies(self) -> None:
        self._writer.commit()  # a source may have been written just now
        copies, self._copies = self._copies, []
        for copy, items, frames in copy_rows(self._store, copies, self._split, self._tags):
            if not items:  # another process deleted the source just now
                self._catalogue.forget(copy.source.path)
                self._decode(copy.file, copy.content)
                continue
            if copy.source.path == copy.file.path:
                self.report.unchanged += 1  # only touched, or seen again after a crash
            elif copy.is_move:
                self.report.moved += 1
            else:
                self.report.duplicate += 1
            self.report.num_items_reused += len(items)
            self._writer.add_indexed(copy.file, copy.content, self._split, items, frames)
            self._count(copy.file.path)

    def _finish_if_complete(self, work: _FileInWork) -> None:
        if work.facts is None or work.num_waiting:
            return
        del self._in_work[work.file.path]
        self._contents.discard(work.content)  # from now on the catalogue knows it
        tags = sorted({*self._tags, *self._kept_tags(work.file.path)})
        rows = [self._make_rows(work, work.facts, encoded, tags) for encoded in work.encoded]
        items, frames = [item for item, _ in rows], [frame for _, frame in rows]
        self._writer.add_indexed(work.file, work.content, self._split, items, frames)
        if work.file.path in self._new:
            self.report.new += 1
        else:
            self.report.changed += 1
        self._count(work.file.path)

    def _make_rows(
        self, work: _FileInWork, facts: Facts, encoded: Encoded, tags: Sequence[str]
    ) -> tuple[Row, Row]:
        key = make_frames_key(work.content, self._split, encoded.start)
        item = {
            "id": item_id(work.file.path, encoded.start),
            "path": work.file.path,
            "content": work.content,
            "start": encoded.start,
            "end": encoded.end,
            "file_duration": facts.duration,
            "width": facts.width,
            "height": facts.height,
            "modified": modified_at(work.file),
            "added": datetime.now(UTC),
            "tags": tags,
            "frames_key": key,
            "vector": encoded.vector,
        }
        frames = {
            "frames_key": key,
            "vectors": encoded.frames,
            "times": encoded.times,
            "thumbnail": encoded.thumbnail,
            "strip": encoded.strip,
        }
        return item, frames

    def _kept_tags(self, path: str) -> set[str]:
        """A file that is encoded again keeps its tags."""
        ids = sorted(self._catalogue.item_ids(path))
        if not ids:
            return set()
        return {tag for tags in self._store.fetch(ids, ["tags"]).column("tags").to_pylist() for tag in tags}

    def _give_up(self, work: _FileInWork, failure: Failure) -> None:
        del self._in_work[work.file.path]
        self._queue.drop(work)
        self._failed_contents[work.content] = failure
        self._fail(work.file, work.content, failure)

    def _fail(self, file: FoundFile, content: str, failure: Failure) -> None:
        self._writer.add_failed(file, content, self._split, failure.kind, failure.message)
        self._note_failure(FileFailure(file.path, failure.kind, failure.message))

    def _note_failure(self, failure: FileFailure) -> None:
        self.report.failures.append(failure)
        self._count(failure.path)

    def _count(self, path: str) -> None:
        self._num_done += 1
        self._on_progress(IndexProgress(self._num_done, self._plan.num_to_do, self.report.failed, path))
