"""When nobody waits any more, reading stops: counted in reads, on stores and in a real server."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import lance
import numpy as np
import psycopg
import pytest

from gare.errors import TimeLimitError
from gare.library.filters import HasTag
from gare.library.store import Store, lance_snapshot, open_store
from gare.library.store.read_deadline import (
    Deadline,
    check_deadline,
    checked,
    current_deadline,
    unlimited,
)
from serve_library import Served
from serve_process import PATIENT, ServeProcess
from servers import HANG_S, wait_until
from stores import STAMP, make_files, make_rows
from warm import run_python

NUM_FRAGMENTS = 6
QUERY = np.ones((1, STAMP.stage1_dim), np.float32)
NOTHING = HasTag("nothing has this tag")


def read_all(store: Store, **wanted: Any) -> int:
    return sum(batch.num_rows for batch in store.scan(**wanted))


READS: dict[str, Callable[[Store], Any]] = {
    "scan": lambda store: read_all(store, columns=["id"]),
    "scan that nothing passes": lambda store: read_all(store, columns=["id"], where=NOTHING),
    "scan with frames": lambda store: read_all(store, columns=["id", "vectors"]),
    "count": lambda store: store.count(NOTHING),
    "exact search": lambda store: store.search(QUERY, 3, exact=True),
    "search under a filter": lambda store: store.search(QUERY, 3, where=NOTHING),
    "ledger": lambda store: sum(batch.num_rows for batch in store.scan_files()),
}


def in_fragments(store: Store) -> Store:
    for number in range(NUM_FRAGMENTS):
        paths = [f"/v/{number}/{name}.mp4" for name in range(20)]
        store.replace_files(*make_rows(paths, seed=number), make_files(paths))
    return store


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = str(tmp_path_factory.mktemp("deadlines") / "library")
    in_fragments(open_store(place, stamp=STAMP, create=True)).close()
    return place


class Calls:
    """Counts the scans that Lance is asked for, and ends a deadline at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.last = 0, -1
        self.deadline = Deadline()
        scanner = lance.LanceDataset.scanner

        def counted(dataset: Any, *arguments: Any, **named: Any) -> Any:
            self.count += 1
            if self.count == self.last:
                self.deadline.cancel()
            return scanner(dataset, *arguments, **named)

        monkeypatch.setattr(lance.LanceDataset, "scanner", counted)
        monkeypatch.setattr(lance_snapshot, "PIECE_ROWS", 1)

    def until(self, last: int) -> Deadline:
        self.count, self.last, self.deadline = 0, last, Deadline()
        return self.deadline


@pytest.mark.parametrize("name", READS)
def test_a_read_of_a_folder_ends_with_the_piece_it_is_at(folder, name, monkeypatch):
    store, read, calls = open_store(folder), READS[name], Calls(monkeypatch)
    whole = read(store)
    calls.until(0)
    read(store)
    assert calls.count == NUM_FRAGMENTS  # one call for each piece
    for last in (1, 3):
        with calls.until(last).active(), pytest.raises(TimeLimitError, match="took too long"):
            read(store)
        assert calls.count == last
    with Deadline().active(), calls.until(0).active():
        again = read(store)
    assert np.array_equal(_plain(whole), _plain(again))


def _plain(result: Any) -> Any:
    return [hit.ids for hit in result] if isinstance(result, list) else result


def test_what_was_read_of_the_keys_is_kept_when_time_is_up(folder, monkeypatch):
    """Else a library whose keys take longer than a request may last could never be searched."""
    store, calls = open_store(folder), Calls(monkeypatch)
    with calls.until(2).active(), pytest.raises(TimeLimitError):
        store.fetch(["no such item"], ["path"])
    calls.until(0)
    assert len(store.fetch(["no such item"], ["path"])) == 0
    assert calls.count == NUM_FRAGMENTS - 2


def test_many_rows_are_fetched_in_pieces(folder, monkeypatch):
    store = open_store(folder)
    ids = [name for batch in store.scan(columns=["id"]) for name in batch["id"].to_pylist()]
    whole = store.fetch(ids, ["id", "path", "vectors"])
    monkeypatch.setattr(lance_snapshot, "TAKE_ROWS", 7)
    assert store.fetch(ids, ["id", "path", "vectors"]).equals(whole)
    over = Deadline()
    over.cancel()
    with over.active(), pytest.raises(TimeLimitError):
        store.fetch(ids, ["vectors"])  # paths may be in memory


def test_a_scan_that_is_given_up_reads_no_further(tmp_path):
    """Lance reads ahead in threads of its own: they stop, too."""
    big = {"num_frames": 64, "dim": 256}
    stamp = type(STAMP)("tiny", "f00d", stage1_dim=257, **big)
    store = open_store(str(tmp_path / "big"), stamp=stamp, create=True)
    num_parts = 16  # far more than Lance reads ahead, on a busy machine too
    for number in range(num_parts):
        store.upsert(*make_rows([f"/v/{number}-{n}.mp4" for n in range(400)], seed=number, stamp=stamp))
    batches = checked(lance.dataset(f"{store.uri}/frames.lance").scanner(batch_size=10).to_batches())
    deadline = Deadline()
    with deadline.active():
        next(batches)
        deadline.cancel()
        with pytest.raises(TimeLimitError):
            next(batches)
    counts: list[int] = []

    def is_still() -> bool:
        counts.append(_bytes_read())
        return len(counts) > 20 and counts[-1] == counts[-10]

    wait_until(is_still, "the threads to be still")
    assert counts[-1] - counts[0] < num_parts * 400 * 64 * 256  # half of what there is


