"""Filters in the SQL that Lance reads. Values enter only as quoted literals."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from gare.library.filters.tree import (
    And,
    DurationBetween,
    Filter,
    HasTag,
    IdIn,
    InFolder,
    ModifiedBetween,
    NameLike,
    Not,
    Or,
    folder_needle,
    modified_limits,
    name_regex,
)

NAME_COLUMN = "name_key"


def to_lance(where: Filter) -> str:
    """The condition, in brackets where it needs them."""
    match where:
        case InFolder(folder):
            at_start, needle = folder_needle(folder)
            return f"{'starts_with' if at_start else 'contains'}(path, {quote(needle)})"
        case NameLike(pattern):
            return f"regexp_like({NAME_COLUMN}, {quote(name_regex(pattern))})"
        case DurationBetween(shortest, longest):
            limits = ((">=", shortest), ("<=", longest))
            return _all(f"(end - start) {sign} {_number(x)}" for sign, x in limits if x is not None)
        case ModifiedBetween():
            first, beyond = modified_limits(where)
            moments = ((">=", first), ("<", beyond))
            return _all(f"modified {sign} {_moment(x)}" for sign, x in moments if x is not None)
        case HasTag(tag):
            return f"array_has(tags, {quote(tag)})"
        case IdIn(ids):
            return is_in("id", ids)
        case And(filters):
            return _all(to_lance(part) for part in filters)
        case Or(filters):
            return f"({' OR '.join(map(to_lance, filters))})" if filters else "false"
        case Not(part):
            return f"(NOT {to_lance(part)})"


def is_in(column: str, values: Iterable[str]) -> str:
    literals = ", ".join(quote(value) for value in values)
    return f"({column} IN ({literals}))" if literals else "false"


def quote(text: str) -> str:
    """A literal: in this dialect only the quote itself is special."""
    return "'" + text.replace("'", "''") + "'"


def _number(value: float) -> str:
    return f"CAST({quote(repr(float(value)))} AS DOUBLE)"


def _moment(value: datetime) -> str:
    microseconds = (value - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    return f"to_timestamp_micros({microseconds})"  # a literal would be read as nanoseconds: 1677 to 2262 only


def _all(conditions: Iterable[str]) -> str:
    joined = " AND ".join(conditions)
    return f"({joined})" if joined else "true"
