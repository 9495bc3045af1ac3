"""Which items a search may return: a small typed tree, never a string of SQL.

`parse_filter` reads what a person types; a store translates the tree; `matches` is the slow
reference that every translation is tested against.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any


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
    """Seconds of the file, both ends included; None is no limit."""

    shortest: float | None = None
    longest: float | None = None


@dataclass(frozen=True)
class ModifiedBetween:
    """Days (UTC) on which the file was last changed, both included; None is no limit."""

    first: date | None = None
    last: date | None = None


@dataclass(frozen=True)
class HasTag:
    """The item has this tag."""

    tag: str


@dataclass(frozen=True)
class IdIn:
    """The item has one of these ids."""

    ids: tuple[str, ...]


@dataclass(frozen=True)
class And:
    """Every filter passes; an empty one lets everything pass."""

    filters: tuple[Filter, ...]


@dataclass(frozen=True)
class Or:
    """At least one filter passes; an empty one lets nothing pass."""

    filters: tuple[Filter, ...]


@dataclass(frozen=True)
class Not:
    """The filter does not pass."""

    filter: Filter


Filter = InFolder | NameLike | DurationBetween | ModifiedBetween | HasTag | IdIn | And | Or | Not


def matches(where: Filter, row: Mapping[str, Any]) -> bool:
    """Whether an item passes; `row` has id, path, file_duration, modified, tags. Every store must agree."""
    match where:
        case InFolder(folder):
            anchor, needle = folder_needle(folder)
            return row["path"].startswith(needle) if anchor else needle in row["path"]
        case NameLike(pattern):
            return re.fullmatch(name_regex(pattern), name_key(row["path"])) is not None
        case DurationBetween(shortest, longest):
            seconds = row["file_duration"]
            return (shortest is None or seconds >= shortest) and (longest is None or seconds <= longest)
        case ModifiedBetween():
            first, beyond = modified_limits(where)
            return (first is None or row["modified"] >= first) and (
                beyond is None or row["modified"] < beyond
            )
        case HasTag(tag):
            return tag in row["tags"]
        case IdIn(ids):
            return row["id"] in ids
        case And(filters):
            return all(matches(part, row) for part in filters)
        case Or(filters):
            return any(matches(part, row) for part in filters)
        case Not(part):
            return not matches(part, row)


def folder_needle(folder: str) -> tuple[bool, str]:
    """What to look for in a path, and whether only at its beginning."""
    folder = folder.rstrip("/")
    if folder.startswith("/") or re.match(r"[A-Za-z]:(/|$)", folder) or not folder:
        return True, f"{folder}/"
    return False, f"/{folder}/"


def name_key(path: str) -> str:
    """The file name of a path in the form that patterns are compared in: one case, composed characters.

    Stores keep it as a column: databases disagree on what the lower case of a letter is.
    """
    return _fold(path.rpartition("/")[2])


def name_regex(pattern: str) -> str:
    """The pattern as a regular expression over `name_key`, which Python, Rust and PostgreSQL read alike.

    Stars in a row mean one: PostgreSQL takes minutes to read 490 of them.

    >>> name_regex("A*[0-9].mp4"), name_regex("**?*")
    ('(?s)^a.*[0-9]\\\\U0000002Emp4$', '(?s)^..*$')
    """
    text, at = _fold(pattern), 0
    parts: list[str] = []
    while at < len(text):
        close = text.find("]", at + 3 if text[at + 1 : at + 2] == "!" else at + 2) if text[at] == "[" else -1
        if close > 0:
            parts.append(_character_class(text[at + 1 : close]))
            at = close
        elif text[at] in "*?" and parts[-1:] == [".*"]:
            parts[-1:-1] = ["."] * (text[at] == "?")  # before the star: wildcards in a row have at most one
        else:
            parts.append({"*": ".*", "?": "."}.get(text[at]) or _literal(text[at]))
        at += 1
    return f"(?s)^{''.join(parts)}$"


def modified_limits(where: ModifiedBetween) -> tuple[datetime | None, datetime | None]:
    """The first moment of the first day and the first moment after the last one."""

    def midnight(day: date) -> datetime:
        return datetime(day.year, day.month, day.day, tzinfo=UTC)

    first = None if where.first is None else midnight(where.first)
    beyond = None if where.last in (None, date.max) else midnight(where.last + timedelta(days=1))
    return first, beyond


def _fold(text: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold())


def _literal(character: str) -> str:
    return character if character.isascii() and character.isalnum() else f"\\U{ord(character):08X}"


def _character_class(content: str) -> str:
    negated = content.startswith("!")
    content = content[negated:]
    parts = []
    while content:
        if len(content) > 2 and content[1] == "-":
            first, last = sorted((content[0], content[2]))  # engines disagree on [z-a]
            parts.append(f"{_literal(first)}-{_literal(last)}")
            content = content[3:]
        else:
            parts.append(_literal(content[0]))
            content = content[1:]
    return f"[{'^' if negated else ''}{''.join(parts)}]"
