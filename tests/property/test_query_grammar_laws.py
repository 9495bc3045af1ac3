"""The filter and the query language, from their grammars: what is typed is read right or refused clearly."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from gare.errors import ConfigError, QueryError
from gare.library.filters import MOST_LEVELS, And, Filter, Not, Or, matches, parse_filter, simplify
from gare.library.filters.filter_simplification import MOST_CONDITIONS
from gare.library.search.query_language import parse_query
from gare.library.search.search_request import SearchRequest
from gare.library.store.lance_store import to_lance
from gare.library.store.postgres_store import to_postgres
from query_grammar import VALUES, Query, Written, damaged, deep_filters, filters, queries

EXAMPLES = 60
rows = st.fixed_dictionaries(
    {
        "id": st.sampled_from(VALUES),
        "path": st.sampled_from([f"/{value}/{other}.mp4" for value in VALUES[:6] for other in VALUES[:4]]),
        "file_duration": st.sampled_from([0.0, 5.0, 7.5, 60.0, 61.0]),
        "tags": st.lists(st.sampled_from(VALUES), max_size=3),
        "modified": st.datetimes(
            datetime(1970, 1, 1),
            datetime(2030, 12, 31),
            timezones=st.just(UTC),
        ),
    }
)


def size(where: Filter) -> tuple[int, int]:
    """Conditions, and levels of groups."""
    match where:
        case And(parts) | Or(parts):
            sizes = [size(part) for part in parts]
            return sum(count for count, _ in sizes), 1 + max((depth for _, depth in sizes), default=0)
        case Not(part):
            return size(part)
        case _:
            return 1, 0


@settings(max_examples=EXAMPLES)
@given(written=filters, row=rows)
def test_a_filter_means_what_its_grammar_says(written: Written, row: dict[str, Any]):
    read = parse_filter(written.text)
    assert matches(read, row) == matches(written.meaning, row)
    assert matches(simplify(read), row) == matches(written.meaning, row)


@settings(max_examples=EXAMPLES)
@given(written=deep_filters(), row=rows)
def test_what_a_store_gets_of_it_is_bounded_and_means_the_same(written: Written, row: dict[str, Any]):
    try:
        simple = simplify(parse_filter(written.text))
    except (ConfigError, QueryError):
        return
    conditions, depth = size(simple)
    assert conditions <= min(MOST_CONDITIONS, written.text.count(":"))
    assert depth <= MOST_LEVELS
    assert matches(simple, row) == matches(written.meaning, row)
    # An escaped letter of a pattern takes ten: the statement grows with the text, by a constant factor.
    assert len(to_lance(simple)) <= 100 + 60 * len(written.text)
    condition, values = to_postgres(simple)
    assert condition.replace("%%", "").count("%s") == len(values) <= 2 * conditions


@settings(max_examples=2 * EXAMPLES)
@given(text=damaged(st.one_of(filters, deep_filters()).map(lambda written: written.text)))
@example(text="(" * 5_000)
@example(text="not " * 5_000 + "tag:a")
@example(text="tag:a or " * 5_000 + "tag:a")
@example(text="name:" + "*" * 10_000)
@example(text='tag:"' + "\\" * 10_001)
def test_a_damaged_filter_is_read_or_refused_and_never_anything_else(text: str):
    try:
        where = simplify(parse_filter(text))
    except (ConfigError, QueryError) as error:
        assert str(error)  # noqa: PT017 - many damaged texts are still filters
        return
    conditions, depth = size(where)
    assert conditions <= MOST_CONDITIONS
    assert depth <= MOST_LEVELS
    to_lance(where)
    to_postgres(where)


@settings(max_examples=EXAMPLES)
@given(query=queries())
def test_a_query_has_the_terms_that_its_grammar_says(query: Query):
    assert parse_query(query.text) == query.terms


@settings(max_examples=2 * EXAMPLES)
@given(text=damaged(queries().map(lambda query: query.text)))
@example(text=" - " * 5_000)
@example(text="a ^" + "9" * 5_000)
@example(text="-a" * 5_000)
@example(text="a" + " + a" * 5_000)
def test_a_damaged_query_is_read_or_refused_and_never_anything_else(text: str):
    try:
        terms = SearchRequest(words=text).all_terms
    except QueryError as error:
        assert str(error)  # noqa: PT017 - many damaged texts are still queries
        return
    assert 0 < len(terms) <= len(text)
    assert sum(len(term.text) for term in terms) <= len(text)
    assert all(math.isfinite(term.weight) and abs(term.weight) <= 1000 for term in terms)
    assert any(term.weight > 0 for term in terms)
