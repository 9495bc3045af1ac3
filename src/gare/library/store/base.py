"""What every store can do, whatever it is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from gare.library.filters import Filter
from gare.library.schema import ModelStamp

if TYPE_CHECKING:
    import pyarrow as pa

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much is done and how much there is."""


@dataclass(frozen=True)
class Hits:
    """The nearest items of one query, best first, by inner product of `vector`."""

    ids: list[str]
    scores: np.ndarray


@dataclass(frozen=True)
class Stats:
    """What `maintain` did, in words for people and numbers for programs."""

    num_items: int
    num_indexed: int  # items that the vector index covers
    bytes_freed: int
    actions: tuple[str, ...]


class Store(Protocol):
    """A place for items, frames and the file ledger. Ids are strings; tables are Arrow tables of `schema`.

    Every write is durable when it returns and may be repeated without harm.
    """

    uri: str
    stamp: ModelStamp
    repairs: tuple[str, ...]  # what had to be mended when it was opened, for the user to read

    def upsert(self, items: pa.Table, frames: pa.Table) -> int:
        """Add items, or replace those with the same id; the number of items.

        Frames whose key the store has already are skipped, and need not be given: a moved file keeps its own.
        """
        ...

    def delete(self, ids: Sequence[str]) -> int: ...

    def count(self, where: Filter | None = None) -> int: ...

    def search(
        self, vectors: np.ndarray, k: int, *, where: Filter | None = None, exact: bool = False
    ) -> list[Hits]: ...

    def fetch(self, ids: Sequence[str], columns: Sequence[str]) -> pa.Table:
        """Rows of these ids in this order; columns of items and of frames alike. Unknown ids are left out."""
        ...

    def scan(
        self, *, where: Filter | None = None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Every item once, in no order; columns of items, unless others are named as for `fetch`."""
        ...

    def record_files(self, files: pa.Table) -> None: ...

    def forget_files(self, paths: Sequence[str]) -> None: ...

    def scan_files(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]: ...

    def get_notes(self) -> dict[str, str]:
        """Small facts kept with the library: its folders, the last audit."""
        ...

    def set_notes(self, notes: Mapping[str, str]) -> None: ...

    def maintain(self, progress: Progress | None = None) -> Stats:
        """Index what is new, join what is small, remove what nobody needs; others may go on meanwhile."""
        ...

    def close(self) -> None: ...
