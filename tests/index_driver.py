"""Runs indexers in processes of their own, to be killed: `python index_driver.py TASK ROOT LIBRARY MODEL …`.

Imports are paid once; every attempt is a fork of this process, which has no threads yet.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from typing import Any

from faults import slow_extract
from gare import GARE
from gare.library.index.index_run import IndexOptions, index_folders
from gare.library.library import model_stamp
from gare.library.store import open_store

_UNREADABLE = 2
_DONE, _COMMITTED = b".", b"!"  # a file, or items of some files


def run_index(
    root: str, library: str, model_folder: str, signs_of_life: int, split: str | None = None
) -> None:
    model = GARE.from_pretrained(model_folder)
    store = open_store(library, stamp=model_stamp(model, "tiny"), create=True)
    replace_files = store.replace_files

    def replace_and_tell(items: Any, frames: Any, files: Any) -> None:
        replace_files(items, frames, files)
        if items.num_rows:
            os.write(signs_of_life, _COMMITTED)

    store.replace_files = replace_and_tell  # type: ignore[method-assign]
    report = index_folders(
        store,
        model,
        [root],
        options=IndexOptions(num_workers=2, commit_seconds=0.05, split=split),
        on_progress=lambda progress: os.write(signs_of_life, _DONE),
        extractor=slow_extract,
    )
    print(json.dumps(report.to_json()), flush=True)
    os._exit(0)


def fork_index(root: str, library: str, model_folder: str, split: str | None = None) -> tuple[int, int]:
    """The process, and where it writes a byte for every file that is done, and for every commit."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    try:
        run_index(root, library, model_folder, writing, split)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def kill_often(root: str, library: str, model_folder: str, num_kills: int) -> None:
    """Kill −9 at random moments, while it starts or while it works, then let one finish."""
    moments = random.Random(0)
    num_killed = 0
    for number in range(num_kills):
        child, signs_of_life = fork_index(root, library, model_folder)
        if number % 3:
            # Those are noted at once; then work has begun.
            wait_for(signs_of_life, _DONE, _UNREADABLE + moments.randint(1, 4))
            if number == 1:  # on a busy machine no other one may get so far
                wait_for(signs_of_life, _COMMITTED, 1)
            time.sleep(moments.uniform(0, 0.1))
        else:
            time.sleep(moments.uniform(0, 1))
        os.kill(child, signal.SIGKILL)
        num_killed += os.WIFSIGNALED(os.waitpid(child, 0)[1])
        os.close(signs_of_life)
    finish(fork_index(root, library, model_folder)[0])
    print(json.dumps({"num_killed": num_killed}))


def wait_for(signs_of_life: int, sign: bytes, number: int) -> None:
    """Until there were so many of these signs, or the process has ended."""
    while number and (found := os.read(signs_of_life, 1)):
        number -= found == sign


def finish(child: int) -> None:
    status = os.waitpid(child, 0)[1]
    assert status == 0, status


def main() -> None:
    task, root, library, model_folder, *rest = sys.argv[1:]
    if task == "kill":
        kill_often(root, library, model_folder, int(rest[0]))
    elif task == "splits":
        for child, _ in [fork_index(root, library, model_folder, split) for split in rest]:
            finish(child)
    else:
        for child, _ in [fork_index(root, library, model_folder) for _ in range(int(rest[0]))]:
            finish(child)


if __name__ == "__main__":
    main()
