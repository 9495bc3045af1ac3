"""What a job of `crash_server.py` can do. Every function runs in a process of its own, which may be killed.

Files are decoded in that process, by the function that the workers of `gare index` run: to start workers
takes seconds, and they write nothing. Everything else is as `gare index` does it.
"""

from __future__ import annotations

import importlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance  # noqa: F401 - imported before the fork
import torch

import crash_training
import write_shim
from gare import GARE
from gare.data.decoder_messages import Alive
from gare.data.workers import Event
from gare.errors import MissingLibraryError
from gare.library.index import index_run
from gare.library.index.extract import Job
from gare.library.library import IndexOptions, Library, model_stamp
from gare.library.store import Store, lance_upkeep, open_store, postgres_tables
from library_state import State, read_state

_model: GARE
_stamp: Any


class _PoolHere:
    """Takes the place of `WorkerPool`: the same events, from this process."""

    def __init__(
        self, function: Callable[[Job, int], Iterable[Any]], num_workers: int, *, task: Any, limits: Any
    ) -> None:
        self._task = task
        self._function = function
        self._events: deque[Event[Job, Any]] = deque()
        self.unfinished = 0

    def submit(self, item: Job) -> None:
        self.unfinished += 1
        task = self._task(item)
        messages = self._function(item, task.open())
        parts = [task.take(message) for message in messages if not isinstance(message, Alive)]
        task.close()
        self._events += [Event(item, part) for part in parts if part is not None]
        self._events.append(Event(item, is_last=True))

    def next_event(self, timeout: float | None = None) -> Event[Job, Any] | None:
        event = self._events.popleft()
        self.unfinished -= event.is_last
        return event

    def close(self) -> None:
        pass


TRAINING = (
    "gare.train.training_run",
    "gare.evaluate.model_evaluation",
    "jinja2",
    "torch._dynamo",  # an optimiser imports it in its first step
    "torch.utils.tensorboard",
)


def prepare(model: str, *, trains: bool) -> None:
    """Before any job: everything is imported, the model is loaded, and decoding happens here."""
    global _model, _stamp
    for name in TRAINING if trains else ():
        importlib.import_module(name)
    torch.set_num_threads(1)
    _model = GARE.from_pretrained(model).eval()
    _stamp = model_stamp(_model, "tiny")
    index_run.WorkerPool = _PoolHere  # type: ignore[misc,assignment]
    _tell("replace_files", lambda args: args[2]["path"].to_pylist())
    _tell("delete", lambda args: list(args[0]))


def _tell(name: str, words: Callable[[Any], list[str]]) -> None:
    """What a store acknowledges is noted in the trace."""
    from gare.library.store.lance_store import LanceStore

    real = getattr(LanceStore, name)

    def told(self: Store, *args: Any) -> Any:
        result = real(self, *args)
        write_shim.note(f"{name} {json.dumps(words(args))}")
        return result

    setattr(LanceStore, name, told)


def _open(uri: str, *, create: bool = False) -> Store:
    return open_store(uri, stamp=_stamp, create=create)


def index(
    uri: str,
    root: str,
    *,
    split: str | None = None,
    tags: Sequence[str] = (),
    commit_seconds: float = 0.0,
    upkeep: bool = True,
) -> dict[str, Any]:
    """`gare index ROOT --library URI`, upkeep and all."""
    options = IndexOptions(split=split, tags=tuple(tags), commit_seconds=commit_seconds, prune=True)
    with Library(_open(uri, create=True), _model) as library:
        if not upkeep:
            return index_run.index_folders(library.store, _model, [root], options=options).to_json()
        return library.index(root, options=options).to_json()


def delete(uri: str, ids: Sequence[str]) -> int:
    with Library(_open(uri), _model) as library:
        return library.delete(ids)


def maintain(uri: str, *, index_from: int = 10_000, age_s: float = 3600.0) -> list[str]:
    lance_upkeep.INDEX_FROM_ROWS = postgres_tables.INDEX_FROM_ROWS = index_from  # type: ignore[attr-defined]
    with Library(_open(uri), _model) as library:
        store: Any = library.store
        store.orphan_age = store.version_age = timedelta(seconds=age_s)
        return list(library.maintain().actions)


def repair(uri: str) -> list[str]:
    """`gare check --repair`; what it could not mend."""
    with Library.open(uri, model=_model, create=False) as library:
        return [str(finding) for finding in library.repair().left]


def state(uri: str, *, check: bool = True) -> State:
    """Everything that a library holds; raises where it is damaged."""
    store = _open(uri)
    if check:
        store.check()
    found = read_state(store)
    store.close()
    return found


def recover(uri: str, again: str, arguments: dict[str, Any]) -> tuple[State | None, State, State]:
    """What a crash left, what there is when the task is done again, and what there is after upkeep."""
    left = state(uri) if exists(uri) else None
    globals()[again](uri, **arguments)
    done = state(uri)
    maintain(uri, age_s=0.0)
    return left, done, state(uri)


def search(uri: str, words: str) -> list[tuple[str, float]]:
    with Library(_open(uri), _model) as library:
        return [(hit.path, hit.score) for hit in library.search(words, top=100)]


# --- vectors of several models ------------------------------------------------------------------------------

_OPTIONS = IndexOptions(commit_seconds=0.0)


def index_with(uri: str, root: str, model: str) -> None:
    with Library.open(uri, model=model) as library:
        library.index(root, options=_OPTIONS)


def change_model(uri: str, model: str) -> None:
    with Library.open(uri) as library:
        library.change_model(model, options=_OPTIONS)


def use_model(uri: str, model: str) -> None:
    with Library.open(uri) as library:
        library.use_model(model)


def forget_model(uri: str, model: str) -> None:
    with Library.open(uri) as library:
        library.forget_model(model)


def look_at_sets(uri: str) -> tuple[list[dict[str, Any]], list[tuple[str, float]], list[str]]:
    """The sets of a library, what a search finds, and what a check has to say."""
    with Library.open(uri, read_only=True) as library:
        sets = [library.describe_set(found) for found in library.sets()]
        hits = [(hit.id, round(hit.score, 4)) for hit in library.search("a red ball", top=100)]
        return sets, hits, [str(finding) for finding in library.check().damage]


# ------------------------------------------------------------------------------------------------------------


def exists(uri: str) -> bool:
    try:
        open_store(uri).close()
    except MissingLibraryError:
        return False
    return True


# --- training -----------------------------------------------------------------------------------------------


def train_before(name: str, folder: str, config: str) -> None:
    crash_training.before(name, Path(folder), config)


def train_step(name: str, folder: str, config: str) -> None:
    crash_training.step(name, Path(folder), config)


def train_check(name: str, folder: str, config: str) -> str:
    return crash_training.check(name, Path(folder), config)


def train_outcome(name: str, folder: str, config: str) -> dict[str, Any]:
    return crash_training.outcome(name, Path(folder), config)


def write_eight(folder: str) -> None:
    """Eight writes, of eight kinds, and a flush."""
    place = Path(folder) / "sub"
    place.mkdir()
    handle = os.open(place / "a", os.O_CREAT | os.O_WRONLY)
    os.write(handle, b"abcd")
    os.fsync(handle)
    os.rename(place / "a", place / "b")
    os.ftruncate(handle, 1)
    os.link(place / "b", Path(folder) / "c")
    os.unlink(place / "b")
    place.rmdir()
    os.close(handle)
