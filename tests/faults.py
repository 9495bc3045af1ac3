"""Work for a process pool that goes wrong, as decoders may: it hangs, burns, eats memory or crashes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from gare.library.extract import Extracted, Job, extract


def misbehave(how: str) -> None:
    if how == "hang":
        time.sleep(3600)
    if how == "burn":
        while True:
            pass
    if how == "crash":
        os.abort()
    if how == "exit":
        os._exit(3)
    if how == "eat":
        eaten = []
        while True:
            eaten.append(bytearray(64 * 2**20))
    if how == "write":
        with open("/tmp/gare-should-not-grow", "wb") as file:
            file.write(bytes(64 * 2**20))


def count_down(item: tuple[str, int]) -> Iterator[int]:
    """Some results, then what the name says."""
    how, number = item
    yield from range(number)
    misbehave(how)


def sleep_and_tell(seconds: float) -> Iterator[int]:
    yield os.getpid()
    time.sleep(seconds)
    yield os.getpid()


def faulty_extract(job: Job) -> Iterator[Extracted]:
    """As the real one, but a file misbehaves as its name says: `hang.mp4`."""
    misbehave(Path(job.path).stem)
    yield from extract(job)


def slow_extract(job: Job) -> Iterator[Extracted]:
    """As the real one, slow enough to be interrupted in the middle."""
    time.sleep(0.1)
    yield from extract(job)
