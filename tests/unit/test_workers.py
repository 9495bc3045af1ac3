"""A pool of processes: what goes wrong with one item is that item's affair."""

from __future__ import annotations

import os
import selectors
import signal
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from faults import count_down, crash_on_seven, say, tell_and_hang, tell_when_told
from gare.data import fork_server, workers
from gare.data.decoder_messages import Facts
from gare.data.sandbox import probe_box
from gare.data.workers import Limits, WorkerLost, WorkerPool, map_in_processes
from servers import HANG_S, wait_until

LIMITS = Limits(seconds=2, cpu_seconds=60, memory_bytes=2**28)


def run(pool: WorkerPool[tuple[str, int], Facts], items: list[tuple[str, int]]) -> dict[str, object]:
    """Results of each item, or how it was lost."""
    for item in items:
        pool.submit(item)
    results: dict[str, object] = {}
    received: dict[str, list[int]] = {}
    while pool.unfinished:
        event = pool.next_event(HANG_S)
        assert event is not None
        name = event.item[0]
        if event.result is not None:
            received.setdefault(name, []).append(int(event.result.duration))
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
    with WorkerPool(count_down, 1, limits=Limits(seconds=HANG_S, cpu_seconds=1)) as pool:
        pool.submit(("burn", 0))
        event = pool.next_event(HANG_S)
        assert event is not None
        assert event.lost is not None
        assert event.lost.kind == "timeout"
        assert "processor time" in str(event.lost)
        assert run(pool, [("ok", 2)]) == {"ok": [0, 1]}


def test_a_worker_may_not_write_files(tmp_path: Path) -> None:
    for boxed, reason in ((True, "PermissionError"), (False, "File too large")):  # where no kernel helps
        with WorkerPool(count_down, 1, limits=LIMITS, boxed=boxed) as pool:
            pool.submit((f"write {tmp_path / 'large'}", 0))
            event = pool.next_event(HANG_S)
        assert event is not None
        assert event.lost is not None
        assert event.lost.kind == "crashed"
        assert reason in str(event.lost) or not probe_box().layers
    assert not probe_box().layers or (tmp_path / "large").stat().st_size <= LIMITS.written_bytes


class Clock:
    """Stands still unless told."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_time_is_counted_from_one_result_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=clock.monotonic))
    monkeypatch.setattr(workers._Worker, "starved_seconds", lambda self: 0.0)

    def sent(number: int) -> None:
        wait_until(lambda: (tmp_path / f"sent {number}").exists(), f"result {number}")

    with WorkerPool(tell_when_told, 1, limits=Limits(seconds=10), results_ahead=1, boxed=False) as pool:
        pool.submit(tmp_path)
        for number in range(3):
            clock.now += 8
            (tmp_path / f"{number}").touch()
            event = pool.next_event(HANG_S)
            assert event is not None
            assert event.result == say(number)
        for number in range(3, 6):
            (tmp_path / f"{number}").touch()
        sent(5)
        clock.now += 100  # a slow reader is not the worker's fault
        for number in range(3, 6):
            event = pool.next_event(HANG_S)
            assert event is not None
            assert event.result == say(number)
        while (event := pool.next_event(0.1)) is None:
            clock.now += 11
        assert event.lost is not None
        assert event.lost.kind == "timeout"


def test_who_waits_for_a_processor_is_not_hanging() -> None:
    crowd = [workers._Worker(count_down, None, True) for _ in range(2)]
    try:
        for worker in crowd:
            os.sched_setaffinity(worker.pid, {min(os.sched_getaffinity(0))})
            worker.send(("burn", 0), None)
        wait_until(lambda: all(worker.starved_seconds() > 0.1 for worker in crowd), "a crowded processor")
    finally:
        for worker in crowd:
            worker.kill()


def test_closing_ends_processes_that_hang() -> None:
    pool = WorkerPool(tell_and_hang, 2)
    pool.submit(None)
    event = pool.next_event(HANG_S)
    assert event is not None
    assert event.result is not None
    pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(event.result.duration), 0)


def test_mapping_keeps_results_with_their_items() -> None:
    results = dict(map_in_processes(crash_on_seven, list(range(40)), num_workers=3))
    lost = results.pop(7)
    assert isinstance(lost, WorkerLost)
    assert results == {number: say(number * number) for number in range(40) if number != 7}


def test_mapping_nothing_gives_nothing() -> None:
    assert list(map_in_processes(crash_on_seven, [], num_workers=2)) == []
    with pytest.raises(ValueError, match="num_workers"):
        list(map_in_processes(crash_on_seven, [1], num_workers=0))


def test_a_worker_that_ends_while_it_is_given_up_leaves_the_server_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both are told in one round, its end first: who fails sends an error, ends, and is given up for it."""
    ours, control = socket.socketpair()
    parent, status = socket.socketpair()
    old_handler, old_wakeup = signal.getsignal(signal.SIGCHLD), signal.set_wakeup_fd(-1)
    try:
        server = fork_server._Server(control, ())
        server._workers[4321] = status
        key = server._selector.register(status, selectors.EVENT_READ, 4321)
        ended = selectors.SelectorKey(server._waking, server._waking.fileno(), selectors.EVENT_READ, None)
        closed = selectors.SelectorKey(control, control.fileno(), selectors.EVENT_READ, None)
        rounds = iter([[(ended, 1), (key, 1)], [(closed, 1)]])
        monkeypatch.setattr(server._selector, "select", lambda: next(rounds))
        monkeypatch.setattr(fork_server.os, "waitpid", lambda *_: (4321, 0))
        ours.close()
        server.run()
        assert parent.recv(4) == bytes(4)  # how it ended was told
    finally:
        signal.set_wakeup_fd(old_wakeup)
        signal.signal(signal.SIGCHLD, old_handler)
        for each in (control, parent, server._waking, server._wake):
            each.close()
        server._selector.close()
