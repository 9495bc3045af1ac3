"""Items that a search met and could not trust: left out, told once in the log, named in a warning.

A score is exact or it is not given. One damaged item must not end every search that meets it either.
"""

from __future__ import annotations

import logging
import re
import shlex
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from gare.errors import DamagedLibraryError
from gare.library.search.item_frames import SCORE_COLUMNS
from gare.library.store import Store, fetch_readable
from gare.library.store.row_checksums import (
    CHECKSUM_COLUMN,
    damaged_frame_columns,
    damaged_item_columns,
    vector_bytes,
)
from gare.library.store.store_protocol import damaged_library
from gare.library.store.store_schema import is_dense
from gare.library.store.stored_frames import intact_rows, own_frames

_log = logging.getLogger("gare.library")
_log.addHandler(logging.NullHandler())  # without a log, as on the command line, the warning is enough
_NAMED = 3
_MOST_REMEMBERED = 10_000
_ITEM_ID = re.compile("[0-9a-f]{20}")


class DamagedItems:
    """Reads items for a searcher, and remembers those that are damaged until they are whole again."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._found: dict[str, str] = {}  # why, by id
        self._mutex = threading.Lock()

    def __len__(self) -> int:
        return len(self._found)

    @property
    def found(self) -> dict[str, str]:
        """Why each of them is damaged, by id."""
        with self._mutex:
            return dict(self._found)

    def note(self, found: Mapping[str, str]) -> None:
        """Remember what another reader of the same items met."""
        self._note(found)

    def warning(self) -> str | None:
        """What to tell whoever searched; None where nothing was left out."""
        with self._mutex:
            if not self._found:
                return None
            ids = sorted(self._found)
        named = ", ".join(ids[:_NAMED]) + (" and others" if len(ids) > _NAMED else "")
        items = "1 damaged item was" if len(ids) == 1 else f"{len(ids):,} damaged items were"
        return (
            f"{items} left out of the results ({named}). To mend the library, run 'gare check --repair "
            f"{shlex.quote(self._store.uri)}'"
        )

    def read_vectors(self, ids: Sequence[str], columns: Sequence[str] = SCORE_COLUMNS) -> pa.Table:
        """Rows of the items whose vectors are intact; columns as for `keep_intact`.

        Raises:
            DamagedLibraryError: none of them can be read.
        """
        table, lost = fetch_readable(self._store, ids, columns)
        table = self.keep_intact(table)
        self._note(lost)
        if lost and not len(table):
            raise self.error(next(iter(lost)))
        return table

    def read_blocks(self, ids: Sequence[str]) -> pa.Table:
        """Rows of the items that are intact, with all frames of the row that theirs are a range of."""
        table, lost = fetch_readable(self._store, ids, SCORE_COLUMNS)
        self._note(lost)
        return self._intact(table)

    def keep_intact(self, table: pa.Table | pa.RecordBatch) -> pa.Table | pa.RecordBatch:
        """The rows whose vectors are those that were written, with their own frames alone.

        Args:
            table: `SCORE_COLUMNS`; with `vector`, the stage-1 vector, also `checksum`.
        """
        return own_frames(self._intact(table), self._store.stamp.num_frames)

    def _intact(self, table: pa.Table | pa.RecordBatch) -> pa.Table | pa.RecordBatch:
        ids = table["id"].to_pylist()
        good = intact_rows(table)
        if "vector" in table.schema.names:
            checksums = table[CHECKSUM_COLUMN].to_pylist()
            vectors = vector_bytes(table["vector"])
            good = [
                is_good and not damaged_item_columns({CHECKSUM_COLUMN: checksum}, vector)
                for is_good, checksum, vector in zip(good, checksums, vectors, strict=True)
            ]
        if not all(good):
            bad = [item for item, is_good in zip(ids, good, strict=True) if not is_good]
            self._note(dict.fromkeys(bad, "its vectors are not those that were written"))
            table = table.filter(pa.array(good, pa.bool_()))
        if self._found:
            self._forget(table["id"].to_pylist())
        return table

    def read_facts(self, ids: Sequence[str], columns: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Rows by id, without those that are damaged or gone. The columns hold all that a hit shows."""
        wanted = list(dict.fromkeys([*columns, "frames_key", CHECKSUM_COLUMN]))
        table, lost = fetch_readable(self._store, ids, wanted)
        rows, good = table.to_pylist(), []
        for row in rows:
            times = {"times": row["times"]}
            good.append(not (damaged_item_columns(row) or damaged_frame_columns(row["frames_key"], times)))
            if not good[-1]:
                lost[row["id"]] = "its facts or times are not those that were written"
        self._note(lost)
        if all(good) and not any(is_dense(row["frames_key"]) for row in rows):
            return {row["id"]: row for row in rows}
        whole = own_frames(table.filter(pa.array(good, pa.bool_())), self._store.stamp.num_frames)
        return {row["id"]: row for row in whole.to_pylist()}

    def error(self, item: str) -> DamagedLibraryError:
        """What to raise where an item is needed and nothing else will do."""
        reason = f"item {item}: {self._found.get(item, 'it is damaged')}"
        return damaged_library(self._store.uri, reason)

    def _note(self, lost: Mapping[str, str]) -> None:
        # Only what can be an item: an id that somebody made up is neither remembered nor written to a log.
        lost = {item: why for item, why in lost.items() if _ITEM_ID.fullmatch(item)}
        with self._mutex:
            new = {item: why for item, why in lost.items() if item not in self._found}
            new = dict(list(new.items())[: max(0, _MOST_REMEMBERED - len(self._found))])
            self._found |= new
        for item, why in new.items():
            fields = {"item": item, "reason": why}  # a server's log keeps these
            _log.warning(
                "item %s is damaged and left out of searches: %s", item, why, extra={"fields": fields}
            )

    def _forget(self, intact: Iterable[str]) -> None:
        with self._mutex:
            for item in intact:
                self._found.pop(item, None)
