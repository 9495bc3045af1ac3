"""Work spread over processes that may crash, without losing the run or the machine's memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import BaseContext
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_processes(
    function: Callable[[Item], Result], items: Sequence[Item], *, num_workers: int
) -> Iterator[tuple[Item, Result | BrokenProcessPool]]:
    """Each item with its result, in the order they finish; one that kills its process comes with the error.

    Only a few items per worker are in flight, so results never pile up.
    """
    if num_workers < 1:
        raise ValueError(f"num_workers must be at least 1, got {num_workers}")
    waiting = deque(items)
    while waiting:
        in_flight: dict[Future[Result], Item] = {}
        with _pool(function, min(num_workers, len(waiting))) as pool:
            try:
                while waiting or in_flight:
                    while waiting and len(in_flight) < 2 * num_workers:
                        in_flight[pool.submit(function, waiting[0])] = waiting[0]
                        waiting.popleft()
                    for future in wait(in_flight, return_when=FIRST_COMPLETED).done:
                        result = future.result()
                        yield in_flight.pop(future), result
            except BrokenProcessPool:
                suspects = list(in_flight.values())
            else:
                return
        # One of them took its process down; alone in a process, each shows whether it was the one.
        for item in suspects:
            yield item, _run_alone(function, item)


def _run_alone(function: Callable[[Item], Result], item: Item) -> Result | BrokenProcessPool:
    with _pool(function, 1) as pool:
        try:
            return pool.submit(function, item).result()
        except BrokenProcessPool as error:
            return error


def _pool(function: Callable[..., object], num_workers: int) -> ProcessPoolExecutor:
    # Not forked from here: this process may have threads (torch does), and a fork copies their locks. A fork
    # server has none; it imports the module once, and workers share that memory.
    if "forkserver" in multiprocessing.get_all_start_methods():
        context: BaseContext = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([function.__module__])
    else:
        context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(num_workers, mp_context=context, initializer=_end_with_parent)


def _end_with_parent() -> None:
    """Without this, workers outlive a parent that was killed. Ctrl-C is the parent's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
