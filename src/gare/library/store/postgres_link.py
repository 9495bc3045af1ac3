"""Connections to PostgreSQL that come back after the server did, and errors that say what to do."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import psycopg
from pgvector.psycopg import register_vector
from psycopg import errors

from gare.errors import LibraryError

Result = TypeVar("Result")
_RECONNECT_S = 20.0
"""How long a call waits for a server that went away, such as while a replica takes over."""
_TRY_AGAIN = (errors.DeadlockDetected, errors.SerializationFailure, errors.LockNotAvailable)


class Link:
    """One connection for each thread, made when it is needed."""

    def __init__(self, uri: str, *, read_only: bool) -> None:
        self._uri = uri
        shown = re.sub(r"(://[^/@:]*):[^/@]*@", r"\1@", uri)  # messages must not tell the password
        self.shown = re.sub(r"(password=)[^&]*", r"\1…", shown)
        self.read_only = read_only
        self._local = threading.local()
        self._all: list[psycopg.Connection[Any]] = []
        self._knows_vector = False

    def connect(self) -> psycopg.Connection[Any]:
        """A new connection; the caller closes it."""
        connection = psycopg.connect(self._uri, connect_timeout=10, autocommit=True)
        if connection.execute("SHOW server_encoding").fetchone() != ("UTF8",):
            raise LibraryError(f"{self.shown}: the database must have the encoding UTF8; create it with it")
        if self.read_only:
            connection.execute("SET default_transaction_read_only = on")
        if connection.execute("SHOW synchronous_commit").fetchone() == ("off",):
            connection.execute("SET synchronous_commit = on")  # what is acknowledged stays
        if self._knows_vector:
            register_vector(connection)
        return connection

    def vector_exists(self) -> None:
        """Connections may read and write vectors from now on."""
        self._knows_vector = True
        connection = getattr(self._local, "connection", None)
        if connection is not None and not connection.closed:
            register_vector(connection)

    def run(self, action: Callable[[psycopg.Connection[Any]], Result], *, patient: bool = True) -> Result:
        """Do what may be repeated without harm; again, when the server went away or others were first."""
        deadline = time.monotonic() + (_RECONNECT_S if patient else 0.0)
        pause = 0.05
        while True:
            try:
                with self.explained():
                    return action(self._current())
            except _Unreachable as error:
                self._drop()
                if time.monotonic() > deadline:
                    raise LibraryError(str(error)) from error.__cause__
            except _TRY_AGAIN:
                if time.monotonic() > deadline:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, 1.0)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        try:
            yield
        except (errors.DiskFull, errors.OutOfMemory) as error:
            raise LibraryError(
                f"{self.shown}: the server has no space left. What was acknowledged is safe; make room there "
                f"and run the same command again. ({_first_line(error)})"
            ) from error
        except (errors.ReadOnlySqlTransaction, errors.InsufficientPrivilege) as error:
            raise LibraryError(
                f"{self.shown}: this user or connection may not write ({_first_line(error)}). Open the "
                "library for writing, as its owner, on the primary server."
            ) from error
        except (errors.UndefinedFile, errors.FeatureNotSupported, errors.UndefinedObject) as error:
            raise LibraryError(
                f"{self.shown}: the server lacks the extension pgvector 0.8 or newer ({_first_line(error)}). "
                "Install it there and run 'CREATE EXTENSION vector' as an administrator."
            ) from error
        except _TRY_AGAIN:
            raise
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            raise _Unreachable(
                f"{self.shown} cannot be reached: {_first_line(error)}. Check address, user and password, "
                "and that the server runs."
            ) from error

    def _current(self) -> psycopg.Connection[Any]:
        connection = getattr(self._local, "connection", None)
        if connection is None or connection.closed:
            connection = self._local.connection = self.connect()
            self._all.append(connection)
        return connection

    def _drop(self) -> None:
        connection = getattr(self._local, "connection", None)
        if connection is not None:
            connection.close()
            self._local.connection = None

    def close(self) -> None:
        for connection in self._all:
            connection.close()


class _Unreachable(LibraryError):
    """The server is not there, perhaps not yet again."""


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__
