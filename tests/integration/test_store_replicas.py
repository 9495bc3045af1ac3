"""A server is lost for good: the library goes on, with every row it acknowledged."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gare.library.store import open_store
from gare.library.store.store_schema import item_id
from servers import Postgres, SeaweedFS, address_of_all, kill_hard, replicated, server_folder
from stores import STAMP, make_rows, read_all

SCRIPT = Path(__file__).resolve().parents[1] / "store_processes.py"


@pytest.fixture
def cluster() -> Iterator[list[Postgres]]:
    """A primary that waits for two replicas before it acknowledges."""
    with replicated(2) as servers:
        yield servers


def test_postgres_survives_the_loss_of_its_primary(cluster: list[Postgres]):
    primary, heir, other = cluster
    uri = address_of_all(cluster)
    command = [sys.executable, str(SCRIPT), "write", uri, "1", "100000"]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert writer.stdout is not None
        early = [writer.stdout.readline().split() for _ in range(20)]
        assert primary.process is not None
        kill_hard(primary.process)
        heir.promote()
        later = [writer.stdout.readline().split() for _ in range(60)]  # the same process writes on
    finally:
        writer.kill()
        rest, errors = writer.communicate()
    lines = [*early, *later, *(line.split() for line in rest.splitlines())]
    assert all(later), errors.decode()
    touched = {name for verb, *names in lines if verb == b"deleting" for name in names}
    added = {name for verb, *names in lines if verb == b"added" for name in names} - touched
    store = open_store(uri, stamp=STAMP)
    held = read_all(store, ["id"])["id"].to_pylist()
    store.close()
    assert {name.decode() for name in added} <= set(held)
    assert len(held) == len(set(held))
    assert other.process is not None


def test_s3_survives_the_loss_of_a_storage_node(monkeypatch: pytest.MonkeyPatch):
    with server_folder() as folder:
        server = SeaweedFS(folder)
        try:
            for name, value in server.environment.items():
                monkeypatch.setenv(name, value)
            store = open_store("s3://gare/library", stamp=STAMP, create=True)
            paths = [f"/before/{number}.mp4" for number in range(30)]
            for path in paths:
                store.upsert(*make_rows([path]))
            kill_hard(server.processes[server.volume_with_most()])
            fresh = open_store("s3://gare/library", stamp=STAMP)
            assert sorted(read_all(fresh)["path"].to_pylist()) == sorted(paths)
            ids = [item_id(path, 0.0) for path in paths]
            assert fresh.fetch(ids, ["id", "vectors", "thumbnail"])["id"].to_pylist() == ids
            for number in range(5):
                fresh.upsert(*make_rows([f"/after/{number}.mp4"]))
            assert fresh.count() == 35
        finally:
            server.stop()
