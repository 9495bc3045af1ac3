"""Workers that can be held, watched and killed at a chosen moment. They run on Ray, in other processes."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psycopg

from gare.cluster.shard_worker import ShardWorker
from gare.errors import LibraryError
from gare.library.index.object_files import SCRATCH_VARIABLE, Scratch
from gare.library.index.scan import FoundFile


class WatchedWorker(ShardWorker):
    """Leaves a file with its process id for every shard that it begins, and waits while there is a `hold`.

    It leaves the file `refused` when a shard fails, as it does while the storage is away. When it dies, it
    leaves the names of what is in scratch space.

    Args:
        signs: a folder for these files.
        dies: when to die, once in all for each: when an object is "fetched", "before" a commit, "between"
            items and ledger (in PostgreSQL: all rows are written, the transaction is not committed), "after".
    """

    def __init__(self, *arguments: Any, signs: Path, dies: Sequence[str] = (), **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._signs, self._dies = signs, dies
        store: Any = self._library.store
        self._replace_files, self._record_files = store.replace_files, store.record_files
        self._is_in_commit = False
        store.replace_files, store.record_files = self._replace, self._record
        fetch, execute = Scratch.fetch, psycopg.Cursor.execute

        def fetch_and_die(scratch: Scratch, file: FoundFile) -> str:
            copy = fetch(scratch, file)
            self._die_if("fetched")
            return copy

        def send(cursor: Any, statement: Any, *rest: Any, **named: Any) -> Any:
            if self._is_in_commit and str(statement).startswith("DELETE FROM gare_items"):
                self._die_if("between")
            return execute(cursor, statement, *rest, **named)

        Scratch.fetch = fetch_and_die  # type: ignore[method-assign]
        psycopg.Cursor.execute = send  # type: ignore[assignment]

    def index_shard(self, run: Any, shard: Any, *rest: Any) -> Any:
        (self._signs / f"shard-{shard.number}-{shard.attempt}-{os.getpid()}").touch()
        while (self._signs / "hold").exists():
            time.sleep(0.05)
        try:
            return super().index_shard(run, shard, *rest)
        except LibraryError:
            (self._signs / "refused").touch()
            raise

    def _replace(self, items: Any, frames: Any, files: Any) -> None:
        self._die_if("before")
        self._is_in_commit = True
        self._replace_files(items, frames, files)
        self._is_in_commit = False
        self._die_if("after")

    def _record(self, files: Any) -> None:
        if self._is_in_commit:
            self._die_if("between")
        self._record_files(files)

    def _die_if(self, moment: str) -> None:
        if moment not in self._dies:
            return
        try:
            with open(self._signs / f"died-{moment}", "x") as sign:
                sign.write("\n".join(os.listdir(os.environ[SCRATCH_VARIABLE])))
        except FileExistsError:
            return
        os._exit(9)
