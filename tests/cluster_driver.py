"""`python cluster_driver.py RAY LIBRARY TREE SIGNS`: plans and watches a run, to be killed."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from cluster_workers import WatchedWorker
from gare.cluster.index_cluster import index_on_cluster
from gare.cluster.ray_link import connected
from gare.library.index.index_run import IndexOptions
from gare.library.library import Library


def main() -> None:
    ray, library, tree, signs, lease_s = sys.argv[1:]
    with connected(ray, user="a test"), Library.open(library) as opened:
        report = index_on_cluster(
            opened,
            [tree],
            options=IndexOptions(commit_seconds=0.05),
            files_per_shard=2,
            lease_s=float(lease_s),
            worker_type=partial(WatchedWorker, signs=Path(signs)),
        )
        print(report.to_json())


if __name__ == "__main__":
    main()
