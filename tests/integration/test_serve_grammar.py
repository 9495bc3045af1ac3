"""Filters and queries from their grammars, whole and damaged, as parameters of a real server: 200 or 422."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlencode

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gare.errors import GareError
from gare.library.filters import parse_filter, simplify
from gare.library.search.search_request import SearchRequest
from query_grammar import damaged, deep_filters, filters, queries
from serve_process import ServeProcess

MOST_TYPED = 500
where_texts = st.one_of(filters, deep_filters()).map(lambda written: written.text)
query_texts = queries().map(lambda query: query.text)
asked = st.fixed_dictionaries(
    {"q": query_texts | damaged(query_texts)},
    optional={
        "where": where_texts | damaged(where_texts),
        "folder": damaged(st.just("holidays")),
        "unwanted": query_texts,
        "limit": st.sampled_from(["1", "0", "-1", "1e3", "٣", "100", "²", "nan"]),
        "after": st.sampled_from(["2024-02-30", "0000-00-00", "2024-02-29", "-1", "9999-12-31"]),
        "min_score": st.sampled_from(["nan", "inf", "-inf", "0.1", "1e999"]),
    },
)
quick = settings(
    max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def encoded(parameters: dict[str, str]) -> str:
    return urlencode({name: value.encode("utf-8", "surrogatepass") for name, value in parameters.items()})


def is_valid(parameters: dict[str, str]) -> bool:
    """What the library itself says of the words and the filter."""
    sent = [parameters.get(name, "").encode("utf-8", "surrogatepass") for name in ("q", "where")]
    texts = [text.decode("utf-8", "replace") for text in sent]  # what is no UTF-8 in an address is marked
    if any(len(text) > MOST_TYPED for text in texts):
        return False
    try:
        SearchRequest(words=texts[0], where=simplify(parse_filter(texts[1])) if texts[1].strip() else None)
    except GareError:
        return False
    return True


@quick
@given(parameters=asked)
def test_a_search_is_answered_or_refused(server: ServeProcess, parameters: dict[str, Any]):
    status = server.get(f"/api/v1/search?{encoded(parameters)}").status
    assert status in (200, 422), parameters
    if set(parameters) <= {"q", "where"}:
        assert (status == 200) == is_valid(parameters), parameters
    assert server.get(f"/?{encoded(parameters)}").status in (200, 422)


@quick
@given(parameters=asked)
def test_a_list_is_answered_or_refused(server: ServeProcess, parameters: dict[str, Any]):
    wanted = {name: value for name, value in parameters.items() if name in ("where", "folder", "after")}
    assert server.get(f"/api/v1/items?{encoded(wanted)}").status in (200, 422), wanted


@quick
@given(parameters=asked)
def test_a_body_is_answered_or_refused(server: ServeProcess, parameters: dict[str, Any]):
    body = {"query": parameters["q"], **{k: v for k, v in parameters.items() if k in ("where", "folder")}}
    assert server.post("/api/v1/search", body).status in (200, 422), body


@pytest.mark.parametrize("text", ["not (" * 49 + "tag:b" + ")" * 49, "(" * 200, "name:" + "*a" * 200])
def test_a_known_bomb_is_answered_or_refused(server: ServeProcess, text: str):
    assert server.get(f"/api/v1/search?q=a&where={quote(text)}").status in (200, 422)
