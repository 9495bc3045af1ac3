"""Small texts by key that several processes change at once without losing each other's changes.

They are kept with a library, in tables of their own that are made when they are first needed. A process that
wants to change a text says which one it has read: `swap` refuses where somebody was faster. That is all that
leases need, and no clock is compared with another machine's.

The file has the two stores that keep them: they are one idea, and each is short.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar
from zlib import crc32

from gare.errors import LibraryError
from gare.library.store.lance_storage import Place, explained
from gare.library.store.lance_table import LanceTable, quote

if TYPE_CHECKING:
    import pyarrow as pa

    from gare.library.store.postgres_link import Link

Result = TypeVar("Result")
FOLDER = "records"
"""Where the tables of a library in Lance are, below it."""
_NUM_TABLES = 16
_MOST_FRAGMENTS = 16  # every change adds one, and who reads opens them all
_ROWS_PER_FRAGMENT = 100_000


class Records(ABC):
    """Texts by key. Every write is durable when it returns."""

    @abstractmethod
    def parts(self, prefix: str = "") -> Iterator[dict[str, str]]:
        """The texts whose key begins so, in parts in random order.

        A part is read when it is asked for: who needs any text, and not all, leaves the others unread.
        """

    def read(self, prefix: str = "") -> dict[str, str]:
        """The texts whose key begins so, as they are now."""
        return {key: text for part in self.parts(prefix) for key, text in part.items()}

    def get(self, key: str) -> str | None:
        """The text of a key as it is now; None where there is none."""
        return self.read(key).get(key)

    @abstractmethod
    def put(self, texts: Mapping[str, str]) -> None:
        """Write texts, whatever was there."""

    def keep(self, texts: Mapping[str, str]) -> None:
        """Write texts that nobody will change, however long; `kept` reads them."""
        self.put(texts)

    def kept(self, key: str) -> str | None:
        """The text that `keep` wrote; None where there is none."""
        return self.get(key)

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
    """Texts in small Lance tables below the library. A key has its table, so that writers seldom meet.

    What is kept lies in a table of its own: the others are rewritten again and again, to have few fragments.
    """

    def __init__(self, place: Place) -> None:
        from lance.lance import _Session as Session

        self._place = place
        root, session = f"{place.uri.rstrip('/')}/{FOLDER}", Session()
        places = (
            Place(f"{root}/{number:02}", place.read_only, place.options, session)
            for number in range(_NUM_TABLES)
        )
        self._tables = [LanceTable(each, "texts", ("key",)) for each in places]
        kept = Place(f"{root}/kept", place.read_only, place.options, session)
        self._kept = LanceTable(kept, "texts", ("key",))
        self._read_before: dict[LanceTable, tuple[int, dict[str, str]]] = {}  # table → version, its texts

    def tables(self) -> list[LanceTable]:
        """Those that are there."""
        with explained(self._place.uri):
            return [table for table in (*self._tables, self._kept) if table.exists()]

    def parts(self, prefix: str = "") -> Iterator[dict[str, str]]:
        for table in random.sample(self._tables, _NUM_TABLES):
            yield {key: text for key, text in self._read_all(table).items() if key.startswith(prefix)}

    def get(self, key: str) -> str | None:
        return self._get(self._table_of(key), key)

    def kept(self, key: str) -> str | None:
        return self._get(self._kept, key)

    def _read_all(self, table: LanceTable) -> dict[str, str]:
        """All texts of a table, which is read only if it has changed since the last time."""
        with explained(self._place.uri):
            try:
                dataset = table.snapshot(fresh=True).dataset
            except FileNotFoundError:  # nothing was written there yet
                return {}
            version, texts = self._read_before.get(table, (-1, {}))
            if version != dataset.version:
                texts = _texts(dataset.to_table())
                self._read_before[table] = dataset.version, texts
        return texts

    def _get(self, table: LanceTable, key: str) -> str | None:
        with explained(self._place.uri):
            try:
                dataset = table.snapshot(fresh=True).dataset
            except FileNotFoundError:
                return None
            return _texts(dataset.to_table(filter=f"key = {quote(key)}")).get(key)

    def put(self, texts: Mapping[str, str]) -> None:
        parts: dict[LanceTable, dict[str, str]] = {}
        for key, text in texts.items():
            parts.setdefault(self._table_of(key), {})[key] = text
        for table, part in parts.items():
            self._write(table, part)

    def keep(self, texts: Mapping[str, str]) -> None:
        self._write(self._kept, texts)

    def _write(self, table: LanceTable, texts: Mapping[str, str]) -> None:
        self._make(table)
        table.merge(_rows(texts))

    def swap(self, key: str, old: str | None, new: str) -> bool:
        table, rows = self._table_of(key), _rows({key: new})
        self._make(table)
        if old is None:
            num_changed = table.insert(rows)
        else:
            num_changed = table.update(rows, f"target.value = {quote(old)}")
        num_fragments = len(table.snapshot().dataset.get_fragments())
        if num_fragments % _MOST_FRAGMENTS == 0:  # one of many writers sees it
            with suppress(OSError, RuntimeError, ValueError, LibraryError):  # another one is at it
                table.compact(rows_per_fragment=_ROWS_PER_FRAGMENT, patience_s=0)
        return bool(num_changed) or self.get(key) == new

    def clear(self) -> None:
        for table in self.tables():
            table.empty()

    def _table_of(self, key: str) -> LanceTable:
        return self._tables[crc32(key.encode()) % _NUM_TABLES]

    def _make(self, table: LanceTable) -> None:
        import pyarrow as pa

        with explained(self._place.uri):
            if table.exists():
                return
            if table.place.folder:
                table.place.folder.mkdir(parents=True, exist_ok=True)
            fields = [pa.field(name, pa.string(), nullable=False) for name in ("key", "value")]
            table.create(pa.schema(fields))


class PostgresRecords(Records):
    """Texts in the table gare_records."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def parts(self, prefix: str = "") -> Iterator[dict[str, str]]:
        if self._exists():
            statement = "SELECT key, value FROM gare_records WHERE starts_with(key, %s)"
            yield self._run(lambda connection: dict(connection.execute(statement, [prefix]).fetchall()))

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
        return bool(num_changed) or self.get(key) == new

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


def _texts(rows: pa.Table) -> dict[str, str]:
    return dict(zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True))


def _rows(texts: Mapping[str, str]) -> pa.Table:
    import pyarrow as pa

    return pa.table(
        {"key": pa.array(list(texts), pa.string()), "value": pa.array(list(texts.values()), pa.string())}
    )
