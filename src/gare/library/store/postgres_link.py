"""Connections to PostgreSQL that come back after the server did, and errors that say what to do."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar

import psycopg
from pgvector.psycopg import register_vector
from psycopg import errors, sql
from psycopg.conninfo import conninfo_to_dict

from gare.errors import LibraryError, TimeLimitError
from gare.library.store.address_secrets import has_secret, password_of, shown_address
from gare.library.store.read_deadline import check_deadline
from gare.library.store.store_protocol import damaged_library

Result = TypeVar("Result")
_RECONNECT_S = 20.0
"""How long a call waits for a server that went away, such as while a replica takes over."""
_CANCEL_S = 5.0
_ESCAPES = (
    "Write postgresql://user@host/database, and in a password %40 for @, %2F for /, %3A for : and %25 for %; "
    "better, keep it in ~/.pgpass"
)
_TRY_AGAIN = (errors.DeadlockDetected, errors.SerializationFailure, errors.LockNotAvailable)


class Link:
    """One connection for each thread, made when it is needed."""

    def __init__(self, uri: str, *, read_only: bool, schema: str | None = None) -> None:
        """`schema` is searched before those of the address."""
        self.address = uri
        self._schema = schema
        self.shown = shown_address(uri)  # messages must not tell the password
        self._password = ""
        self.read_only = read_only
        self._local = threading.local()
        self._all: list[psycopg.Connection[Any]] = []
        self._knows_vector = False

    def connect(self) -> psycopg.Connection[Any]:
        """A new connection; the caller closes it."""
        self._check_address()
        connection: psycopg.Connection[Any] = _Connection.connect(
            self.address, connect_timeout=10, autocommit=True
        )
        try:
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self, connection: psycopg.Connection[Any]) -> None:
        """Set a new connection up, or refuse what it leads to."""
        if connection.execute("SHOW server_encoding").fetchone() != ("UTF8",):
            raise LibraryError(f"{self.shown}: the database must have the encoding UTF8; create it with it")
        if self._schema is not None:
            place = sql.Identifier(self._schema).as_string(connection)
            connection.execute(
                "SELECT set_config('search_path', %s || ', ' || current_setting('search_path'), false)",
                [place],
            )
        if self.read_only:
            connection.execute("SET default_transaction_read_only = on")
        if connection.execute("SHOW synchronous_commit").fetchone() == ("off",):
            connection.execute("SET synchronous_commit = on")  # what is acknowledged stays
        if self._knows_vector:
            register_vector(connection)

    def _check_address(self) -> None:
        """Refuse what libpq reads otherwise than it was meant: its messages quote parts of a password."""
        try:
            parsed = conninfo_to_dict(self.address)
        except psycopg.ProgrammingError as error:
            reason = "" if has_secret(self.address) else f" ({_first_line(error)})"
            raise LibraryError(f"{self.shown} cannot be read as an address{reason}. {_ESCAPES}") from None
        meant = password_of(self.address)
        self._password = str(parsed.get("password") or "")
        if meant is not None and meant != self._password:
            raise LibraryError(f"{self.shown} cannot be read as an address. {_ESCAPES}")

    def _reason(self, error: Exception) -> str:
        """What libpq says, less the password."""
        reason = _first_line(error)
        return reason.replace(self._password, "…") if len(self._password) > 2 else reason

    def vector_exists(self) -> None:
        """Connections may read and write vectors from now on."""
        self._knows_vector = True
        connection = getattr(self._local, "connection", None)
        if connection is not None and not connection.closed:
            try:
                register_vector(connection)
            except (psycopg.OperationalError, psycopg.InterfaceError):
                self._drop()  # the server went away just now; the next connection learns of vectors itself

    def run(self, action: Callable[[psycopg.Connection[Any]], Result], *, patient: bool = True) -> Result:
        """Do what may be repeated without harm; again, when the server went away or others were first."""
        deadline = time.monotonic() + (_RECONNECT_S if patient else 0.0)
        pause = 0.05
        while True:
            check_deadline()
            try:
                with self.explained():
                    return action(self._current())
            except _Unreachable:
                self._drop()
                if time.monotonic() > deadline:
                    raise
            except _TRY_AGAIN:
                if time.monotonic() > deadline:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, 1.0)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turn what the server and its driver raise into a `LibraryError` that says what to do."""
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
        except (errors.DataCorrupted, errors.IndexCorrupted, errors.UndefinedTable, errors.IoError) as error:
            raise damaged_library(self.shown, _first_line(error)) from error
        except errors.InternalError_ as error:
            raise damaged_library(self.shown, _first_line(error)) from error
        except errors.UndefinedFile as error:
            if "extension" not in str(error):  # the file of a table is gone
                raise damaged_library(self.shown, _first_line(error)) from error
            raise _no_pgvector(self.shown, error) from error
        except (errors.FeatureNotSupported, errors.UndefinedObject) as error:
            raise _no_pgvector(self.shown, error) from error
        except _TRY_AGAIN:
            raise
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            raise _Unreachable(
                f"{self.shown} cannot be reached: {self._reason(error)}. Check address, user and password, "
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
        """Close the connections of all threads."""
        for connection in self._all:
            connection.close()


class _Connection(psycopg.Connection[Any]):
    """A connection whose statement is cancelled in the server when the deadline is over."""

    def wait(self, gen: Any, *arguments: Any, **named: Any) -> Any:
        """Wait for the server; psycopg looks up every tenth of a second, and so does this."""
        try:
            return super().wait(_until_deadline(gen), *arguments, **named)
        except TimeLimitError:
            with contextlib.suppress(psycopg.Error):
                self.cancel_safe(timeout=_CANCEL_S)
            self.close()  # its answer may still be on the way: a new connection is made for the next one
            raise


def _until_deadline(gen: Any) -> Generator[Any, Any, Any]:
    """The same conversation with the server; whenever nothing came, a look at the deadline."""
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            if (
                not ready
            ):  # only while the server works: what it answers at once, such as a rollback, is heard
                check_deadline()
            wanted = gen.send(ready)
    except StopIteration as end:
        return end.value


class _Unreachable(LibraryError):
    """The server is not there, perhaps not yet again."""

    logged = "the database cannot be reached"


def _no_pgvector(shown: str, error: Exception) -> LibraryError:
    return LibraryError(
        f"{shown}: the server lacks the extension pgvector 0.8 or newer ({_first_line(error)}). Install it "
        "there and run 'CREATE EXTENSION vector' as an administrator."
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__
