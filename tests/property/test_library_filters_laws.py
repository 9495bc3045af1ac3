"""Laws of filters that need no store."""

from __future__ import annotations

import fnmatch
from datetime import UTC, datetime
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gare.errors import ConfigError
from gare.library.filters import And, HasTag, NameLike, Not, Or, matches, parse_filter

names = st.text("ab.x^]", min_size=1, max_size=6)
patterns = st.text("ab.x^*?[]!", min_size=1, max_size=8)
tags = st.sampled_from(["a", "b", "c"])


def row(**values: Any) -> dict[str, Any]:
    some = {"id": "1", "path": "/v/x.mp4", "start": 0.0, "end": 1.0, "tags": []}
    return {**some, "modified": datetime(2024, 1, 1, tzinfo=UTC), **values}


@given(name=names, pattern=patterns)
def test_a_pattern_means_what_a_shell_means(name: str, pattern: str):
    assert matches(NameLike(pattern), row(path=f"/v/{name}")) == fnmatch.fnmatchcase(name, pattern)


@given(
    name=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1, max_size=8)
)
def test_a_name_matches_itself_in_any_case(name: str):
    literal = "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)
    for written in (literal, literal.upper(), literal.lower()):
        same = written.casefold() == literal.casefold()
        assert not same or matches(NameLike(written), row(path=f"/v/{name}"))


@given(held=st.sets(tags), one=tags, other=tags)
def test_not_and_or_follow_de_morgan(held: set[str], one: str, other: str):
    a, b = HasTag(one), HasTag(other)
    item = row(tags=sorted(held))
    assert matches(Not(And((a, b))), item) == matches(Or((Not(a), Not(b))), item)
    inside, outside = f"not (tag:{one} tag:{other})", f"not tag:{one} or not tag:{other}"
    assert matches(parse_filter(inside), item) == matches(parse_filter(outside), item)


@given(text=st.text(max_size=40) | st.text('tag:nmedurion()"\\ .<>=0123456789-', max_size=40))
def test_any_text_is_a_filter_or_a_clear_error(text: str):
    try:
        meaning = matches(parse_filter(text), row())
    except ConfigError as error:
        meaning = str(error).startswith("filter: ") and str(error).endswith("^")
        assert meaning, error  # noqa: PT017 - most texts are fine, so nothing need be raised
    assert meaning in (True, False)
