"""Filters: what a person types, what it means, and what is said when it cannot be read."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime
from typing import Any

import pytest

from gare.errors import ConfigError
from gare.library.filters import (
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
    matches,
    parse_filter,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tag:family", HasTag("family")),
        ('tag:"two words"', HasTag("two words")),
        (r'tag:"a \"quote\" and \\"', HasTag('a "quote" and \\')),
        ("TAG:x", HasTag("x")),
        ("folder:holidays/2024", InFolder("holidays/2024")),
        ("name:clip(1).mp4", NameLike("clip(1).mp4")),
        ("(name:a)", NameLike("a")),
        ("(name:a(b))", NameLike("a(b)")),
        ("id:a,b", IdIn(("a", "b"))),
        ("tag:a tag:b", And((HasTag("a"), HasTag("b")))),
        ("tag:a and tag:b", And((HasTag("a"), HasTag("b")))),
        ("tag:a tag:b or tag:c", Or((And((HasTag("a"), HasTag("b"))), HasTag("c")))),
        ("tag:a (tag:b OR tag:c)", And((HasTag("a"), Or((HasTag("b"), HasTag("c")))))),
        ("not tag:a tag:b", And((Not(HasTag("a")), HasTag("b")))),
        ("not (tag:a tag:b)", Not(And((HasTag("a"), HasTag("b"))))),
        ("not not tag:a", HasTag("a")),
        ("tag:not tag:or", And((HasTag("not"), HasTag("or")))),
        ("duration:5..60", DurationBetween(5.0, 60.0)),
        ("duration:..1:30", DurationBetween(None, 90.0)),
        ("duration:1:00:00..", DurationBetween(3600.0)),
        ("duration:>=2m", DurationBetween(120.0)),
        ("duration:>10", DurationBetween(math.nextafter(10, 11))),
        ("duration:<10s", DurationBetween(None, math.nextafter(10, 9))),
        ("duration:<=0.5h", DurationBetween(None, 1800.0)),
        ("date:2024", ModifiedBetween(date(2024, 1, 1), date(2024, 12, 31))),
        ("date:2024-02", ModifiedBetween(date(2024, 2, 1), date(2024, 2, 29))),
        ("date:2024-01..2024-03", ModifiedBetween(date(2024, 1, 1), date(2024, 3, 31))),
        ("date:>=2024-01-31", ModifiedBetween(date(2024, 1, 31))),
        ("date:>2024-01", ModifiedBetween(date(2024, 2, 1))),
        ("date:<2024", ModifiedBetween(None, date(2023, 12, 31))),
        ("date:<=2024-03", ModifiedBetween(None, date(2024, 3, 31))),
    ],
)
def test_what_a_person_types(text: str, expected: Filter):
    assert parse_filter(text) == expected


@pytest.mark.parametrize(
    ("text", "message", "at"),
    [
        ("", "ends where one of folder:, name:, duration:, date:, tag:, id:", 0),
        ("tag:a or", "ends where", 8),
        ("colour:red", "there is no 'colour:'; expected one of folder:", 0),
        ("tag:a beach", "'beach' is not a filter", 6),
        ("tag:", "nothing after 'tag:'; for example tag:family", 4),
        ("duration:10", "'10' is no duration; for example duration:>10", 9),
        ("duration:..", "is no duration", 9),
        ("duration:>1e3", "is no duration", 9),
        ("duration:>nan", "is no duration", 9),
        ("date:2024-13", "'2024-13' is no date", 5),
        ("date:2023-02-29", "is no date", 5),
        ("date:>9999", "is no date", 5),
        ("(tag:a", "'(' was not closed", 6),
        ("tag:a)", "')' closes nothing", 5),
        ('tag:"a', "quote is not closed", 4),
        ("tag:a\0", "no text can contain", 4),
        ("tag:\udcff", "no text can contain", 4),
        ("(" * 99 + "tag:a" + ")" * 99, "brackets in brackets", 51),
        (":", "expected one of", 0),
    ],
)
def test_what_cannot_be_read_says_where_and_what_is_allowed(text: str, message: str, at: int):
    with pytest.raises(ConfigError) as caught:
        parse_filter(text)
    first, *_, arrow = str(caught.value).split("\n")
    assert message in first
    assert arrow == f"  {' ' * at}^"


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert parse_filter("folder:~/Videos") == InFolder("/home/me/Videos")


ROW: dict[str, Any] = {
    "id": "1",
    "path": "/home/me/Videos/Holidays/2024/Äpfel 100%_(1).MP4",
    "file_duration": 15.0,
    "modified": datetime(2024, 2, 29, 23, 59, 59, 999_999, tzinfo=UTC),
    "tags": ["family", "a'b"],
}


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (InFolder("/home/me/Videos"), True),
        (InFolder("/home/me/Videos/"), True),
        (InFolder("/home/me/Vid"), False),
        (InFolder("/"), True),
        (InFolder("Holidays/2024"), True),
        (InFolder("2024"), True),
        (InFolder("idays/2024"), False),
        (InFolder("me"), True),
        (InFolder("Äpfel 100%_(1).MP4"), False),
        (NameLike("äPFEL*.mp4"), True),
        (NameLike("a\u0308pfel*"), True),
        (NameLike("*"), True),
        (NameLike("Äpfel"), False),
        (NameLike("Äpfel ???%_(1).mp?"), True),
        (NameLike("Äpfel [0-9]*"), True),
        (NameLike("Äpfel [!0-9]*"), False),
        (NameLike("*[(]1[)].mp4"), True),
        (NameLike("[*"), False),
        (NameLike("Holidays*"), False),
        (DurationBetween(15.0, 15.0), True),
        (DurationBetween(shortest=15.1), False),
        (DurationBetween(longest=14.9), False),
        (ModifiedBetween(date(2024, 2, 29), date(2024, 2, 29)), True),
        (ModifiedBetween(first=date(2024, 3, 1)), False),
        (ModifiedBetween(last=date(2024, 2, 28)), False),
        (ModifiedBetween(date.min, date.max), True),
        (HasTag("family"), True),
        (HasTag("Family"), False),
        (IdIn(()), False),
        (IdIn(("0", "1")), True),
        (And(()), True),
        (Or(()), False),
        (Not(HasTag("family")), False),
    ],
)
def test_what_a_filter_means(where: Filter, expected: bool):
    assert matches(where, ROW) is expected
