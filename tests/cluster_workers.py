"""Workers that can be held, watched and killed at a chosen moment. They run on Ray, in other processes."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gare.cluster.shard_worker import ShardWorker


class WatchedWorker(ShardWorker):
    """Leaves a file with its process id for every shard that it begins, and waits while there is a `hold`.

    Args:
        signs: a folder for these files.
        dies: when to die, once in all for each: "before" a commit, "between" items and ledger, "after" it.
    """

    def __init__(self, *arguments: Any, signs: Path, dies: Sequence[str] = (), **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._signs, self._dies = signs, dies
        store: Any = self._library.store
        self._replace_files, self._record_files = store.replace_files, store.record_files
        self._is_in_commit = False
        store.replace_files, store.record_files = self._replace, self._record

    def index_shard(self, run: Any, shard: Any, *rest: Any) -> Any:
        (self._signs / f"shard-{shard.number}-{shard.attempt}-{os.getpid()}").touch()
        while (self._signs / "hold").exists():
            time.sleep(0.05)
        return super().index_shard(run, shard, *rest)

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
            os.close(os.open(self._signs / f"died-{moment}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os._exit(9)
