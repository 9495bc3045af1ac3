"""What people type into the search box."""

from __future__ import annotations

import pytest

from gare.errors import QueryError
from gare.library.search.query_language import UNWANTED, Term, parse_query


@pytest.mark.parametrize(
    ("query", "terms"),
    [
        ("a dog", [("a dog", 1)]),
        ("  a   dog ", [("a   dog", 1)]),
        ("the semi-final, 2-1", [("the semi-final, 2-1", 1)]),
        ("minus -5 degrees", [("minus -5 degrees", 1)]),
        ("dog - beach", [("dog", 1), ("beach", UNWANTED)]),
        ("dog -beach", [("dog", 1), ("beach", UNWANTED)]),
        ("dog -beach at night", [("dog", 1), ("beach", UNWANTED), ("at night", 1)]),
        ("dog - a sandy beach ^2", [("dog", 1), ("a sandy beach", 2 * UNWANTED)]),
        ("dog ^2 + snow^0.5", [("dog", 2), ("snow", 0.5)]),
        ('"a dog" + "a cat"', [("a dog", 1), ("a cat", 1)]),
        ("“a dog” + „a cat“ + «a boat»", [("a dog", 1), ("a cat", 1), ("a boat", 1)]),
        ('"Stop" on a sign', [('"Stop" on a sign', 1)]),
        ('"Stop" and "Go"', [('"Stop" and "Go"', 1)]),
        ("a child’s toy", [("a child’s toy", 1)]),
        ("dog ^0 + cat", [("cat", 1)]),
        ("dog + ", [("dog", 1)]),
        ("dog -", [("dog", 1)]),
        ("dog -beach\tat night", [("dog", 1), ("beach", UNWANTED), ("at night", 1)]),
    ],
)
def test_terms(query, terms):
    assert parse_query(query) == tuple(Term(text, weight) for text, weight in terms)


@pytest.mark.parametrize("query", ["", "  ", '""', " + ", "+", "-", "dog ^0"])
def test_nothing_asked_is_refused(query):
    with pytest.raises(QueryError, match="empty"):
        parse_query(query)


@pytest.mark.parametrize("weight", ["1001", "9" * 50, "9" * 400])
def test_a_weight_that_float32_cannot_hold_is_refused(weight):
    with pytest.raises(QueryError, match="the most is"):
        parse_query(f"dog ^{weight}")


def test_a_query_in_another_encoding_is_refused():
    with pytest.raises(QueryError, match="UTF-8"):
        parse_query("caf\udce9")


def test_only_unwanted_is_refused():
    with pytest.raises(QueryError, match="what is, too"):
        parse_query("- beach")
