"""Filters as a person types them: `folder:holidays duration:>10 not (tag:work or name:*.avi)`.

A filter is `field:value`; several in a row must all hold; `or`, `not` and parentheses do what they say. A
value with blanks is put in quotes, where a backslash saves a quote or another backslash.
"""

from __future__ import annotations

import math
import os
import re
from calendar import monthrange
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta

from gare.errors import ConfigError
from gare.library.filters.filter_tree import (
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
)

_MOST_NESTED = 50
_TOKEN = re.compile(r'\s*(?:(?P<bracket>[()])|(?P<field>[A-Za-z_]+):|(?P<word>[^\s():"]+))')
_RANGE = re.compile(r"(?P<compare><=|>=|<|>)(?P<limit>.*)|(?P<low>.*?)\.\.(?P<high>.*)", re.DOTALL)


def parse_filter(text: str) -> Filter:
    """Read a filter.

    >>> parse_filter("tag:family duration:5..60")
    And(filters=(HasTag(tag='family'), DurationBetween(shortest=5.0, longest=60.0)))

    Raises:
        ConfigError: it cannot be read; the message says where, and what may stand there.
    """
    parser = _Parser(text)
    parsed = parser.read_alternatives(0)
    if parser.peek() == ")":
        raise parser.error("this ')' closes nothing")
    return parsed


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def error(self, message: str, at: int | None = None) -> ConfigError:
        at = self.at if at is None else at
        return ConfigError(f"filter: {message}\n  {self.text}\n  {' ' * at}^")

    def peek(self) -> str:
        """The next bracket or bare word, "" at the end, "field" before one."""
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1
        if self.at == len(self.text):
            return ""
        token = _TOKEN.match(self.text, self.at)
        if token is None:
            raise self.error(f"expected one of {_FIELD_NAMES}")
        return "field" if token["field"] else token[0].lower()

    def read_alternatives(self, depth: int) -> Filter:
        if depth > _MOST_NESTED:
            raise self.error(f"more than {_MOST_NESTED} brackets in brackets")
        alternatives = [self.read_conjunction(depth)]
        while self.peek() == "or":
            self.at += len("or")
            alternatives.append(self.read_conjunction(depth))
        return alternatives[0] if len(alternatives) == 1 else Or(tuple(alternatives))

    def read_conjunction(self, depth: int) -> Filter:
        parts = [self.read_term(depth)]
        while (token := self.peek()) not in ("", ")", "or"):
            if token == "and":
                self.at += len("and")
            parts.append(self.read_term(depth))
        return parts[0] if len(parts) == 1 else And(tuple(parts))

    def read_term(self, depth: int) -> Filter:
        negations = 0
        while (token := self.peek()) == "not":
            negations += 1
            self.at += len("not")
        if token == "(":
            self.at += 1
            term = self.read_alternatives(depth + 1)
            if self.peek() != ")":
                raise self.error("a '(' was not closed")
            self.at += 1
        elif token == "field":
            term = self.read_field()
        elif not token:
            raise self.error(f"it ends where one of {_FIELD_NAMES} was expected")
        else:
            raise self.error(f"'{token}' is not a filter; expected one of {_FIELD_NAMES}")
        return Not(term) if negations % 2 else term

    def read_field(self) -> Filter:
        name, _, _ = self.text[self.at :].partition(":")
        field = _FIELDS.get(name.lower())
        if field is None:
            raise self.error(f"there is no '{name}:'; expected one of {_FIELD_NAMES}")
        self.at += len(name) + 1
        value_at = self.at
        value = self.read_quoted() if self.text[self.at : self.at + 1] == '"' else self.read_bare()
        if not value:
            raise self.error(f"nothing after '{name}:'; for example {field.example}", value_at)
        if "\0" in value or not _is_unicode(value):
            raise self.error("characters that no text can contain", value_at)
        try:
            return field.read(value)
        except (ValueError, OverflowError):
            raise self.error(f"'{value}' is no {name}; for example {field.example}", value_at) from None

    def read_bare(self) -> str:
        """Up to a blank, or to a bracket that was opened before: `name:clip(1).mp4` is one value."""
        start, open_brackets = self.at, 0
        while self.at < len(self.text) and not self.text[self.at].isspace():
            open_brackets += {"(": 1, ")": -1}.get(self.text[self.at], 0)
            if open_brackets < 0:
                break
            self.at += 1
        return self.text[start : self.at]

    def read_quoted(self) -> str:
        quoted = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL).match(self.text, self.at)
        if quoted is None:
            raise self.error("this quote is not closed")
        self.at = quoted.end()
        return re.sub(r"\\(.)", r"\1", quoted[1], flags=re.DOTALL)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_folder(value: str) -> Filter:
    return InFolder(os.path.expanduser(value))


