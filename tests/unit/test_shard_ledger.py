"""Leases in the records of a library: each shard is worked on, whoever dies, and none for ever."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from gare.cluster import index_cluster
from gare.cluster.index_cluster import Supervisor, WorkerKind, _Rest
from gare.cluster.ray_link import Node
from gare.cluster.run_status import RunStatus
from gare.cluster.shard_ledger import (
    MOST_ATTEMPTS,
    LostLeaseError,
    Run,
    ShardLedger,
    choose_shard_size,
    cut_into_shards,
)
from gare.errors import LibraryError
from gare.library.index.scan import FoundFile
from gare.library.store import open_store, shared_records
from gare.library.store.lance_storage import with_retries
from gare.library.store.lance_table import LanceTable
from gare.library.store.shared_records import LanceRecords
from stores import STAMP

LEASE_S = 10.0
FILES = [FoundFile(f"/videos/{number}.mp4", number, number) for number in range(5)]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(tmp_path: Path, clock: Clock) -> ShardLedger:
    return ShardLedger(open_store(tmp_path / "lib", stamp=STAMP, create=True).records(), clock=clock)


@pytest.fixture
def run(ledger: ShardLedger) -> Run:
    run = ledger.begin(["/videos"], {"split": None}, lease_s=LEASE_S)
    shards = cut_into_shards(FILES[:4], FILES[4:], files_per_shard=2)
    return ledger.start(run, shards, ["/videos/gone.mp4"])


def finish_all(ledger: ShardLedger, run: Run) -> list[int]:
    numbers = []
    while (shard := ledger.lease(run, "a", "node")) is not None:
        ledger.finish(run, shard, {"new": shard.num_files, "failures": []}, 1.0)
        numbers.append(shard.number)
    return numbers


def test_a_small_run_has_work_for_every_machine_and_a_large_one_no_large_shards():
    for num_files in (1, 50, 777, 100_000):
        for num_machines in (0, 1, 3, 64):
            size = choose_shard_size(num_files, num_machines)
            assert 4 <= size <= 2_000
            assert num_files / size >= min(num_machines, num_files // 4)


def test_every_file_is_in_one_shard(ledger, run):
    files = [ledger.files(run, number) for number in range(3)]
    assert [file for part in files for file in (*part.new, *part.changed)] == FILES
    assert files[2].changed == (FILES[4],)
    assert ledger.end(run)[0] == ["/videos/gone.mp4"]
    assert run.num_files == 5


def test_each_shard_is_leased_once_and_the_last_one_when_all_others_are_over(ledger, run):
    held = [ledger.lease(run, "a", "node") for _ in range(3)]
    assert sorted(shard.number for shard in held) == [0, 1, 2]
    assert ledger.lease(run, "b", "node") is None
    for shard in held:
        ledger.finish(run, shard, {}, 1.0)
    assert ledger.lease(run, "b", "node").number == 3


def test_a_lease_whose_words_do_not_change_is_taken_over(ledger, run, clock):
    held = [ledger.lease(run, "a", "node") for _ in range(3)]
    assert ledger.lease(run, "b", "node") is None
    clock.now += LEASE_S - 1
    alive = ledger.beat(run, held[0], done=1)
    assert ledger.lease(run, "b", "node") is None
    clock.now += 1
    taken = {ledger.lease(run, "b", "node").number for _ in range(2)}
    assert taken == {held[1].number, held[2].number}
    with pytest.raises(LostLeaseError, match="taken over"):
        ledger.beat(run, held[1])
    with pytest.raises(LostLeaseError, match="taken over"):
        ledger.finish(run, held[2], {}, 1.0)
    ledger.finish(run, alive, {}, 1.0)


def test_a_run_whose_last_worker_died_before_saying_so_is_finished_by_the_next(ledger, run):
    finish_all(ledger, run)
    assert ledger.lease(run, "b", "node") is None
    assert ledger.run().state == "finished"


def test_a_lease_reads_one_table_of_the_records_where_a_shard_waits_in_it(tmp_path, monkeypatch):
    ledger = ShardLedger(open_store(tmp_path / "many", stamp=STAMP, create=True).records())
    files = [FoundFile(f"/videos/{number}.mp4", 1, 1) for number in range(300)]
    run = ledger.start(ledger.begin(["/videos"], {}), cut_into_shards(files, [], files_per_shard=1), [])
    read: list[LanceTable] = []
    read_table = LanceRecords._read_all

    def count(records: LanceRecords, table: LanceTable) -> dict[str, str]:
        read.append(table)
        return read_table(records, table)

    monkeypatch.setattr(LanceRecords, "_read_all", count)
    leased = {ledger.lease(run, "a", "node").number for _ in range(20)}
    assert len(leased) == 20
    assert len(read) == 20
    assert len(set(read)) > 1  # two workers that begin together rarely read the same one


def test_what_is_kept_is_not_written_again_however_often_a_lease_changes(ledger, run, tmp_path):
    before = sorted(
        path.name for path in (tmp_path / "lib" / "records" / "kept").rglob("*") if path.is_file()
    )
    shard = ledger.lease(run, "a", "node")
    for _ in range(40):  # the tables of leases are compacted meanwhile
        shard = ledger.beat(run, shard)
    after = sorted(path.name for path in (tmp_path / "lib" / "records" / "kept").rglob("*") if path.is_file())
    assert before == after != []
    files = ledger.files(run, shard.number)  # any of the three was leased
    assert len(files.new) + len(files.changed) == shard.num_files


def test_a_table_of_leases_is_read_again_only_when_it_has_changed(tmp_path, monkeypatch):
    place = tmp_path / "lib"
    records = open_store(place, stamp=STAMP, create=True).records()
    records.put({f"key {number}": "old" for number in range(100)})
    other = open_store(place).records()
    assert set(other.read().values()) == {"old"}
    versions: list[int] = []
    read_texts = shared_records._texts

    def count(rows: pa.Table) -> dict[str, str]:
        versions.append(rows.num_rows)
        return read_texts(rows)

    monkeypatch.setattr(shared_records, "_texts", count)
    assert len(other.read("key 1")) == 11
    assert versions == []
    assert records.swap("key 7", "old", "new")
    assert not records.swap("key 8", "never", "new")  # and makes no version
    assert other.read()["key 7"] == "new"
    assert len([1 for num_rows in versions if num_rows > 1]) == 1


def test_a_shard_that_every_worker_loses_is_given_up_and_named(ledger, run, clock):
    for _ in range(MOST_ATTEMPTS):
        shard = ledger.lease(run, "a", "node7")
        ledger.beat(run, shard, path="/videos/evil.mp4")
        while (other := ledger.lease(run, "b", "node")) is not None:
            ledger.finish(run, other, {}, 1.0)
        ledger.lease(run, "b", "node")  # sees the words of the lease
        clock.now += LEASE_S
    assert ledger.lease(run, "b", "node") is None  # it is given up now
    assert ledger.lease(run, "b", "node").number == 3
    failed = [shard for shard in ledger.shards(run) if shard.state == "failed"]
    assert len(failed) == 1
    assert "node7" in failed[0].error


def test_stopping_gives_shards_back_and_costs_no_attempt(ledger, run):
    shard = ledger.lease(run, "a", "node")
    ledger.set_state("stopping")
    ledger.give_back(run, shard)
    assert [shard.attempt for shard in ledger.shards(run)] == [0] * 4
    assert ledger.set_state("running").state == "running"
    assert finish_all(ledger, run)[-1] == 3


def test_a_run_that_is_stopped_comes_to_rest_even_where_a_worker_died(ledger, run, clock):
    rest, shard = _Rest(clock), ledger.lease(run, "a", "node")
    assert not rest.has_come(run, ledger.shards(run))
    clock.now += 2 * LEASE_S
    assert not rest.has_come(run, ledger.shards(run))
    clock.now += 0.1
    assert rest.has_come(run, ledger.shards(run))
    ledger.give_back(run, shard)
    assert _Rest(clock).has_come(run, ledger.shards(run))


def test_a_machine_that_joins_with_another_version_gets_no_work_and_all_new_ones_are_asked_at_once(
    ledger, monkeypatch
):
    asked = []

    def unfit_nodes(nodes):
        asked.append([node.name for node in nodes])
        return {node.name: "gare 0.0.1" for node in nodes if node.name == "old"}

    monkeypatch.setattr(index_cluster, "unfit_nodes", unfit_nodes)
    monkeypatch.setattr(index_cluster, "find_actor", lambda name: None)
    monkeypatch.setattr(Supervisor, "_look_on", lambda self: None)
    first, old, second = (Node(f"id {name}", name, 1, 0, False) for name in ("first", "old", "second"))
    supervisor = Supervisor("run", WorkerKind("library"))
    for nodes in ([first, old], [first, old, second], [first, old, second]):
        supervisor._refuse_unfit(nodes, ledger)
    assert asked == [["first", "old"], ["second"]]
    assert not supervisor._look_after(old)
    assert "has gare 0.0.1, and the run needs gare" in ledger.troubles()["old"]


def test_a_run_without_machines_waits_for_some_and_not_for_ever(ledger, run, monkeypatch):
    monkeypatch.setattr(index_cluster, "alive_nodes", list)
    monkeypatch.setattr(Supervisor, "_look_on", lambda self: None)
    supervisor = Supervisor(run.run_id, WorkerKind("library"))
    supervisor._look_after_all(ledger)
    assert ledger.run().state == "running"
    monkeypatch.setattr(index_cluster, "OUTAGE_S", -1.0)
    supervisor._look_after_all(ledger)
    assert ledger.run().state == "finished"
    assert ledger.run().message.startswith("no machine can work. no machine of the cluster has a processor")
    assert ledger.begin(["/videos"], {}).state == "planning"  # what is left is planned anew


def test_a_run_that_is_taken_up_counts_its_speed_from_then_on(ledger, run):
    first = ledger.lease(run, "a", "node")
    ledger.finish(run, first, {}, 1.0)
    ledger.set_state("stopping", "somebody wished it")
    again = ledger.take_up(ledger.run())
    assert (again.state, again.message, again.done_before["node"]) == ("running", "", first.num_files)
    status = RunStatus.read(ledger)
    assert status.rates() == {"node": 0.0}
    assert "to go" not in status.line()
    second = ledger.lease(again, "b", "other")
    ledger.finish(again, second, {}, 1.0)
    rates = RunStatus.read(ledger).rates()
    assert rates["node"] == 0.0 < rates["other"]


def test_the_line_says_what_is_waited_for_and_which_shard_stands_still(ledger, run):
    started = RunStatus.read(ledger)
    assert started.line() == "0 of 5 files, 0 of 3 shards, 0 failed, the machines start"
    late = RunStatus(replace(run, started=time.time() - 1000.0), started.shards, {})
    assert re.search(r"no machine has begun for 1\d{3} s: is none there", late.line())
    ledger.note_trouble("node8", "/videos cannot be read on this machine")
    assert RunStatus.read(ledger).line().endswith("node8: /videos cannot be read on this machine")
    shard = ledger.beat(run, ledger.lease(run, "a", "node7"), path="/videos/evil.mp4", still_s=90.0)
    assert "start" not in RunStatus.read(ledger).line()
    assert RunStatus.read(ledger).stuck() == []
    shard = ledger.beat(run, shard, still_s=180.5)
    status = RunStatus.read(ledger)
    assert status.stuck() == [shard]
    assert f"shard {shard.number} on node7 stands still for 180 s at /videos/evil.mp4" in status.line()
    assert status.to_json()["shards"][shard.number]["still_s"] == 180.5


def test_a_run_that_is_stopped_while_it_is_planned_can_be_given_again(ledger):
    run = ledger.begin(["/videos"], {})
    assert ledger.set_state("stopping").state == "finished"
    assert "planned" in RunStatus.read(ledger).run.message
    with pytest.raises(LostLeaseError, match="another process has begun, stopped"):
        ledger.start(run, [], [])
    assert ledger.begin(["/videos"], {}).state == "planning"


def test_a_run_that_is_over_took_as_long_as_it_did_and_says_what_each_shard_has(ledger, run, monkeypatch):
    finish_all(ledger, run)
    ledger.set_state("finished")
    first = RunStatus.read(ledger).to_json()
    monkeypatch.setattr(time, "time", lambda: run.started + 1e6)
    later = RunStatus.read(ledger).to_json()
    assert later == first
    assert later["seconds"] < 1e6
    assert [(shard["state"], shard["done"]) for shard in later["shards"][:3]] == [
        ("done", 2), ("done", 2), ("done", 1)
    ]  # fmt: skip


def test_one_run_at_a_time(ledger, run):
    with pytest.raises(LibraryError, match="another run is under way, over /videos"):
        ledger.begin(["/other"], {})
    finish_all(ledger, run)
    ledger.set_state("finished")
    other = ledger.begin(["/other"], {})
    with pytest.raises(LostLeaseError):
        ledger.shards(run)
    assert ledger.run() == other


def test_a_planner_that_was_overtaken_is_told(ledger):
    first = ledger.begin(["/videos"], {})
    ledger.begin(["/videos"], {})
    with pytest.raises(LostLeaseError, match="another process has begun"):
        ledger.start(first, [], [])


def test_a_run_knows_what_it_was_asked_for(run):
    assert run.is_for(["/videos"], {"split": None})
    assert not run.is_for(["/videos"], {"split": "whole"})
    assert not run.is_for(["/others"], {"split": None})


@pytest.mark.parametrize("words", ["Too many concurrent writers. Attempted 10 retries.", "commit conflict"])
def test_a_writer_that_lost_tries_again_whatever_lance_calls_it(words):
    answers = [OSError(words), None]

    def write() -> str:
        if (error := answers.pop(0)) is not None:
            raise error
        return "written"

    assert with_retries(write) == "written"