def _bytes_read() -> int:
    """Bytes that this process has read, less what reading this number takes."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(lines[0].split()[1]) // 4096 * 4096


def test_a_deadline_belongs_to_those_who_inherit_it():
    deadline = Deadline()
    with deadline.active():
        assert current_deadline() is deadline
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(current_deadline).result() is None  # a thread of its own has none
        deadline.cancel()
        with unlimited():
            check_deadline()
        with pytest.raises(TimeLimitError):
            check_deadline()
    check_deadline()


# --- PostgreSQL --------------------------------------------------------------------------------------------


@pytest.fixture
def database(new_library: Any) -> Iterator[tuple[Any, str]]:
    address = new_library("postgres")
    store: Any = in_fragments(open_store(address, stamp=STAMP, create=True))
    yield store, address
    store.close()


def num_active(address: str, mark: str) -> int:
    with psycopg.connect(address) as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND pid <> pg_backend_pid() "
            "AND query LIKE %s",
            [f"%{mark}%"],
        ).fetchone()
    assert row is not None
    return int(row[0])


def test_a_statement_is_cancelled_in_the_database(database):
    store, address = database
    deadline = Deadline()

    def sleep() -> None:
        with deadline.active():
            store._link.run(lambda connection: connection.execute("SELECT pg_sleep(86400), 'marked'"))

    with ThreadPoolExecutor(1) as pool:
        sleeping = pool.submit(sleep)
        wait_until(lambda: num_active(address, "'marked'") == 1, "the statement to run")
        deadline.cancel()
        assert isinstance(sleeping.exception(HANG_S), TimeLimitError)
        wait_until(lambda: num_active(address, "'marked'") == 0, "the statement to end")
        assert pool.submit(store.count).result() == NUM_FRAGMENTS * 20  # over a connection that works
    assert store.count(NOTHING) == 0


def test_a_scan_of_a_database_ends_between_batches(database, monkeypatch):
    store, _ = database
    monkeypatch.setattr("gare.library.store.postgres_store._SCAN_ROWS", 10)
    deadline = Deadline()
    batches = store.scan(columns=["id"])
    with deadline.active():
        next(batches)
        deadline.cancel()
        with pytest.raises(TimeLimitError):
            next(batches)
    for read in READS.values():
        over = Deadline(seconds=0)
        with over.active(), pytest.raises(TimeLimitError):
            read(store)
        read(store)


# --- a server ----------------------------------------------------------------------------------------------

# One search: those that come together are answered one after the other.
ENDLESS = ("/api/v1/search?q=red", "/api/v1/items", f"/api/v1/items?where={quote('duration:>0')}", "/")


class Reads:
    """What `slow_serve_driver` notes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def count(self, what: bytes) -> int:
        return self.path.read_bytes().count(what) if self.path.exists() else 0

    def begun(self, wanted: int) -> None:
        wait_until(lambda: self.count(b"<") >= wanted, f"{wanted} reads to begin")

    def all_ended(self) -> None:
        wait_until(lambda: self.count(b"<") == self.count(b">"), "all reads to end")


def slow_server(served: Served, reads: Reads, **options: Any) -> ServeProcess:
    return ServeProcess(
        served.library, options={**PATIENT, **options}, driver="slow_serve_driver.py",
        GARE_TEST_READS=str(reads.path),
    )  # fmt: skip


def ask(server: ServeProcess, path: str) -> socket.socket:
    link = socket.create_connection(("127.0.0.1", server.port), HANG_S)
    link.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return link


def metric(server: ServeProcess, name: str) -> float:
    while (answer := server.get("/metrics")).status == 503:  # it, too, has no more time than any request
        pass
    lines = answer.content.decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_whoever_goes_away_stops_what_was_read_for_them(served, tmp_path):
    reads = Reads(tmp_path / "reads")
    with slow_server(served, reads) as server:
        for turn in range(1, 6):  # more of them than there are threads for searches
            links = [ask(server, path) for path in ENDLESS]
            reads.begun(len(ENDLESS) * turn)
            for link in links:
                link.close()
            reads.all_ended()
        wait_until(lambda: metric(server, "gare_searches_in_work") == 0, "the threads to be free")
        at_rest = reads.count(b".")
        for _ in range(20):
            assert server.get("/api/v1/health").status == 200
        assert reads.count(b".") == at_rest
        gone = metric(server, 'gare_requests_ended_total{reason="client_gone"}')
        assert gone == 5 * len(ENDLESS)
        assert "Traceback" not in server.log.read_text()


def test_when_time_is_up_its_thread_is_free_again(served, tmp_path):
    reads = Reads(tmp_path / "reads")
    with slow_server(served, reads, answer_seconds=0.5) as server:
        for path in ENDLESS * 2:
            begun = reads.count(b"<")
            while reads.count(b"<") == begun:  # on a busy machine time may be up before the first read
                answer = server.get(path)
                assert answer.status == 503, path
                assert answer.headers["retry-after"]
        reads.all_ended()
        wait_until(lambda: metric(server, "gare_searches_in_work") == 0, "the threads to be free")


def test_sigterm_ends_a_server_whose_reading_never_ends(served, tmp_path):
    reads = Reads(tmp_path / "reads")
    with slow_server(served, reads) as server:
        links = [ask(server, path) for path in ENDLESS]
        reads.begun(len(ENDLESS))
        assert server.interrupt() == 0
        assert reads.count(b"<") == reads.count(b">")  # all of them were ended, none was cut off by an exit
        for link in links:
            link.close()


def test_a_thread_that_never_comes_back_does_not_keep_the_process():
    code = (
        "import threading\n"
        "from gare.serve.http_server import end_threads\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        "print('closed', flush=True)\n"
        "end_threads(0.1)\n"
    )
    result = run_python(["-c", code], timeout=HANG_S)
    assert (result.returncode, result.stdout) == (0, "closed\n")
