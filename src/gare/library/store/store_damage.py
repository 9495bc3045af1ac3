"""Damage below the rows of a library: what is found and what mends it, for every kind of store.

A library that has lost a table cannot be opened as a `Store`. A `Surgeon` looks at what is left of it, and
makes of it a library that opens: perhaps with fewer rows, never with wrong ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gare.library.store.store_schema import ModelStamp

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Damage:
    """A part of a store that is not as it was written."""

    kind: str
    """One of `DAMAGE_KINDS`."""
    table: str
    what: str
    """For people: which file, and what is wrong with it."""


DAMAGE_KINDS = {
    "lost_table": "a table is gone",
    "broken_manifest": "the newest version of a table cannot be read",
    "lost_data": "a data file is gone",
    "cut_data": "a data file has another size than was written",
    "broken_data": "a data file cannot be read",
    "doubled_rows": "a table has two rows with one key",
    "lost_facts": "the library's stamp or format is gone",
    "broken_index": "the vector index is gone or cannot be read",
    "lost_link": "the database does not check any more that items have frames",
}


REPAIR_NOTE = "repair"
"""The note that holds which tables were damaged, until the repair has come to its end."""
REPAIR_FACT = f"note:{REPAIR_NOTE}"


class Surgeon(ABC):
    """Finds and mends damage below the rows of a library. Nothing is deleted: it moves to `set-aside`."""

    uri: str
    """The address as a store shows it."""

    @abstractmethod
    def exists(self) -> bool:
        """Whether anything of a library is there."""

    @abstractmethod
    def beside(self, name: str) -> Surgeon:
        """For the vectors of another model, which `Store.beside` opens under this name."""

    def is_unfinished(self) -> bool:
        """Whether a process died while it made the library: it holds nothing yet, and opens for writing."""
        return False

    @abstractmethod
    def examine(self, *, read_all: bool = False) -> list[Damage]:
        """What is wrong. It writes nothing.

        Args:
            read_all: read every data file as a whole.
        """

    @abstractmethod
    def stamp(self) -> ModelStamp | None:
        """The model that made the library, from its facts or a copy of them; None where both are lost."""

    @abstractmethod
    def sample(self) -> pa.Table:
        """`path`, `content`, `start`, `frames_key`, `vectors` of a few items: they tell the model."""

    @abstractmethod
    def mend(self, stamp: ModelStamp, *, read_all: bool = True) -> list[str]:
        """Make a library that opens; what was done, in words. It may be repeated after a crash.

        Args:
            stamp: what `stamp` says, or the model of the library where that is None.
            read_all: read every data file as a whole, and keep of it what can be read.
        """

    def close(self) -> None:  # noqa: B027 - files need no closing
        """Let go of connections."""
