"""What every store can do, and what a new one must implement.

A new store is a subclass of `Store` with a constructor and the eight abstract methods. It is registered under
the scheme of its addresses: after `STORES.register("memory", MemoryStore)`, the address `memory://holidays`
opens it, in `gare.Library.open` and in every command. Everything else has a default here. A default reads
every item; override it where the store knows a faster way.
"""

from __future__ import annotations

import random
import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gare.errors import DamagedLibraryError, LibraryError, MissingLibraryError
from gare.library.filters import Filter, IdIn
from gare.library.store.read_deadline import checked
from gare.library.store.store_schema import (
    ModelStamp,
    check_query,
    columns_schema,
    parse_stamp,
    unfinished_files,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from gare.library.store.shared_records import Records

_MOST_COLLISIONS = 50

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much is done and how much there is."""


@dataclass(frozen=True)
class Hits:
    """The nearest items of one query, best first, by inner product of `vector`."""

    ids: list[str]
    scores: np.ndarray
    is_exact: bool = False
    """Every item was compared, so no other has a larger product than the last of these."""


@dataclass(frozen=True)
class Stats:
    """What `maintain` did, in words for people and numbers for programs."""

    num_items: int
    num_indexed: int  # items that the vector index covers
    bytes_freed: int
    actions: tuple[str, ...]


class Store(ABC):
    """A place for items, frames and the file ledger: Arrow tables as in `store_schema`.

    Every write is durable when it returns and may be repeated without harm. A constructor must set `uri` and
    `stamp`; it refuses another model's library with `check_same_model`, and one that is not there with
    `no_library`, unless it may create it.

    A server ends a search that nobody waits for: who reads a `scan` looks at the deadline between batches. A
    store whose batches take long to come calls `read_deadline.check_deadline` in between.

    Args:
        uri: the address as the user gave it, with its scheme.
        stamp: the model whose vectors are expected; None takes a library of any model.
        create: make the library where there is none; `stamp` is given then.
        read_only: never write, not even to repair.
    """

    uri: str
    stamp: ModelStamp

    @property
    def address(self) -> str:
        """What opens the library again, in another process. It may hold a password, so show `uri` instead."""
        return self.uri

    repairs: tuple[str, ...] = ()
    """What had to be mended when it was opened, for the user to read."""

    @abstractmethod
    def __init__(self, uri: str, *, stamp: ModelStamp | None, create: bool, read_only: bool) -> None: ...

    # --- items and frames -----------------------------------------------------------------------------------

    @abstractmethod
    def upsert(self, items: pa.Table, frames: pa.Table) -> int:
        """Add items, or replace those with the same id; the number of items.

        Frames whose key the store has already are skipped, and need not be given: a moved file keeps its own.
        """

    @abstractmethod
    def delete(self, ids: Sequence[str]) -> int:
        """Remove items; how many of them there were."""

    @abstractmethod
    def scan(
        self, *, where: Filter | None = None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Every item once, in no order.

        Args:
            where: only items that pass; `gare.library.filters.matches` is the reference.
            columns: names of columns of items and of frames alike; None is all columns of items.
        """

    def fetch(self, ids: Sequence[str], columns: Sequence[str]) -> pa.Table:
        """Rows of these ids in this order; columns as for `scan`. Unknown ids are left out."""
        import pyarrow as pa

        wanted = list(dict.fromkeys(["id", *columns]))
        batches = list(checked(self.scan(where=IdIn(tuple(ids)), columns=wanted)))
        table = (
            pa.Table.from_batches(batches) if batches else columns_schema(wanted, self.stamp).empty_table()
        )
        row_of = {item: row for row, item in enumerate(table["id"].to_pylist())}
        rows = pa.array([row_of[item] for item in ids if item in row_of], pa.int64())
        return table.take(rows).select(list(columns))

    def version(self) -> int | None:
        """A number that grows whenever items do, go or change; None where the store has none.

        Who keeps something about every item need not list them again while it stays the same.
        """
        return None

    def count(self, where: Filter | None = None) -> int:
        """How many items pass the filter; without one, how many there are."""
        return sum(batch.num_rows for batch in checked(self.scan(where=where, columns=["id"])))

    def search(
        self, vectors: np.ndarray, k: int, *, where: Filter | None = None, exact: bool = False
    ) -> list[Hits]:
        """The `k` items with the largest inner product for each query [queries, stage1_dim].

        Args:
            exact: compare with every item, even where there is an index.
        """
        queries = check_query(vectors, k, self.stamp)
        best = TopK(len(queries), k)
        ids: list[str] = []
        for batch in checked(self.scan(where=where, columns=["id", "vector"])):
            items = batch["vector"].flatten().to_numpy(zero_copy_only=False).reshape(batch.num_rows, -1)
            best.add(queries @ items.T, np.arange(len(ids), len(ids) + batch.num_rows, dtype=np.uint64))
            ids += batch["id"].to_pylist()
        return [Hits([ids[row] for row in rows.tolist()], scores, True) for scores, rows in best.results()]

    # --- the ledger and the notes ---------------------------------------------------------------------------

    @abstractmethod
    def record_files(self, files: pa.Table) -> None:
        """Write rows of the ledger; a row replaces that of the same path."""

    @abstractmethod
    def forget_files(self, paths: Sequence[str]) -> None:
        """Remove rows of the ledger."""

    @abstractmethod
    def scan_files(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Every row of the ledger once, in no order; None is all columns."""

    @abstractmethod
    def get_notes(self) -> dict[str, str]:
        """Small facts kept with the library: its folders, the last audit, which vectors are current.

        As they are now: what is forgotten a moment after a change of model depends on it.
        """

    @abstractmethod
    def set_notes(self, notes: Mapping[str, str]) -> None:
        """Write some of the notes; the others stay."""

    # --- whole files ----------------------------------------------------------------------------------------

    takes_turns: bool = False
    """Nobody else writes during `replace_files`, so there is no need to look whether somebody did."""

    def items_of(self, paths: Sequence[str]) -> dict[str, str]:
        """The items of these files as they are now, whatever made them: frames key by id."""
        import pyarrow as pa
        import pyarrow.compute as pc

        wanted = pa.array(paths, pa.string())
        found: dict[str, str] = {}
        for batch in self.scan(columns=["id", "path", "frames_key"]):
            mine = batch.filter(pc.is_in(batch["path"], wanted))
            found |= zip(mine["id"].to_pylist(), mine["frames_key"].to_pylist(), strict=True)
        return found

    def replace(self, items: pa.Table, frames: pa.Table, gone: Sequence[str]) -> None:
        """`upsert` items and `delete` others; in one step where the store can."""
        self.upsert(items, frames)
        if len(gone):
            self.delete(gone)

    def replace_files(self, items: pa.Table, frames: pa.Table, files: pa.Table) -> None:
        """Make these the only items of these files, then write the files into the ledger.

        All other items of the files go, whatever made them: another segmentation, another process. When two
        write the same file at once, the items of one of them stay, never some of each, and the ledger does
        not speak of the other's.
        """
        paths = files["path"].to_pylist()
        keys = dict(zip(items["id"].to_pylist(), items["frames_key"].to_pylist(), strict=True))
        self._replace_items(items, frames, paths, keys)
        self.record_files(files)
        if not self.takes_turns and self.items_of(paths) != keys:
            # Another one wrote between our items and our ledger. The next run looks at the files again.
            self.record_files(unfinished_files(files))

    def _replace_items(
        self, items: pa.Table, frames: pa.Table, paths: Sequence[str], keys: Mapping[str, str]
    ) -> None:
        is_written = not keys
        for attempt in range(_MOST_COLLISIONS):
            found = self.items_of(paths)
            if is_written and found == keys:
                return
            self.replace(items, frames, sorted(found.keys() - keys.keys()))
            if self.takes_turns:
                return
            is_written = True
            if attempt > 1:  # two that met should not meet again
                time.sleep(random.uniform(0, 0.05 * attempt))
        raise LibraryError(
            f"library {self.uri}: other processes keep writing the same files; let them finish, then run "
            "'gare index' again"
        )

    # --- vectors of another model ---------------------------------------------------------------------------

    def beside(self, name: str, *, stamp: ModelStamp | None, create: bool, read_only: bool) -> Store:
        """Open a store of its own for the vectors of another model, below the same address.

        Args:
            name: letters, digits and hyphens.
        """
        from gare.library.store import open_store

        return open_store(f"{self.address}-{name}", stamp=stamp, create=create, read_only=read_only)

    def drop_beside(self, name: str) -> None:
        """Free what `beside` made; nothing where it made nothing."""
        try:
            store = self.beside(name, stamp=None, create=False, read_only=False)
        except MissingLibraryError:
            return
        store.discard()
        store.close()

    def discard(self) -> None:
        """Remove every item, every frame and the whole ledger at once. The notes stay."""
        for batch in list(self.scan(columns=["id"])):
            self.delete(batch["id"].to_pylist())
        for batch in list(self.scan_files(["path"])):
            self.forget_files(batch["path"].to_pylist())
        self.maintain()

    def num_bytes(self) -> int | None:
        """How much room it takes; None where the store cannot tell."""
        return None

    def records(self) -> Records:
        """Texts that several processes change at once; what machines that index together agree by.

        Raises:
            LibraryError: this store keeps none.
        """
        raise LibraryError(
            f"{self.uri} cannot be indexed by several machines: its store keeps no records. Index it from "
            "one machine, without --ray"
        )

    # --- upkeep ---------------------------------------------------------------------------------------------

    def check(self) -> None:  # noqa: B027 - a database looks after itself
        """Raise `LibraryError` where a quick look finds damage: data that is gone, items without frames."""

    counts_deletions: bool = False
    """Whether the ledger has known of every deleted item since the library was made: fewer items than it
    counts are then a loss."""

    def num_indexed(self) -> int:
        """Items that a vector index covers; 0 where there is none."""
        return 0

    def drop_index(self) -> None:  # noqa: B027 - most stores have none
        """Remove the vector index; `maintain` builds it anew."""

    def misnamed(self) -> list[str]:
        """Items that a filter by name cannot find: what the store derived from their path is wrong."""
        return []

    def frames_keys(self) -> set[str] | None:
        """The key of every row of frames, those that no item refers to as well; None where a store cannot
        tell them."""
        return None

    def maintain(self, progress: Progress | None = None) -> Stats:
        """Index what is new, join what is small, remove what nobody needs; others may go on meanwhile."""
        return Stats(self.count(), 0, 0, ())

    def close(self) -> None:  # noqa: B027 - most stores hold nothing open between calls
        """Let go of connections and files."""


def damaged_library(uri: str, reason: str) -> DamagedLibraryError:
    """What a store raises when it cannot be read as it was written."""
    return DamagedLibraryError(
        f"library {uri} is damaged: {reason}. Run 'gare check --repair {shlex.quote(uri)}': it mends what it "
        "can from your videos and lists what it cannot. Nothing outside the library is touched.",
        reason=reason,
    )


def parse_facts(uri: str, facts: Mapping[str, str]) -> tuple[ModelStamp, int]:
    """The stamp and the version of the format, from the facts of a library.

    Raises:
        DamagedLibraryError: they are not there, or cannot be read.
    """
    stamp = parse_stamp(facts.get("stamp"))
    if stamp is None or not facts.get("schema_version", "").isdecimal():
        raise damaged_library(uri, "its facts lack the model's stamp or the format")
    return stamp, int(facts["schema_version"])


def fetch_readable(
    store: Store, ids: Sequence[str], columns: Sequence[str]
) -> tuple[pa.Table, dict[str, str]]:
    """What can be read of these items, in their order, and why the others cannot: a message by id.

    It halves what cannot be read until single items are left.
    """
    import pyarrow as pa

    try:
        return store.fetch(ids, columns), {}
    except DamagedLibraryError as error:
        if len(ids) == 1:
            return columns_schema(columns, store.stamp).empty_table(), {ids[0]: error.reason}
    half = len(ids) // 2
    first, lost = fetch_readable(store, ids[:half], columns)
    second, lost_too = fetch_readable(store, ids[half:], columns)
    return pa.concat_tables([first, second]), lost | lost_too


def no_library(uri: str) -> MissingLibraryError:
    """What a store raises when it is asked to open a library that is not there."""
    return MissingLibraryError(
        f"there is no library at {uri}. Check the address, or make one with 'gare index DIR'"
    )


class TopK:
    """Keeps the k best scores of each query, and which rows they belong to."""

    def __init__(self, num_queries: int, k: int) -> None:
        self.k = k
        self._scores = np.empty((num_queries, 0), np.float32)
        self._rows = np.empty((num_queries, 0), np.uint64)

    def add(self, scores: np.ndarray, rows: np.ndarray) -> None:
        """`scores` is [queries, rows of this batch]."""
        scores = np.concatenate([self._scores, scores], axis=1)
        rows = np.concatenate([self._rows, np.broadcast_to(rows, (len(scores), len(rows)))], axis=1)
        if scores.shape[1] > self.k:
            keep = np.argpartition(-scores, self.k - 1, axis=1)[:, : self.k]
            scores, rows = np.take_along_axis(scores, keep, 1), np.take_along_axis(rows, keep, 1)
        self._scores, self._rows = scores, rows

    def results(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Scores and rows of each query, best first."""
        order = np.argsort(-self._scores, axis=1, kind="stable")
        for scores, rows, places in zip(self._scores, self._rows, order, strict=True):
            yield scores[places], rows[places]
