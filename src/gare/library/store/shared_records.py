"""Small texts by key that several processes change at once without losing each other's changes.

They are kept with a library, in a table of their own that is made when it is first needed. A process that
wants to change a text says which one it has read: `swap` refuses where somebody was faster. That is all that
leases need, and no clock is compared with another machine's.

The file has the two stores that keep them: they are one idea, and each is short.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from gare.errors import LibraryError
from gare.library.store.lance_storage import Place, explained
from gare.library.store.lance_table import LanceTable, quote

if TYPE_CHECKING:
    import pyarrow as pa

    from gare.library.store.postgres_link import Link

Result = TypeVar("Result")
TABLE = "records"
_MOST_FRAGMENTS = 64  # every change adds one, and who reads opens them all
_ROWS_PER_FRAGMENT = 100_000


class Records(ABC):
    """Texts by key. Every write is durable when it returns."""

    @abstractmethod
    def read(self, prefix: str = "") -> dict[str, str]:
        """The texts whose key begins so, as they are now."""

    @abstractmethod
    def put(self, texts: Mapping[str, str]) -> None:
        """Write texts, whatever was there."""

    @abstractmethod
    def swap(self, key: str, old: str | None, new: str) -> bool:
        """Write a text if the one that is there is `old`, None for none; whether it was.

        No two processes may write the same `new`: one that was written before a connection broke counts as
        written.
        """

    @abstractmethod
    def clear(self) -> None:
        """Remove everything."""


class LanceRecords(Records):
    """Texts in a Lance table beside those of the library."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._table = LanceTable(place, TABLE, ("key",))

    def read(self, prefix: str = "") -> dict[str, str]:
        with explained(self._place.uri):
            if not self._table.exists():
                return {}
            wanted = f"starts_with(key, {quote(prefix)})" if prefix else None
            rows = self._table.snapshot(fresh=True).dataset.to_table(filter=wanted)
        return dict(zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True))

    def put(self, texts: Mapping[str, str]) -> None:
        if texts:
            self._make()
            self._table.merge(_rows(texts))

    def swap(self, key: str, old: str | None, new: str) -> bool:
        self._make()

        def rule(builder: Any) -> Any:
            if old is None:
                return builder.when_not_matched_insert_all()
            return builder.when_matched_update_all(f"target.value = {quote(old)}")

        stats = self._table.change(_rows({key: new}), rule)
        self._join_if_many()
        return bool(stats["num_inserted_rows"] + stats["num_updated_rows"]) or self.read(key).get(key) == new

    def clear(self) -> None:
        with explained(self._place.uri):
            if self._table.exists():
                self._table.empty()

    def _make(self) -> None:
        import pyarrow as pa

        with explained(self._place.uri):
            if not self._table.exists():
                fields = [pa.field(name, pa.string(), nullable=False) for name in ("key", "value")]
                self._table.create(pa.schema(fields))

    def _join_if_many(self) -> None:
        if len(self._table.snapshot().dataset.get_fragments()) > _MOST_FRAGMENTS:
            with suppress(OSError, RuntimeError, ValueError, LibraryError):  # another one is at it
                self._table.compact(rows_per_fragment=_ROWS_PER_FRAGMENT)


class PostgresRecords(Records):
    """Texts in the table gare_records."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def read(self, prefix: str = "") -> dict[str, str]:
        if not self._exists():
            return {}
        statement = "SELECT key, value FROM gare_records WHERE starts_with(key, %s)"
        return self._run(lambda connection: dict(connection.execute(statement, [prefix]).fetchall()))

    def put(self, texts: Mapping[str, str]) -> None:
        self._make()
        statement = (
            "INSERT INTO gare_records (key, value) VALUES (%s, %s) "
            "ON CONFLICT (key) DO UPDATE SET value = EXCLUDED.value"
        )

        def write(connection: Any) -> None:
            with connection.transaction(), connection.cursor() as cursor:
                cursor.executemany(statement, sorted(texts.items()))

        self._run(write)

    def swap(self, key: str, old: str | None, new: str) -> bool:
        self._make()
        statement = "UPDATE gare_records SET value = %s WHERE key = %s AND value = %s"
        values = [new, key, old]
        if old is None:
            statement = "INSERT INTO gare_records (value, key) VALUES (%s, %s) ON CONFLICT DO NOTHING"
            values = [new, key]
        num_changed = self._run(lambda connection: connection.execute(statement, values).rowcount)
        return bool(num_changed) or self.read(key).get(key) == new

    def clear(self) -> None:
        if self._exists():
            self._run(lambda connection: connection.execute("DELETE FROM gare_records").rowcount)

    def _exists(self) -> bool:
        statement = "SELECT to_regclass('gare_records') IS NOT NULL"
        return bool(self._run(lambda connection: connection.execute(statement).fetchone()[0]))

    def _make(self) -> None:
        if not self._exists():
            statement = (
                'CREATE TABLE IF NOT EXISTS gare_records (key text COLLATE "C" PRIMARY KEY, '
                "value text NOT NULL)"
            )
            with suppress(LibraryError):  # two that make it at once: one is told that the name is taken
                self._run(lambda connection: connection.execute(statement).rowcount)

    def _run(self, action: Callable[[Any], Result]) -> Result:
        return self._link.run(action)


def _rows(texts: Mapping[str, str]) -> pa.Table:
    import pyarrow as pa

    return pa.table(
        {"key": pa.array(list(texts), pa.string()), "value": pa.array(list(texts.values()), pa.string())}
    )
