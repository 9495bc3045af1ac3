"""Libraries for crash tests in a folder, on S3 and in PostgreSQL: made, copied and removed quickly."""

from __future__ import annotations

import re
import shutil
import urllib.parse
import urllib.request
import uuid
from pathlib import Path
from typing import Protocol

import psycopg

from servers import HANG_S, Postgres, SeaweedFS
from write_shim import Stop

KINDS = ("folder", "s3", "postgres")


class CrashPlace(Protocol):
    """Where libraries of one kind are."""

    modes: tuple[str, ...]
    """How a writer can be stopped there."""

    def new(self) -> str:
        """The address of a library that is not there yet."""

    def copy(self, uri: str) -> str:
        """The address of a copy."""

    def remove(self, uri: str) -> None:
        """Remove a library."""

    def settle(self, uri: str) -> None:
        """Wait until the server has done what a killed process asked for."""

    def stop(self, uri: str, at: int, mode: str, trace: str = "") -> Stop:
        """Stop whoever writes to a library."""


class FolderPlace:
    """Folders below one folder."""

    modes = ("before", "torn")

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def new(self) -> str:
        return str(self.folder / uuid.uuid4().hex[:12])

    def copy(self, uri: str) -> str:
        other = self.new()
        if Path(uri).exists():
            shutil.copytree(uri, other)
        return other

    def remove(self, uri: str) -> None:
        shutil.rmtree(uri, ignore_errors=True)

    def settle(self, uri: str) -> None:
        pass

    def stop(self, uri: str, at: int, mode: str, trace: str = "") -> Stop:
        return Stop(folder=uri, at=at, mode=mode, trace=trace)


class S3Place:
    """Prefixes of the bucket of a test server."""

    modes = ("before", "torn", "after", "cut")

    def __init__(self, server: SeaweedFS) -> None:
        self._server = server

    def new(self) -> str:
        return f"s3://gare/{uuid.uuid4().hex[:12]}"

    def copy(self, uri: str) -> str:
        other = self.new()
        for key in self._keys(uri):
            target = key.replace(_prefix(uri), _prefix(other), 1)
            source = urllib.parse.quote(f"/gare/{key}")
            self._ask("PUT", f"/gare/{urllib.parse.quote(target)}", {"x-amz-copy-source": source})
        return other

    def remove(self, uri: str) -> None:
        for key in self._keys(uri):
            self._ask("DELETE", f"/gare/{urllib.parse.quote(key)}")

    def settle(self, uri: str) -> None:
        self._ask("GET", "/gare?max-keys=1")  # what was sent before it is as good as done

    def stop(self, uri: str, at: int, mode: str, trace: str = "") -> Stop:
        return Stop(port=self._server.port, only_requests=True, at=at, mode=mode, trace=trace)

    def _keys(self, uri: str) -> list[str]:
        query = urllib.parse.urlencode({"list-type": "2", "prefix": f"{_prefix(uri)}/", "max-keys": "1000"})
        answer = self._ask("GET", f"/gare?{query}").decode()
        assert "<IsTruncated>true" not in answer
        return re.findall("<Key>(.*?)</Key>", answer)

    def _ask(self, method: str, path: str, headers: dict[str, str] | None = None) -> bytes:
        address = f"http://127.0.0.1:{self._server.port}{path}"
        request = urllib.request.Request(address, method=method, headers=headers or {})
        with urllib.request.urlopen(request, timeout=HANG_S) as answer:
            return bytes(answer.read())


def _prefix(uri: str) -> str:
    return uri.removeprefix("s3://gare/")


class PostgresPlace:
    """Databases of a test server. It has the extension in template1."""

    modes = ("before", "torn", "after", "cut")

    def __init__(self, server: Postgres) -> None:
        self._server = server
        with psycopg.connect(server.uri("template1"), autocommit=True) as connection:
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector")

    def new(self) -> str:
        return self._make("template1")

    def copy(self, uri: str) -> str:
        self.settle(uri)
        return self._make(_database(uri))

    def _make(self, template: str) -> str:
        name = f"lib{uuid.uuid4().hex[:12]}"
        self._ask(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY file_copy")
        return self._server.uri(name)

    def remove(self, uri: str) -> None:
        self._ask(f"DROP DATABASE {_database(uri)} WITH (FORCE)")

    def settle(self, uri: str) -> None:
        statement = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s"
        with psycopg.connect(self._server.uri(), autocommit=True) as connection:
            while connection.execute(statement, [_database(uri)]).fetchone() != (0,):
                pass

    def stop(self, uri: str, at: int, mode: str, trace: str = "") -> Stop:
        return Stop(port=self._server.port, at=at, mode=mode, trace=trace)

    def _ask(self, statement: str) -> None:
        with psycopg.connect(self._server.uri(), autocommit=True) as connection:
            connection.execute(statement)


def _database(uri: str) -> str:
    return uri.rpartition("/")[2]
