"""Which items a search may return: a small typed tree, never a string of SQL.

`parse_filter` reads what a person types; a store translates the tree; `matches` is the slow reference
that every translation is tested against.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date


@dataclass(frozen=True)
class InFolder:
    """The file lies in this folder or below it. An absolute path, or the end of one: `holidays/2024`."""

    folder: str


@dataclass(frozen=True)
class NameLike:
    """The file's name (without folders) matches this pattern: `*`, `?` and `[abc]`, any case."""

    pattern: str


@dataclass(frozen=True)
class DurationBetween:
    """Seconds of the item, both ends included; None is no limit."""

    shortest: float | None = None
    longest: float | None = None


@dataclass(frozen=True)
class ModifiedBetween:
    """Days (UTC) on which the file was last changed, both included; None is no limit."""

    first: date | None = None
    last: date | None = None


@dataclass(frozen=True)
class HasTag:
    tag: str


@dataclass(frozen=True)
class IdIn:
    ids: tuple[str, ...]


@dataclass(frozen=True)
class And:
    filters: tuple[Filter, ...]


@dataclass(frozen=True)
class Or:
    filters: tuple[Filter, ...]


@dataclass(frozen=True)
class Not:
    filter: Filter


Filter = InFolder | NameLike | DurationBetween | ModifiedBetween | HasTag | IdIn | And | Or | Not
