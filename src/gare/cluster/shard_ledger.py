"""The shards of an indexing run, kept in the library: who works on which one, and how far it is.

A run is planned once: its files are cut into shards, which are written before the run is. A worker leases a
shard, says now and then that it is alive, and marks it done. Who sees that the words of a lease have not
changed for `lease_s` of its own clock takes the shard over; the clocks of two machines are never compared.

Nothing depends on a lease being held by one alone: a file is committed as a whole, and twice is once. A lease
saves work that would be done twice.
"""

from __future__ import annotations

import json
import math
import random
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any, Literal

from gare.errors import LibraryError
from gare.library.index.scan import FoundFile
from gare.library.store.shared_records import Records

MOST_FILES, FEWEST_FILES = 2_000, 4
"""Files that a shard has at most and at least: a small run is cut finer, so that all machines have work."""
_SHARDS_PER_MACHINE = 4
LEASE_S = 60.0
MOST_ATTEMPTS = 5
"""A shard that so many workers have lost is given up, and named."""
_RUN = "run"
_TROUBLE = "trouble/"
_GONE = "the run is not in the library any more; run the command again"

RunState = Literal["planning", "running", "stopping", "finished"]
ShardState = Literal["waiting", "leased", "done", "failed"]


@dataclass(frozen=True)
class Run:
    """What all workers of a run must know."""

    run_id: str
    state: RunState
    sources: tuple[str, ...]
    options: Mapping[str, Any]
    """The settings of indexing, as plain values."""
    segmentation: str = ""
    roots: tuple[str, ...] = ()
    read_roots: tuple[str, ...] = ()
    """Those of them that have files to read; others may be empty."""
    num_files: int = 0
    num_unchanged: int = 0
    num_failed_before: int = 0
    skipped_roots: Mapping[str, str] = field(default_factory=dict)
    lease_s: float = LEASE_S
    started: float = 0.0
    """When it was planned or last taken up, by the clock of whoever did; for people."""
    ended: float = 0.0
    """When it was finished, by the clock of whoever said so."""
    done_before: Mapping[str, int] = field(default_factory=dict)
    """Files that each machine had done when it was last taken up."""
    message: str = ""
    """Why it was stopped, if not by somebody's wish."""

    def is_for(self, sources: Sequence[str], options: Mapping[str, Any]) -> bool:
        """Whether it was asked for with the same words."""
        return self.sources == tuple(sources) and _text(dict(self.options)) == _text(dict(options))


@dataclass(frozen=True)
class Shard:
    """Some files of a run. The last one has none: whoever leases it ends the run."""

    number: int
    num_files: int
    state: ShardState = "waiting"
    owner: str = ""
    node: str = ""
    beat: int = 0
    """Raised whenever its owner says that it is alive."""
    attempt: int = 0
    done: int = 0
    failed: int = 0
    path: str = ""
    """What is read now."""
    still_s: float = 0.0
    """How long nothing has become ready."""
    seconds: float = 0.0
    """How long it took."""
    error: str = ""
    report: Mapping[str, Any] = field(default_factory=dict)
    """What was done, once it is."""

    @property
    def num_done(self) -> int:
        """Files that are done, those that failed included."""
        return self.num_files if self.state == "done" else self.done

    @property
    def is_over(self) -> bool:
        """Whether nobody has to work on it any more."""
        return self.state in ("done", "failed")


@dataclass(frozen=True)
class ShardFiles:
    """The files of a shard, as the plan has them."""

    new: tuple[FoundFile, ...]
    changed: tuple[FoundFile, ...]


class LostLeaseError(LibraryError):
    """Another worker has taken the shard over, or the run is not there any more."""


_Row = tuple[str, str, Shard]
"""A shard with its key and its text, as the records have them."""


