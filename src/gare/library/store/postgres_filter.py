"""Filters as PostgreSQL conditions. Values travel as parameters, never in the text."""

from __future__ import annotations

from typing import Any

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

Condition = tuple[str, list[Any]]


def to_postgres(where: Filter | None) -> Condition:
    """The condition with placeholders, and what goes into them."""
    match where:
        case None:
            return "true", []
        case InFolder(folder):
            at_start, needle = folder_needle(folder)
            return _text("starts_with(i.path, %s)" if at_start else "strpos(i.path, %s) > 0", needle)
        case NameLike(pattern):
            return _text("i.name_key ~ %s", name_regex(pattern))
        case DurationBetween(shortest, longest):
            return _limits('(i."end" - i.start)', "float8", ((">=", shortest), ("<=", longest)))
        case ModifiedBetween():
            first, beyond = modified_limits(where)
            return _limits("i.modified", "timestamptz", ((">=", first), ("<", beyond)))
        case HasTag(tag):
            return _text("%s = ANY(i.tags)", tag)
        case IdIn(ids):
            return "i.id = ANY(%s)", [[one for one in ids if "\0" not in one]]
        case And(filters):
            return _join(filters, " AND ", "true")
        case Or(filters):
            return _join(filters, " OR ", "false")
        case Not(part):
            condition, values = to_postgres(part)
            return f"NOT {condition}", values


def _text(condition: str, value: str) -> Condition:
    """PostgreSQL has no text with a NUL, so nothing it holds can match one."""
    return ("false", []) if "\0" in value else (f"({condition})", [value])


def _limits(expression: str, kind: str, limits: tuple[tuple[str, Any], ...]) -> Condition:
    set_limits = [(sign, value) for sign, value in limits if value is not None]
    conditions = [f"{expression} {sign} %s::{kind}" for sign, _ in set_limits]
    return f"({' AND '.join(conditions) or 'true'})", [value for _, value in set_limits]


def _join(filters: tuple[Filter, ...], operator: str, when_empty: str) -> Condition:
    parts = [to_postgres(part) for part in filters]
    joined = operator.join(condition for condition, _ in parts)
    return f"({joined or when_empty})", [value for _, values in parts for value in values]
