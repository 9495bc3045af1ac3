"""How an older library becomes one of today, step by step.

`MIGRATIONS[n]` turns version n into n + 1. A step may be repeated: the version is written after it, so a kill
in between runs it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gare.errors import LibraryError
from gare.library.schema import SCHEMA_VERSION


class Migratable(Protocol):
    """What a step may do to a store."""

    uri: str

    def add_column(self, table: str, name: str, value: str | bytes) -> None:
        """Add a column with one value in every row, unless it is there already."""
        ...

    def set_schema_version(self, version: int) -> None: ...


def _add_split_and_strip(store: Migratable) -> None:
    """Version 0 knew whole files only and kept no strip of frames."""
    store.add_column("files", "split", "whole")
    store.add_column("frames", "strip", b"")


MIGRATIONS: list[Callable[[Migratable], None]] = [_add_split_and_strip]


def migrate(store: Migratable, found: int, *, read_only: bool) -> tuple[str, ...]:
    """Bring a store to today's version; what was done, in words.

    Raises:
        LibraryError: it is newer than this gare, or old and open for reading only.
    """
    if found > SCHEMA_VERSION:
        raise LibraryError(
            f"library {store.uri} has format {found}, this gare knows up to {SCHEMA_VERSION}: upgrade gare "
            "(pip install --upgrade gare)."
        )
    if found < SCHEMA_VERSION and read_only:
        raise LibraryError(
            f"library {store.uri} has format {found}, older than {SCHEMA_VERSION}. Open it once for writing, "
            "with 'gare index': that brings it up to date."
        )
    done = []
    for version in range(found, SCHEMA_VERSION):
        MIGRATIONS[version](store)
        store.set_schema_version(version + 1)
        done.append(f"the library was brought from format {version} to {version + 1}")
    return tuple(done)
