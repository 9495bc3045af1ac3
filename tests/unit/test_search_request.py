"""What may be asked of a library: one set of rules for the page, the API, the command line and MCP."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gare.errors import ConfigError, QueryError, TimeLimitError
from gare.library.filters import HasTag
from gare.library.search.query_language import Term
from gare.library.search.ranked_items import Ranking
from gare.library.search.search_request import BadTextError, SearchRequest
from gare.library.search.stage1 import unit_means
from gare.library.store.read_deadline import Deadline
from gare.types import VideoFeatures

FRAMES = VideoFeatures(torch.zeros(1, 1, 4), torch.ones(1, 1, dtype=torch.bool))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "one thing"),
        ({"words": "a dog", "like": "x"}, "one thing"),
        ({"words": "a dog", "terms": (Term("a cat"),)}, "one thing"),
        ({"features": FRAMES, "image": "a.jpg"}, "one thing"),
        ({"words": " "}, "empty"),
        ({"words": "-dog"}, "not wanted"),
        ({"terms": (Term("dog", -1.0), Term("cat", 0.0))}, "not wanted"),
        ({"like": "x", "unwanted": ("rain",)}, "unwanted words"),
        ({"words": "a dog", "top": 0}, "at least 1"),
        ({"words": "a dog", "offset": -1}, "at least 0"),
        ({"words": "a dog", "min_score": float("nan")}, "a number"),
    ],
)
def test_what_makes_no_sense_is_refused(asked, message):
    with pytest.raises(QueryError, match=message):
        SearchRequest(**asked)


@pytest.mark.parametrize("text", ["a\0b", "half \ud83d"])
def test_characters_that_no_text_contains_are_refused(text):
    with pytest.raises(BadTextError):
        SearchRequest(terms=(Term(text),))


def test_a_filter_is_read_once():
    assert SearchRequest(like="x", where="tag:family").filter == HasTag("family")
    assert SearchRequest(like="x", where=HasTag("family")).filter == HasTag("family")
    with pytest.raises(ConfigError, match="colour"):
        SearchRequest(like="x", where="colour:red")


def test_terms_without_weight_and_blank_words_do_not_count():
    request = SearchRequest(terms=(Term("dog", 2.0), Term("cat", 0.0)), unwanted=(" rain ", " "))
    assert request.all_terms == (Term("dog", 2.0), Term("rain", -0.5))


def test_another_page_of_the_same_search():
    page = replace(SearchRequest(words="dog ^2 -cat", top=5), offset=10)
    assert (page.reach, page.all_terms) == (15, (Term("dog", 2.0), Term("cat", -0.5)))
    assert (page.skipped, SearchRequest(like="x").skipped) == (frozenset(), {"x"})


# --- near-copies -------------------------------------------------------------------------------------------


def folded_one_by_one(ranking: Ranking, request: SearchRequest) -> dict[int, list[int]]:
    """The slow reference: each item is compared with all that were chosen before it."""
    unit_VD = unit_means(ranking.video)
    chosen: dict[int, list[int]] = {}
    for place in range(len(ranking)):
        alike = {other: float(unit_VD[other] @ unit_VD[place]) for other in chosen}
        nearest = max(alike, key=lambda other: alike[other], default=None)
        if nearest is not None and alike[nearest] >= 0.985:
            chosen[nearest].append(place)
        elif len(chosen) < request.reach:
            chosen[place] = []
    return dict(list(chosen.items())[request.offset :])


def copies(num_items: int) -> Ranking:
    torch.manual_seed(0)
    frames = torch.randn(7, 3, 16)[torch.randint(7, (num_items,))] + 0.05 * torch.randn(num_items, 3, 16)
    video = VideoFeatures(frames, torch.ones(num_items, 3, dtype=torch.bool))
    return Ranking.by_score([f"{n:04d}" for n in range(num_items)], torch.randn(num_items), video)


@pytest.mark.parametrize(("top", "offset"), [(1, 0), (3, 0), (10, 0), (2, 3)])
def test_near_copies_are_folded_as_by_the_slow_reference(top, offset):
    ranking, request = copies(60), SearchRequest(words="a", unique=True, top=top, offset=offset)
    folded = ranking.choose(request)
    assert folded == folded_one_by_one(ranking, request)
    assert any(folded.values())


def test_folding_ends_with_its_request():
    over = Deadline()
    over.cancel()
    with over.active(), pytest.raises(TimeLimitError):
        copies(60).choose(SearchRequest(words="a", unique=True))
