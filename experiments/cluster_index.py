"""What a cluster costs and gives: shards by two workers beside one machine, and up to 64 workers that sleep.

    python experiments/cluster_index.py pair FOLDER      two Ray nodes of one core, beside `gare index` on two
    python experiments/cluster_index.py asleep [LIBRARY]  throughput by number of workers that sleep

Both print a table. The second has real leases in a real library; only the encoder is not there, so that it
shows what leases cost and nothing else. Numbers are ratios within one run.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from pathlib import Path

from gare.cluster.shard_ledger import ShardLedger, cut_into_shards
from gare.library.index.scan import FoundFile
from gare.library.store import open_store
from gare.library.store.store_schema import ModelStamp

SHARD_S = 30.0
SHARDS_PER_WORKER = 2
FILES_PER_SHARD = 2_000


def measure_asleep(library: str, counts: tuple[int, ...] = (1, 4, 16, 64)) -> None:
    """Workers that lease, sleep, beat and finish; the runs of a library follow each other."""
    print("| workers | shards | seconds | files/s | of workers × one | ms a lease | ms a beat or finish |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    one = 0.0
    for count in counts:
        rate, seconds, lease_ms, other_ms = run_asleep(library, count)
        one = one or rate
        print(
            f"| {count} | {count * SHARDS_PER_WORKER} | {seconds:.1f} | {rate:.1f} | "
            f"{rate / (one * count):.2f} | {lease_ms:.0f} | {other_ms:.0f} |",
            flush=True,
        )


def run_asleep(place: str, num_workers: int) -> tuple[float, float, float, float]:
    """Files a second, seconds until the last file is done, and milliseconds of a lease and of a beat."""
    stamp = ModelStamp("asleep", "f00d", dim=8, stage1_dim=9, num_frames=4)
    store = open_store(place, stamp=stamp, create=True)
    num_files = num_workers * SHARDS_PER_WORKER * FILES_PER_SHARD
    files = [FoundFile(f"/videos/{number:08}.mp4", 1, 1) for number in range(num_files)]
    ledger = ShardLedger(store.records())
    shards = cut_into_shards(files, [], files_per_shard=FILES_PER_SHARD)
    run = ledger.start(ledger.begin(["/videos"], {}), shards, [])
    leases: list[float] = []
    others: list[float] = []
    finished: list[float] = []

    def work(number: int) -> None:
        mine = ShardLedger(open_store(place).records())
        while True:
            started = time.monotonic()
            shard = mine.lease(run, f"worker {number}", f"node {number}")
            if shard is None or not shard.num_files:
                return
            leases.append(time.monotonic() - started)
            mine.files(run, shard.number)
            for _ in range(2):
                time.sleep(SHARD_S / 2)
                started = time.monotonic()
                shard = mine.beat(run, shard)
                others.append(time.monotonic() - started)
            mine.finish(run, shard, {}, SHARD_S)
            finished.append(time.monotonic())

    threads = [threading.Thread(target=work, args=[number]) for number in range(num_workers)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = max(finished) - started
    ledger.set_state("finished")
    return (
        num_files / seconds,
        seconds,
        1e3 * sum(leases) / len(leases),
        1e3 * sum(others) / len(others),
    )


def measure_pair(videos: str) -> None:
    """The same folder by one machine with two cores, and by two workers of one core."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    from gare.cluster.index_cluster import index_on_cluster
    from gare.cluster.ray_link import connected
    from gare.cluster.run_status import RunStatus
    from gare.library.library import Library

    videos = os.path.abspath(videos)
    num_files = sum(1 for path in Path(videos).rglob("*.mp4"))
    with tempfile.TemporaryDirectory() as folder:
        with Library.open(Path(folder) / "one") as library:
            started = time.monotonic()
            library.index(videos)
            alone_s = time.monotonic() - started
            print(f"one machine: {alone_s:.1f} s, {num_files / alone_s:.2f} files/s", flush=True)
        cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": 80 * 2**20},
        )
        for _ in range(2):
            cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
        with (
            connected(cluster.address, user="the measurement"),
            Library.open(Path(folder) / "two") as library,
        ):
            seen: list[RunStatus] = []
            per_shard = -(-num_files // 8)
            report = index_on_cluster(library, [videos], on_status=seen.append, files_per_shard=per_shard)
        cluster.shutdown()
    work_s = sum(shard.seconds for shard in seen[-1].shards if shard.num_files) / 2
    print(f"two workers: {report.seconds:.1f} s with their start ({report.new} new, {report.failed} failed)")
    print(f"two workers: {work_s:.1f} s of work each, {num_files / work_s:.2f} files/s")
    print(f"ratio of work: {alone_s / work_s:.2f}; with the workers' start: {alone_s / report.seconds:.2f}")


if __name__ == "__main__":
    if sys.argv[1] == "pair":
        measure_pair(sys.argv[2])
    elif len(sys.argv) > 2:
        measure_asleep(sys.argv[2])
    else:
        with tempfile.TemporaryDirectory() as folder:
            measure_asleep(f"{folder}/library")