class ShardLedger:
    """The run of a library and its shards, as the records of the library tell.

    Args:
        clock: seconds of this process alone.
    """

    def __init__(self, records: Records, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._records = records
        self._clock = clock
        self._seen: dict[str, tuple[str, float]] = {}  # key → text, since when

    # --- the run --------------------------------------------------------------------------------------------

    def run(self) -> Run | None:
        """The run that there is; None where there has been none."""
        text = self._records.get(_RUN)
        return None if text is None else _parse_run(text)

    def begin(self, sources: Sequence[str], options: Mapping[str, Any], *, lease_s: float = LEASE_S) -> Run:
        """Claim the library for a new run, which is to be planned now.

        Raises:
            LibraryError: another run is under way.
        """
        now = self.run()
        if now is not None and now.state == "running":
            raise LibraryError(
                f"another run is under way, over {', '.join(now.sources)}. Wait for it, or stop it: "
                "gare index --stop --library …"
            )
        self._records.clear()
        run = Run(uuid.uuid4().hex[:12], "planning", tuple(sources), dict(options), lease_s=lease_s)
        if not self._records.swap(_RUN, None, _text(asdict(run))):
            raise LibraryError("another process plans a run at this moment; wait for it, then try again")
        return run

    def start(
        self,
        run: Run,
        shards: Sequence[ShardFiles],
        gone: Sequence[str],
        problems: Sequence[Mapping[str, Any]] = (),
        **facts: Any,
    ) -> Run:
        """Write the shards, then let workers begin. One more shard is for the end of the run.

        Args:
            facts: what the plan found, by the names of `Run`.
        """
        texts = {_files_key(run, number): _pack(files) for number, files in enumerate(shards)}
        texts[_end_key(run)] = _text({"gone": list(gone), "problems": list(problems)})
        rows = [Shard(number, len(files.new) + len(files.changed)) for number, files in enumerate(shards)]
        rows.append(Shard(len(shards), 0))
        self._records.keep(texts)
        self._records.put({_shard_key(run, row.number): _text(asdict(row)) for row in rows})
        num_files = sum(row.num_files for row in rows)
        started = replace(run, state="running", num_files=num_files, started=time.time(), **facts)
        self._change(run, started)
        return started

    def set_state(self, state: RunState, message: str = "") -> Run | None:
        """Stop, go on or end the run; the run as it is then. One that is finished stays so, and one that is
        still planned has nothing to go on with: to stop it is to end it."""
        run = self.run()
        if run is None or run.state in ("finished", state):
            return run
        if run.state == "planning" and state == "stopping":
            state, message = "finished", message or "it was stopped while it was planned"
        ended = time.time() if state == "finished" else 0.0
        changed = replace(run, state=state, message=message, ended=ended)
        self._change(run, changed)
        return changed

    def take_up(self, run: Run) -> Run:
        """Go on with a run that was stopped, or whose cluster is gone."""
        done_before = count_done(self.shards(run))
        again = replace(run, state="running", message="", started=time.time(), done_before=done_before)
        self._change(run, again)
        return again

    def note_trouble(self, node: str, error: str) -> None:
        """Remember why the worker of a node ended; the next trouble of the node takes its place."""
        self._records.put({f"{_TROUBLE}{node}": error})

    def troubles(self) -> dict[str, str]:
        """Why workers ended, by node."""
        return {key.removeprefix(_TROUBLE): text for key, text in self._records.read(_TROUBLE).items()}

    def _change(self, old: Run, new: Run) -> None:
        if not self._records.swap(_RUN, _text(asdict(old)), _text(asdict(new))):
            raise LostLeaseError(
                "another process has begun, stopped or ended this run; run the command again"
            )

    # --- shards ---------------------------------------------------------------------------------------------

    def shards(self, run: Run) -> list[Shard]:
        """All shards, in their order; the last one ends the run."""
        return [shard for _, _, shard in sorted(chain(*self._parts(run)), key=_by_number)]

    def files(self, run: Run, number: int) -> ShardFiles:
        """The files of a shard."""
        return _unpack(self._get(_files_key(run, number)))

    def end(self, run: Run) -> tuple[list[str], list[dict[str, Any]]]:
        """What the end of the run has to do: files that are gone, and problems of the scan."""
        found = json.loads(self._get(_end_key(run)))
        return found["gone"], found["problems"]

    def _get(self, key: str) -> str:
        text = self._records.kept(key)
        if text is None:
            raise LostLeaseError(_GONE)
        return text

    def lease(self, run: Run, owner: str, node: str) -> Shard | None:
        """A shard to work on; None where all are in work or over. Where all are over, the run is finished.

        Shards that wait are looked for in one part of the records at a time, so that many workers neither
        read all of them nor want the same one.
        """
        rows: list[_Row] = []
        for part in self._parts(run):
            waiting = [row for row in part if row[2].state == "waiting" and row[2].num_files]
            random.shuffle(waiting)
            if (shard := self._take_one(waiting, owner, node)) is not None:
                return shard
            rows += part
        *parts, last = sorted(rows, key=_by_number)
        free = [row for row in parts if self._is_expired(run, row)]
        if all(shard.is_over for _, _, shard in parts):
            if last[2].state == "waiting" or self._is_expired(run, last):
                free.append(last)
            elif last[2].is_over:  # whoever did it died before saying so
                self.set_state("finished")
        return self._take_one(free, owner, node)

    def _take_one(self, free: Sequence[_Row], owner: str, node: str) -> Shard | None:
        for key, text, shard in free:
            if shard.attempt >= MOST_ATTEMPTS:
                self._give_up(key, text, shard)
                continue
            mine = replace(
                shard,
                state="leased",
                owner=owner,
                node=node,
                beat=0,
                attempt=shard.attempt + 1,
                still_s=0.0,
                path="",
            )
            if self._records.swap(key, text, _text(asdict(mine))):
                return mine
        return None

    def beat(self, run: Run, shard: Shard, **changes: Any) -> Shard:
        """Say that the owner of a shard is alive, and how far it is.

        Raises:
            LostLeaseError: somebody else has it.
        """
        alive = replace(shard, beat=shard.beat + 1, **changes)
        self._swap(run, shard, alive)
        return alive

    def finish(self, run: Run, shard: Shard, report: Mapping[str, Any], seconds: float) -> None:
        """A shard is done."""
        done = replace(
            shard, state="done", report=dict(report), seconds=seconds, still_s=0.0, path="", error=""
        )
        self._swap(run, shard, done)

    def give_back(self, run: Run, shard: Shard, error: str = "", *, done: int = 0) -> None:
        """Let another worker have a shard, because of an error or because the run was stopped.

        Args:
            done: files that are done by now; where there are any, the next worker asks the library which.
        """
        attempt = shard.attempt if error else shard.attempt - 1
        left = replace(
            shard, state="waiting", owner="", attempt=attempt, done=max(done, shard.done), error=error
        )
        self._swap(run, shard, left)

    def _swap(self, run: Run, old: Shard, new: Shard) -> None:
        if not self._records.swap(_shard_key(run, old.number), _text(asdict(old)), _text(asdict(new))):
            raise LostLeaseError(f"shard {old.number} was taken over by another worker")

    def _give_up(self, key: str, text: str, shard: Shard) -> None:
        reason = shard.error or f"it was lost by {shard.attempt} workers, the last on {shard.node}"
        at = f", at {shard.path}" if shard.path else ""
        self._records.swap(key, text, _text(asdict(replace(shard, state="failed", error=f"{reason}{at}"))))

    def _parts(self, run: Run) -> Iterator[list[_Row]]:
        """The shards as they are now, some at a time; since when each has these words is noted."""
        is_gone = True
        for found in self._records.parts(f"shard/{run.run_id}/"):
            now = self._clock()
            for key, text in found.items():
                if self._seen.get(key, ("", 0.0))[0] != text:
                    self._seen[key] = text, now
            is_gone &= not found
            yield [(key, text, Shard(**json.loads(text))) for key, text in found.items()]
        if is_gone:
            raise LostLeaseError(_GONE)

    def _is_expired(self, run: Run, row: _Row) -> bool:
        return row[2].state == "leased" and self._clock() - self._seen[row[0]][1] >= run.lease_s


def count_done(shards: Iterable[Shard]) -> dict[str, int]:
    """Files that are done, those that failed included, by machine; "" for those of a shard that waits."""
    done: dict[str, int] = defaultdict(int)
    for shard in shards:
        done[shard.node] += shard.num_done
    return dict(done)


def choose_shard_size(num_files: int, num_machines: int) -> int:
    """How many files a shard has: so many that each machine gets a few shards.

    >>> [choose_shard_size(num_files, 3) for num_files in (10, 600, 1_000_000)]
    [4, 50, 2000]
    """
    wanted = math.ceil(num_files / (_SHARDS_PER_MACHINE * max(num_machines, 1)))
    return min(max(wanted, FEWEST_FILES), MOST_FILES)


def cut_into_shards(
    new: Sequence[FoundFile], changed: Sequence[FoundFile], *, files_per_shard: int = MOST_FILES
) -> list[ShardFiles]:
    """The files of a plan in shards, in the order of their names: what lies together is read together."""
    changed_paths = {file.path for file in changed}
    files = sorted([*new, *changed], key=lambda file: file.path)
    parts = [files[start : start + files_per_shard] for start in range(0, len(files), files_per_shard)]
    return [
        ShardFiles(
            tuple(file for file in part if file.path not in changed_paths),
            tuple(file for file in part if file.path in changed_paths),
        )
        for part in parts
    ]


def _by_number(row: _Row) -> int:
    return row[2].number


def _shard_key(run: Run, number: int) -> str:
    return f"shard/{run.run_id}/{number:06}"


def _files_key(run: Run, number: int) -> str:
    return f"files/{run.run_id}/{number:06}"


def _end_key(run: Run) -> str:
    return f"end/{run.run_id}"


def _text(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True, ensure_ascii=False)


def _parse_run(text: str) -> Run:
    values = json.loads(text)
    lists = {name: tuple(values.get(name, ())) for name in ("sources", "roots", "read_roots")}
    return Run(**{**values, **lists})


def _pack(files: ShardFiles) -> str:
    return _text(
        {
            name: [[file.path, file.size, file.mtime_ns] for file in some]
            for name, some in (("new", files.new), ("changed", files.changed))
        }
    )


def _unpack(text: str) -> ShardFiles:
    found = json.loads(text)
    return ShardFiles(*(tuple(FoundFile(*file) for file in found[name]) for name in ("new", "changed")))
