"""Laws of filters that need no store."""

from __future__ import annotations

import fnmatch
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import example, given, reject
from hypothesis import strategies as st

from gare.errors import ConfigError, QueryError
from gare.library.filters import (
    MOST_LEVELS,
    And,
    DurationBetween,
    Filter,
    HasTag,
    NameLike,
    Not,
    Or,
    matches,
    parse_filter,
    simplify,
)
from gare.library.store.lance_store import to_lance

names = st.text("ab.x^]", min_size=1, max_size=6)
patterns = st.text("ab.x^*?[]!", min_size=1, max_size=8)
tags = st.sampled_from(["a", "b", "c"])


def row(**values: Any) -> dict[str, Any]:
    some = {"id": "1", "path": "/v/x.mp4", "file_duration": 1.0, "tags": []}
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


# --- deep filters ------------------------------------------------------------------------------------------

MOST_BRACKETS = 2 * MOST_LEVELS
"""Lance's parser reads 20 levels in a few milliseconds; from about 24 on, each takes 2.6 times as long."""
bombs = st.builds(
    lambda opening, levels, core: opening * levels + core + ")" * (levels * opening.count("(")),
    st.sampled_from(
        ["(", "not (", "not not (", "not (not (", "(tag:a or (tag:b ", "not (tag:a not (tag:b or "]
    ),
    st.integers(0, 70),
    st.sampled_from(["tag:a", "tag:b tag:c", "not duration:5..60", "(tag:a or (tag:b tag:c))"]),
)
grammar = st.recursive(
    st.sampled_from(["tag:a", "tag:b", "not tag:c", "name:*.mp4", "duration:0..5"]) | bombs,
    lambda inner: st.one_of(
        inner.map("not ({})".format),
        inner.map("({})".format),
        st.lists(inner, min_size=1, max_size=3).map(" ".join).map("({})".format),
        st.lists(inner, min_size=1, max_size=3).map(" or ".join).map("not ({})".format),
    ),
    max_leaves=6,
)
trees = st.recursive(
    tags.map(HasTag) | st.just(DurationBetween(0.0, 5.0)) | st.sampled_from([And(()), Or(())]),
    lambda inner: st.one_of(
        inner.map(Not),
        st.lists(inner, max_size=3).map(tuple).map(And),
        st.lists(inner, max_size=3).map(tuple).map(Or),
    ),
    max_leaves=20,
)


def depth(where: Filter) -> int:
    return 1 + max(map(depth, where.filters), default=0) if isinstance(where, And | Or) else 0


def is_flat(where: Filter) -> bool:
    """Not at conditions only; a group holds no group of its kind, and never one member."""
    match where:
        case And(parts) | Or(parts):
            return len(parts) != 1 and all(is_flat(part) and type(part) is not type(where) for part in parts)
        case Not(part):
            return not isinstance(part, And | Or | Not)
        case _:
            return True


def brackets(condition: str) -> int:
    level = most = 0
    for letter in condition:
        level += {"(": 1, ")": -1}.get(letter, 0)
        most = max(most, level)
    return most


@given(text=grammar, held=st.sets(tags))
@example(text="not (" * 49 + "tag:b" + ")" * 49, held={"b"})
@example(text="(tag:a or (tag:b " * 24 + "tag:c" + "))" * 24, held=set())
def test_what_reaches_a_store_is_flat_and_means_the_same(text: str, held: set[str]):
    item = row(tags=sorted(held))
    try:
        where = parse_filter(text)
        simple = simplify(where)
    except (ConfigError, QueryError):
        return
    assert is_flat(simple)
    assert depth(simple) <= MOST_LEVELS
    assert brackets(to_lance(where)) <= MOST_BRACKETS
    assert matches(simple, item) == matches(where, item)


@given(where=trees, held=st.sets(tags))
def test_a_tree_from_python_is_flat_and_means_the_same(where: Filter, held: set[str]):
    item = row(tags=sorted(held))
    try:
        simple = simplify(where)
    except QueryError:
        reject()
    assert is_flat(simple)
    assert matches(simple, item) == matches(where, item)
    assert simplify(simple) == simple


@pytest.mark.parametrize("levels", [49, 100_000])
def test_negations_and_groups_of_one_cost_nothing_however_many(levels: int):
    where: Filter = HasTag("a")
    for number in range(levels):
        where = (Not(where), And((where,)), Or((where,)))[number % 3]
    assert simplify(where) in (HasTag("a"), Not(HasTag("a")))


def test_what_stays_deep_or_long_is_refused_with_advice():
    where: Filter = HasTag("a")
    for number in range(5_000):
        where = (And if number % 2 else Or)((HasTag("b"), where))
    with pytest.raises(QueryError, match="more than 10 levels deep; write it with fewer brackets"):
        to_lance(where)
    with pytest.raises(QueryError, match="more than 1000 conditions; search several times"):
        simplify(Or(tuple(HasTag(str(number)) for number in range(1001))))
