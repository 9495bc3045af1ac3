"""Stops every operation at every write, on every store, and prints the table of docs/store.md.

    python tests/crash_points.py                          all of it, which takes an hour
    python tests/crash_points.py --store s3 --stride 10   every tenth write
    python tests/crash_points.py --scene delete --at 17   one point

`make crash` calls it. It ends with 1 if anything was lost, doubled or wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import crash_training
from crash_places import KINDS, CrashPlace, FolderPlace, PostgresPlace, S3Place
from crash_scenes import SCENES, learn_truth, make_clips, make_model, set_stage, try_point
from crash_server import CrashServer
from servers import Postgres, SeaweedFS, server_folder

HEADER = ("store", "operation", "writes", "stops", "wrong")


@contextmanager
def quick_folder() -> Iterator[Path]:
    """A temporary folder, in memory where that is possible: a flush costs nothing there."""
    where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="gare-crash-", dir=where) as folder:
        yield Path(folder).resolve()


@contextmanager
def open_place(kind: str, folder: Path) -> Iterator[CrashPlace]:
    """Where libraries of this kind are, with the server they need."""
    if kind == "folder":
        (folder / "libraries").mkdir()
        yield FolderPlace(folder / "libraries")
        return
    with server_folder() as home:
        if kind == "s3":
            storage = SeaweedFS(home, num_volumes=1, copies=1)
            before = {name: os.environ.get(name, "") for name in storage.environment}
            os.environ.update(storage.environment)
            try:
                yield S3Place(storage)
            finally:
                storage.stop()
                os.environ.update(before)
        else:
            database = Postgres(home / "data").start()
            try:
                yield PostgresPlace(database)
            finally:
                database.stop()


def run_store(kind: str, options: argparse.Namespace, folder: Path) -> Iterator[tuple[object, ...]]:
    """Every operation on one store; what was found."""
    with ExitStack() as stack:
        place = stack.enter_context(open_place(kind, folder))
        model, clips = make_model(folder / "model"), make_clips(folder / "clips")
        server = stack.enter_context(CrashServer(model))
        truth = learn_truth(place, server, clips)
        for name, scene in SCENES.items():
            if options.scene and name not in options.scene:
                continue
            stage = set_stage(scene, place, server, folder / name.replace(" ", "-"), clips, truth)
            num_tried = num_wrong = 0
            for mode in place.modes:
                for at in [options.at] if options.at else stage.points(mode, options.stride, options.offset):
                    num_tried += 1
                    try:
                        try_point(stage, at, mode)
                    except AssertionError as error:
                        num_wrong += 1
                        print(
                            f"{kind}: {str(error)[:200]} … {str(error)[-1500:]}", file=sys.stderr, flush=True
                        )
            yield kind, name, stage.num_writes, num_tried, num_wrong
            place.remove(stage.template)


def run_training(options: argparse.Namespace, folder: Path) -> Iterator[tuple[object, ...]]:
    with CrashServer(make_model(folder / "model"), trains=True) as server:
        for name in crash_training.SCENES:
            if options.scene and name not in options.scene:
                continue
            stage = crash_training.set_stage(name, server, folder / name.replace(" ", "-"))
            num_tried = num_wrong = 0
            for mode in ("before", "torn"):
                for at in [options.at] if options.at else stage.points(mode, options.stride, options.offset):
                    num_tried += 1
                    try:
                        crash_training.try_point(stage, at, mode)
                    except AssertionError as error:
                        num_wrong += 1
                        print(f"training: {error}", file=sys.stderr, flush=True)
            yield "training", name, stage.num_writes, num_tried, num_wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--store", action="append", choices=[*KINDS, "training"])
    parser.add_argument("--scene", action="append", help="an operation; default: all")
    parser.add_argument("--stride", type=int, default=1, help="every so many writes")
    parser.add_argument("--offset", type=int, default=0, help="which of them")
    parser.add_argument("--at", type=int, default=0, help="one write alone")
    options = parser.parse_args()
    print("|", " | ".join(HEADER), "|\n| --- | --- | ---: | ---: | ---: |", flush=True)
    wrong, started = 0, time.monotonic()
    for kind in options.store or (*KINDS, "training"):
        with quick_folder() as folder:
            rows = run_training(options, folder) if kind == "training" else run_store(kind, options, folder)
            for row in rows:
                print(
                    "|", " | ".join(f"{x:,}" if isinstance(x, int) else str(x) for x in row), "|", flush=True
                )
                wrong += int(str(row[-1]))
    print(f"{time.monotonic() - started:,.0f} s", file=sys.stderr)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
