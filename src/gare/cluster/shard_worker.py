"""Works on shards of a run until none is left: lease, index, commit, mark done. Ray is not needed here.

A worker opens the library itself and commits itself, by the same code that indexes on one machine. Nothing
passes through the process that planned the run, so that it may die.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from gare.cluster.shard_ledger import LostLeaseError, Run, Shard, ShardFiles, ShardLedger
from gare.data.object_storage import is_remote, open_storage
from gare.data.workers import Limits
from gare.errors import ClusterError, LibraryError
from gare.library.index.index_report import FileFailure, IndexProgress, IndexReport
from gare.library.index.index_run import IndexOptions, index_planned, note_source
from gare.library.index.object_files import remove_left_behind
from gare.library.index.plan import Plan, read_ledger
from gare.library.index.scan import FoundFile, Problem
from gare.library.library import Library
from gare.library.store import Store

_BEATS_PER_LEASE = 3
_LONGEST_PAUSE_S, _LONGEST_REST_S = 5.0, 30.0
OUTAGE_S = 600.0
"""How long workers, and who watches them, wait for storage that cannot be reached before they give up."""
_STUCK_MARGIN_S = 60.0
_MOST_FAILURES = 3
"""Shards that fail here one after the other, before the worker ends: a new process may do better."""
_log = logging.getLogger("gare.cluster")


class ShardWorker:
    """One worker: a model on a device, and some processes that decode.

    Args:
        library: its address.
        node: the machine, as people know it.
        num_processes: that decode.
        on_stuck: called when a shard has stood still for longer than any of its files may take. It must not
            return: the lease then runs out, and another worker takes the shard over.
    """

    def __init__(
        self, library: str, *, node: str, device: str, num_processes: int, on_stuck: Callable[[], None]
    ) -> None:
        self._library = Library.open(library, device=device, create=False)
        self._ledger = ShardLedger(self._library.home.records())
        self._owner = uuid.uuid4().hex[:12]
        self._node = node
        self._num_processes = num_processes
        self._on_stuck = on_stuck
        self._num_failures = 0  # one after the other

    def run(self) -> None:
        """Work until the run is over or stopped.

        Raises:
            ClusterError: this machine cannot read the videos.
            LibraryError: the storage could not be reached for ten minutes.
        """
        remove_left_behind()  # of a worker that was killed, in whose place this one may be
        pause, reached = 0.2, time.monotonic()
        while True:
            try:
                run = self._ledger.run()
                if run is None or run.state != "running":
                    return
                check_sources(
                    run.read_roots
                )  # before every lease: a machine without them would lose all shards
                shard = self._ledger.lease(run, self._owner, self._node)
                reached = time.monotonic()
                if shard is not None:
                    pause = 0.2
                    self._work_on(run, shard)
                    continue
            except LostLeaseError as error:
                _log.info("%s", error)
            except LibraryError as error:
                if time.monotonic() - reached > OUTAGE_S:
                    raise
                _log.warning("the library cannot be used just now: %s", error)
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE_S)

    def _work_on(self, run: Run, shard: Shard) -> None:
        started = time.monotonic()
        options = options_from_plain(run.options, num_workers=self._num_processes)
        with _Heart(self._ledger, run, shard, self._on_stuck) as heart:
            try:
                if self._is_last(run, shard):
                    report = self.end_run(run, options, heart)
                else:
                    files = self._ledger.files(run, shard.number)
                    heart.allow(options.limits, files)
                    report = self.index_shard(run, shard, files, options, heart)
            except LostLeaseError:
                raise
            except Exception as error:  # a shard may fail, and is tried elsewhere; the run goes on
                _log.exception("shard %d failed here", shard.number)
                self._ledger.give_back(run, heart.stop(), f"{type(error).__name__}: {error}")
                self._num_failures += 1
                if self._num_failures >= _MOST_FAILURES and not isinstance(error, LibraryError):
                    raise
                time.sleep(min(2.0**self._num_failures, _LONGEST_REST_S))
                return
            shard = heart.stop()
        self._num_failures = 0
        if heart.is_lost:
            return  # who has it now finds what was committed
        if report.interrupted:
            self._ledger.give_back(run, shard, done=heart.num_done)
            return
        self._ledger.finish(run, shard, report.to_json(), time.monotonic() - started)
        if self._is_last(run, shard):
            self._ledger.set_state("finished")

    def index_shard(
        self, run: Run, shard: Shard, files: ShardFiles, options: IndexOptions, heart: _Heart
    ) -> IndexReport:
        """Index the files of a shard that are not in the library yet."""
        store = self._library.store
        gone, _ = self._ledger.end(run)
        plan, report = Plan(list(files.new), list(files.changed)), IndexReport()
        if shard.attempt > 1 or shard.done:
            plan, report = without_done(files, store, run.segmentation, again=options.retry_failed)
        plan.gone = gone
        heart.begin(len(files.new) + len(files.changed) - plan.num_to_do)
        done = index_planned(
            store,
            self._library.model,
            plan,
            segmentation=run.segmentation,
            options=options,
            on_progress=heart.note,
            is_interrupted=heart.is_over,
            keep_gone=True,
        )
        return add_reports(report, done)

    def end_run(self, run: Run, options: IndexOptions, heart: _Heart) -> IndexReport:
        """Drop what is gone, note what could not be read, and keep the library quick."""
        gone, problems = self._ledger.end(run)
        plan = Plan(problems=[Problem(**problem) for problem in problems], gone=gone)
        store = self._library.store
        report = index_planned(
            store,
            self._library.model,
            plan,
            segmentation=run.segmentation,
            options=options,
            is_interrupted=heart.is_over,
        )
        note_source(store, run.roots, run.segmentation)
        store.maintain(lambda what, done, total: heart.move_on(what))
        return report

    def _is_last(self, run: Run, shard: Shard) -> bool:
        return not shard.num_files

    def close(self) -> None:
        """Close the library."""
        self._library.close()


class _Heart:
    """Says in the ledger that a shard is worked on, and hears whether it still is ours."""

    def __init__(self, ledger: ShardLedger, run: Run, shard: Shard, on_stuck: Callable[[], None]) -> None:
        self._ledger, self._run, self._shard, self._on_stuck = ledger, run, shard, on_stuck
        self._stuck_s = _STUCK_MARGIN_S + Limits().file_seconds
        self._done, self._failed, self._path, self._before = shard.done, shard.failed, "", 0
        self._moved = self._heard = time.monotonic()
        self._stopped = threading.Event()
        self._stopping = threading.Event()
        self._lost = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="gare-heart", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def is_lost(self) -> bool:
        """Whether the shard may be somebody else's by now."""
        return self._lost.is_set()

    @property
    def num_done(self) -> int:
        """Files of the shard that are done, by whoever."""
        return self._done

    def is_over(self) -> bool:
        """Whether to leave off: the run was stopped, or the shard is lost."""
        return self._stopping.is_set() or self._lost.is_set()

    def allow(self, limits: Limits, files: ShardFiles) -> None:
        """Nothing may stand still for longer than the largest file may take."""
        largest = max(file.size for file in (*files.new, *files.changed))
        self._stuck_s = _STUCK_MARGIN_S + limits.total_seconds(largest)

    def begin(self, num_done: int) -> None:
        """So many files were done by others before."""
        self._before = self._done = num_done

    def note(self, progress: IndexProgress) -> None:
        """The indexer has got on."""
        self._done, self._failed = self._before + progress.done, progress.failed
        self.move_on(progress.path)

    def move_on(self, what: str) -> None:
        """Something is being done."""
        self._path, self._moved = what, time.monotonic()

    def stop(self) -> Shard:
        """Be silent from now on; the shard as the ledger has it."""
        self._stopped.set()
        self._thread.join()
        return self._shard

    def _beat(self) -> None:
        while not self._stopped.wait(self._run.lease_s / _BEATS_PER_LEASE):
            still_s = time.monotonic() - self._moved
            try:
                self._shard = self._ledger.beat(
                    self._run,
                    self._shard,
                    done=self._done,
                    failed=self._failed,
                    path=self._path,
                    still_s=round(still_s, 1),
                )
                self._heard = time.monotonic()
                run = self._ledger.run()
                if run is None or run.run_id != self._run.run_id or run.state != "running":
                    self._stopping.set()
            except LostLeaseError:
                self._lost.set()
                return
            except Exception as error:  # storage that is away for a moment
                _log.warning("shard %d cannot say that it is alive: %s", self._shard.number, error)
                if time.monotonic() - self._heard > self._run.lease_s:
                    self._lost.set()
                    return
            if still_s > self._stuck_s:
                self._on_stuck()


