"""What people type into the search box."""

from __future__ import annotations

import pytest

from gare.errors import QueryError
from gare.library.query import UNWANTED, Term, parse_query


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
        ("dog ^0 + cat", [("cat", 1)]),
        ("dog + ", [("dog", 1)]),
    ],
)
def test_terms(query, terms):
    assert parse_query(query) == tuple(Term(text, weight) for text, weight in terms)


@pytest.mark.parametrize("query", ["", "  ", '""', " + ", "dog ^0"])
def test_nothing_asked_is_refused(query):
    with pytest.raises(QueryError, match="empty"):
        parse_query(query)


def test_only_unwanted_is_refused():
    with pytest.raises(QueryError, match="what is, too"):
        parse_query("- beach")
