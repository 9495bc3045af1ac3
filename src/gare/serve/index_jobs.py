"""Indexing (and audits) started from the page: one at a time, each in a process of its own.

The order is noted in the library before the process starts and crossed out when it ends. A server that was
killed finds it there and takes it up again; what was indexed before is not read twice.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from gare.library.library import Library
from gare.library.store.read_deadline import unlimited
from gare.serve.observability import Metrics
from gare.serve.problems import Problem
from gare.serve.serve_options import ServeOptions

JOB_NOTE = "serve_job"
_KEPT = 20
_STOP_S = 15.0
_log = logging.getLogger("gare.serve")

Kind = Literal["index", "audit", "change"]
State = Literal["running", "done", "cancelled", "interrupted", "failed"]


@dataclass
class Job:
    """One run of indexing, one change of the model, or one audit, and how far it is."""

    id: str
    kind: Kind
    folders: list[str]
    retry_failed: bool = False
    state: State = "running"
    done: int = 0
    total: int | None = None
    """The number of files to do; None until the folders were walked."""
    failed: int = 0
    path: str = ""
    """The file that was finished last."""
    started: str = field(default_factory=lambda: _now())
    finished: str | None = None
    model: str = ""
    """The model to change to, for a `change`."""
    resumed: bool = False
    """Taken up again after the server had ended."""
    message: str = ""
    report: dict[str, Any] | None = None

    @property
    def is_over(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self.state != "running"


class Jobs:
    """The jobs of this server, one running at a time."""

    def __init__(self, library: Library, model: str | None, options: ServeOptions, metrics: Metrics) -> None:
        self._library, self._model, self._options, self._metrics = library, model, options, metrics
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._num_followers = 0
        self._is_closing = False
        self._is_cancelled = False

    # --- from outside ---------------------------------------------------------------------------------------

    def all(self) -> list[Job]:
        """The newest first."""
        return list(reversed(self._jobs.values()))

    def get(self, job_id: str) -> Job:
        """A job by its id; an error if there is none."""
        if job_id not in self._jobs:
            raise Problem(404, "no_such_job", f"there is no job '{job_id}'")
        return self._jobs[job_id]

    @property
    def running(self) -> Job | None:
        """The job that runs now, if any."""
        return next((job for job in self._jobs.values() if not job.is_over), None)

    async def start(
        self, kind: Kind, folders: Sequence[str], *, retry_failed: bool = False, model: str = ""
    ) -> Job:
        """Start a job; refused while another one runs."""
        if self._is_closing:
            raise Problem(503, "closing", "the server is shutting down", retry_after=5)
        if self.running is not None:
            raise Problem(409, "job_running", "a job is running already; wait for it, or cancel it")
        job = Job(secrets.token_hex(6), kind, list(folders), retry_failed, model=model)
        self._register(job)
        try:
            await asyncio.to_thread(self._note, job)
        except Exception as error:
            job.state, job.message, job.finished = "failed", str(error), _now()
            raise
        self._launch(job)
        return job

    async def resume(self) -> Job | None:
        """Take up what a server that ended left unfinished."""
        try:
            note = (await asyncio.to_thread(self._library.home.get_notes)).get(JOB_NOTE)
        except Exception as error:
            _log.error("job", extra={"fields": {"problem": f"no job could be looked up: {error}"}})
            return None
        if not note or self.running is not None:
            return None
        order = json.loads(note)
        job = Job(
            order["id"],
            order["kind"],
            order["folders"],
            order["retry_failed"],
            model=order.get("model", ""),
            resumed=True,
        )
        self._register(job)
        self._launch(job)
        return job

    async def cancel(self, job_id: str) -> Job:
        """Ask it to end; what is committed stays."""
        job = self.get(job_id)
        if not job.is_over:
            self._is_cancelled = True
            self._ask_to_end()
        return job

    async def follow(self, job_id: str) -> AsyncIterator[Job]:
        """The job now and after every change, until it is over."""
        if self._num_followers >= self._options.max_streams:
            raise Problem(503, "busy", "too many watch already; try again later", retry_after=5)
        job = self.get(job_id)
        self._num_followers += 1
        try:
            while True:
                changed, is_last = self._changed, job.is_over or self._is_closing
                yield job
                if is_last:
                    return
                await changed.wait()
        finally:
            self._num_followers -= 1

    def stop_following(self) -> None:
        """Streams would keep a server from ending."""
        self._is_closing = True
        self._tell()

    async def close(self) -> None:
        """End the job where nothing is half done. Its note stays: the next server goes on."""
        self.stop_following()
        if self._task is None or self._task.done():
            return
        self._ask_to_end()
        try:
            await asyncio.wait_for(asyncio.shield(self._task), _STOP_S)
        except TimeoutError:
            if self._process is not None:
                self._process.kill()
            await self._task

    # --- the process ----------------------------------------------------------------------------------------

    def _register(self, job: Job) -> None:
        self._jobs[job.id] = job
        while len(self._jobs) > _KEPT:
            self._jobs.popitem(last=False)
        self._is_cancelled = False

    def _launch(self, job: Job) -> None:
        self._metrics.job_running.set(1)
        self._task = asyncio.create_task(self._run(job))

    async def _run(self, job: Job) -> None:
        outcome: State = "failed"
        try:
            outcome = await self._run_process(job)
            if outcome != "interrupted":
                await asyncio.to_thread(self._note, None)
            if job.kind == "change" and outcome == "done":
                await asyncio.to_thread(self._library.refresh)  # who sees the end sees the new model
        except Exception as error:
            _log.exception("job")
            outcome, job.message = "failed", f"the job could not be run: {error}"
        # Only now: whoever sees that it is over may start the next one, which has a note of its own.
        job.state, job.finished = outcome, _now()
        self._metrics.job_running.set(0)
        self._process = None
        _log.info("job", extra={"fields": {"job": job.id, "state": job.state, "done": job.done}})
        self._tell()

    async def _run_process(self, job: Job) -> State:
        cores = max(1, (os.cpu_count() or 2) // 2)  # the other half answers searches
        order = {
            "kind": job.kind,
            "library": self._library.home.address,
            "model": job.model or (self._model if self._library.has_given_model else None),
            "folders": job.folders,
            "retry_failed": job.retry_failed,
            "num_workers": cores,
        }
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "gare.serve.job_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": str(cores)},
            start_new_session=True,  # Ctrl-C is for the server, which then ends this in order
            limit=2**20,
        )
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        # Not as an argument: everyone on the machine can read those, and the address may hold a password.
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        if self._is_cancelled or self._is_closing:
            self._ask_to_end()
        outcome: State | None = None
        async for line in self._process.stdout:
            outcome = self._take(job, json.loads(line)) or outcome
        code = await self._process.wait()
        if outcome is not None:
            return outcome
        if self._is_cancelled or self._is_closing:
            return self._ended_state()
        job.message = f"the process of the job ended unexpectedly (exit code {code})"
        return "failed"

    def _take(self, job: Job, said: dict[str, Any]) -> State | None:
        """Note what the process says; how it ended, if that is what it says."""
        if said["event"] == "progress":
            job.done, job.total = said["done"], said["total"]
            job.failed, job.path = said["failed"], said["path"]
            self._tell()
            return None
        job.report, job.message = said.get("report"), said.get("message", "")
        match said["event"]:
            case "done":
                return "done"
            case "interrupted":
                return self._ended_state()
        return "failed"

    def _ended_state(self) -> State:
        return "cancelled" if self._is_cancelled else "interrupted"

    def _ask_to_end(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _note(self, job: Job | None) -> None:
        order = (
            {name: asdict(job)[name] for name in ("id", "kind", "folders", "retry_failed", "model")}
            if job
            else None
        )
        with unlimited():  # the request that started the job may be over
            self._library.home.set_notes({JOB_NOTE: json.dumps(order) if order else ""})


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
