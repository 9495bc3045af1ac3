"""A server is lost for good: the library goes on, with every row it acknowledged."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from gare.library.store import open_store
from gare.library.store.store_schema import item_id
from servers import Postgres, SeaweedFS, kill_hard, server_folder, wait_until
from stores import STAMP, make_rows, read_all

SCRIPT = Path(__file__).resolve().parents[1] / "store_processes.py"


@pytest.fixture
def cluster() -> Iterator[list[Postgres]]:
    """A primary that waits for any one of two replicas before it acknowledges."""
    servers: list[Postgres] = []
    with server_folder() as folder:
        try:
            primary = Postgres(folder / "primary")
            servers.append(primary.start(wal_level="replica", max_wal_senders="8"))
            for name in ("one", "two"):
                servers.append(Postgres(folder / name, clone_of=primary).start())
            with psycopg.connect(primary.uri(), autocommit=True) as connection:
                connection.execute("CREATE EXTENSION vector")
                names = ", ".join(server.name for server in servers[1:])
                connection.execute(f"ALTER SYSTEM SET synchronous_standby_names = 'ANY 2 ({names})'")
                connection.execute("SELECT pg_reload_conf()")
                state = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'quorum'"
                wait_until(lambda: connection.execute(state).fetchone() == (2,), "replication")
            yield servers
        finally:
            for server in servers:
                server.stop()


def test_postgres_survives_the_loss_of_its_primary(cluster: list[Postgres]):
    primary, heir, other = cluster
    hosts = ",".join(f"127.0.0.1:{server.port}" for server in cluster)
    uri = f"postgresql://gare@{hosts}/postgres?target_session_attrs=read-write"
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
