"""Work for a process pool that goes wrong, as decoders may: it hangs, burns, eats memory or crashes."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from gare.data.decoder_messages import Alive, Facts, Frame, SegmentEnd
from gare.library.index.extract import Job, Message, extract


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
            eaten.append(bytes(64 * 2**20))  # asked for and never touched, which costs no time
    if how.startswith("write "):
        with open(how.removeprefix("write "), "wb") as file:
            file.write(bytes(64 * 2**20))


def say(number: int) -> Facts:
    """A number as a message."""
    return Facts(float(number), 0, 0)


def count_down(item: tuple[str, int]) -> Iterator[Facts]:
    """Some results, then what the name says."""
    how, number = item
    yield from map(say, range(number))
    misbehave(how)


def crash_on_seven(number: int) -> Iterator[Facts]:
    """Work for a process pool that takes its process down once, as a decoder may."""
    if number == 7:
        os._exit(139)
    yield say(number * number)


def tell_and_hang(_: object) -> Iterator[Facts]:
    yield say(os.getpid())
    misbehave("hang")


def tell_when_told(place: Path) -> Iterator[Facts]:
    """Numbers from 0, each when a file of that name is there; `sent N` says that N has left."""
    number = 0
    while True:
        while not (place / f"{number}").exists():
            time.sleep(0.01)
        yield say(number)
        (place / f"sent {number}").touch()
        number += 1


def refuse(job: Job, descriptor: int) -> Iterator[Message]:
    """Nothing may be decoded."""
    raise AssertionError(job.path)


def faulty_extract(job: Job, descriptor: int) -> Iterator[Message]:
    """As the real one, but a file misbehaves as its name says: `hang.mp4`."""
    misbehave(Path(job.path).stem)
    yield from extract(job, descriptor)


def lying_extract(job: Job, descriptor: int) -> Iterator[Message]:
    """As a decoder that was taken over: it answers what was not asked for, as the name of the file says."""
    how = Path(job.path).stem
    frame = np.zeros((job.image_size, job.image_size, 3), dtype=np.uint8)
    jpeg = b"\xff\xd8\xff\xd9"
    if how == "large":
        yield Frame(0.0, np.zeros((2 * job.image_size, 2 * job.image_size, 3), dtype=np.uint8))
    if how == "flat":
        yield Frame(0.0, frame[:1])
    if how == "many":
        for number in range(job.num_frames + 1):
            yield Frame(float(number), frame)
    if how == "back":
        yield Frame(1.0, frame)
        yield Frame(0.5, frame)
    if how == "miscounted":
        yield Frame(0.0, frame)
        yield SegmentEnd(0.0, 1.0, 2, jpeg, jpeg)
    if how == "script":
        yield Frame(0.0, frame)
        yield SegmentEnd(0.0, 1.0, 1, b"<script>", jpeg)
    if how == "reversed":
        yield Frame(0.0, frame)
        yield SegmentEnd(5.0, 1.0, 1, jpeg, jpeg)
    if how == "late":
        yield Facts(1.0, 64, 48)
        yield Frame(0.0, frame)
    if how == "pickle":
        os.write(3, pickle.dumps((os.system, "true")))
    yield from extract(job, descriptor)


def slow_extract(job: Job, descriptor: int) -> Iterator[Message]:
    """As the real one, slow enough to be interrupted in the middle."""
    time.sleep(0.1)
    yield from extract(job, descriptor)


def show_life(_: object) -> Iterator[Alive]:
    """Signs of life for ever."""
    while True:
        time.sleep(0.01)
        yield Alive()
