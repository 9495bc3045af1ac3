"""A pool of processes: what goes wrong with one item is that item's affair."""

from __future__ import annotations

import os
import time

import pytest

from clips import crash_on_seven
from faults import count_down, sleep_and_tell
from gare.data.workers import Limits, WorkerLost, WorkerPool, map_in_processes

LIMITS = Limits(seconds=1.5, cpu_seconds=60, memory_bytes=2**28)


def run(pool: WorkerPool[tuple[str, int], int], items: list[tuple[str, int]]) -> dict[str, object]:
    """Results of each item, or how it was lost."""
    for item in items:
        pool.submit(item)
    results: dict[str, object] = {}
    received: dict[str, list[int]] = {}
    while pool.unfinished:
        event = pool.next_event(10)
        assert event is not None
        name = event.item[0]
        if event.result is not None:
            received.setdefault(name, []).append(event.result)
        if event.is_last:
            results[name] = event.lost.kind if event.lost else received.get(name, [])
    return results


def test_each_fault_costs_its_own_item_only() -> None:
    names = ["a", "hang", "b", "crash", "c", "exit", "d", "eat", "e", "f", "g"]
    with WorkerPool(count_down, 2, limits=LIMITS) as pool:
        results = run(pool, [(name, 3) for name in names])
    faults = {"hang": "timeout", "crash": "crashed", "exit": "crashed", "eat": "memory"}
    assert results == {name: faults.get(name, [0, 1, 2]) for name in names}


def test_processor_time_is_limited_by_the_system() -> None:
    limits = Limits(seconds=30, cpu_seconds=1)
    started = time.monotonic()
    with WorkerPool(count_down, 1, limits=limits) as pool:
        assert run(pool, [("burn", 1), ("ok", 2)]) == {"burn": "timeout", "ok": [0, 1]}
    assert time.monotonic() - started < 20


def test_a_worker_may_not_write_files() -> None:
    with (
        WorkerPool(count_down, 1, limits=LIMITS) as pool,
        pytest.raises(OSError, match="File too large"),
    ):
        run(pool, [("write", 0)])
    os.unlink("/tmp/gare-should-not-grow")


def test_time_is_counted_from_one_result_to_the_next() -> None:
    limits = Limits(seconds=0.8)
    with WorkerPool(sleep_and_tell, 1, limits=limits) as pool:
        for _ in range(3):
            pool.submit(0.5)
        events = []
        while pool.unfinished:
            time.sleep(0.4)  # a slow reader is not the worker's fault
            events.append(pool.next_event(5))
    assert all(event is not None and event.lost is None for event in events)
    assert len(events) == 9
    assert len({event.result for event in events if event is not None and event.result}) == 1


def test_closing_ends_processes_that_hang() -> None:
    pool = WorkerPool(sleep_and_tell, 2)
    pool.submit(3600.0)
    event = pool.next_event(30)
    assert event is not None
    assert event.result is not None
    pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(event.result, 0)


def test_mapping_keeps_results_with_their_items() -> None:
    results = dict(map_in_processes(crash_on_seven, list(range(40)), num_workers=3))
    lost = results.pop(7)
    assert isinstance(lost, WorkerLost)
    assert results == {number: number * number for number in range(40) if number != 7}


def test_mapping_nothing_gives_nothing() -> None:
    assert list(map_in_processes(crash_on_seven, [], num_workers=2)) == []
    with pytest.raises(ValueError, match="num_workers"):
        list(map_in_processes(crash_on_seven, [1], num_workers=0))