def check_sources(roots: Sequence[str]) -> None:
    """Refuse to work where a source cannot be read, as on a machine whose disk is not mounted.

    Raises:
        ClusterError: it names the source.
    """
    for root in roots:
        try:
            if is_remote(root):
                system, path = open_storage(root)
                system.get_file_info([path])
            elif os.path.isdir(root):
                with os.scandir(root) as entries:
                    next(entries)
            else:
                os.stat(root)
        except (OSError, StopIteration, pa.ArrowException) as error:
            reason = (
                "the folder is empty"
                if isinstance(error, StopIteration)
                else str(error).partition("\n")[0][:300]
            )
            raise ClusterError(f"{root} cannot be read on this machine: {reason}") from error


def without_done(
    files: ShardFiles, store: Store, segmentation: str, *, again: bool
) -> tuple[Plan, IndexReport]:
    """What is left of a shard that others have worked on, and what they have done.

    Args:
        again: files that failed are tried again.
    """
    ledger = read_ledger(store)
    plan, report = Plan(), IndexReport()

    def sort_in(file: FoundFile, is_new: bool) -> None:
        known = ledger.get(file.path)
        is_done = (
            known is not None
            and (known.size, known.mtime_ns, known.split) == (file.size, file.mtime_ns, segmentation)
            and not (known.state == "failed" and again)
        )
        if known is None or not is_done:
            (plan.new if known is None else plan.changed).append(file)
        elif known.state == "failed":
            report.failures.append(FileFailure(file.path, known.error_kind, "see gare index --failed"))
        elif is_new:
            report.new += 1
        else:
            report.changed += 1

    for file in files.new:
        sort_in(file, True)
    for file in files.changed:
        sort_in(file, False)
    return plan, report


def add_reports(*reports: IndexReport) -> IndexReport:
    """One report of several parts of a run."""
    total = IndexReport()
    for report in reports:
        for name, value in asdict(report).items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                setattr(total, name, getattr(total, name) + value)
        total.failures += report.failures
        total.interrupted |= report.interrupted
    return total


def options_to_plain(options: IndexOptions) -> dict[str, Any]:
    """Settings as values that JSON has; how many processes decode is each worker's own."""
    plain = asdict(replace(options, num_workers=0))
    return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}


def options_from_plain(plain: Mapping[str, Any], *, num_workers: int) -> IndexOptions:
    """The settings that `options_to_plain` was given."""
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()
    }
    values |= {"limits": Limits(**plain["limits"]), "num_workers": num_workers}
    return IndexOptions(**values)