def _read_duration(value: str) -> Filter:
    """`>10`, `<=1:30`, `5..60`, `2m..`: `>` and `<` leave the limit itself out."""
    found = _RANGE.fullmatch(value)
    if found is None:
        raise ValueError("a single length matches next to nothing")
    if found["compare"]:
        seconds = _read_seconds(found["limit"])
        match found["compare"]:
            case ">":
                return DurationBetween(shortest=math.nextafter(seconds, math.inf))
            case ">=":
                return DurationBetween(shortest=seconds)
            case "<":
                return DurationBetween(longest=math.nextafter(seconds, -math.inf))
            case _:
                return DurationBetween(longest=seconds)
    low, high = found["low"], found["high"]
    if not low and not high:
        raise ValueError("a range without ends")
    return DurationBetween(_read_seconds(low) if low else None, _read_seconds(high) if high else None)


def _read_seconds(value: str) -> float:
    """10, 2.5s, 3m, 1h, 1:30 or 1:02:03."""
    number = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|min|h)?", value, re.ASCII)
    if number:
        return float(number[1]) * {None: 1, "s": 1, "m": 60, "min": 60, "h": 3600}[number[2]]
    clock = re.fullmatch(r"(?:(\d+):)?(\d+):(\d+(?:\.\d+)?)", value, re.ASCII)
    if clock is None:
        raise ValueError(value)
    return int(clock[1] or 0) * 3600 + int(clock[2]) * 60 + float(clock[3])


def _read_dates(value: str) -> Filter:
    """`2024`, `2024-03`, `2024-03-05`, ranges of these, or `>`, `>=`, `<`, `<=` before one."""
    found = _RANGE.fullmatch(value)
    if found is None:
        return ModifiedBetween(*_read_period(value))
    if not found["compare"]:
        low, high = found["low"], found["high"]
        if not low and not high:
            raise ValueError("a range without ends")
        return ModifiedBetween(_read_period(low)[0] if low else None, _read_period(high)[1] if high else None)
    first, last = _read_period(found["limit"])
    match found["compare"]:
        case ">":
            return ModifiedBetween(first=last + timedelta(days=1))
        case ">=":
            return ModifiedBetween(first=first)
        case "<":
            return ModifiedBetween(last=first - timedelta(days=1))
        case _:
            return ModifiedBetween(last=last)


def _read_period(value: str) -> tuple[date, date]:
    """The first and the last day of a year, a month or a day."""
    found = re.fullmatch(r"(\d{4})(?:-(\d{1,2})(?:-(\d{1,2}))?)?", value, re.ASCII)
    if found is None:
        raise ValueError(value)
    year, month = int(found[1]), int(found[2] or 1)
    if found[3]:
        day = date(year, month, int(found[3]))
        return day, day
    last_month = month if found[2] else 12
    return date(year, month, 1), date(year, last_month, monthrange(year, last_month)[1])


@dataclass(frozen=True)
class _Field:
    read: Callable[[str], Filter]
    example: str


_FIELDS = {
    "folder": _Field(_read_folder, "folder:holidays/2024"),
    "name": _Field(NameLike, "name:*.mp4"),
    "duration": _Field(_read_duration, "duration:>10, duration:5..60 or duration:<=1:30"),
    "date": _Field(_read_dates, "date:2024-03, date:>=2024-01-31 or date:2024-01..2024-03"),
    "tag": _Field(HasTag, "tag:family"),
    "id": _Field(lambda value: IdIn(tuple(value.split(","))), "id:b2dfb3a0f077c5f81304"),
}
_FIELD_NAMES = ", ".join(f"{name}:" for name in _FIELDS) + ", not, ("
