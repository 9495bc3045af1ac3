"""What may be asked of a library: one set of rules for the page, the API, the command line and MCP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gare.errors import ConfigError, QueryError, TimeLimitError
from gare.library.filters import HasTag
from gare.library.search.item_frames import ItemFrames, Span
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
    spans = [Span(f"/videos/{n}.mp4", 0.0, 1.0) for n in range(num_items)]
    items = ItemFrames([f"{n:04d}" for n in range(num_items)], spans, video)
    return Ranking.by_score(items, torch.randn(num_items))


@pytest.mark.parametrize(("top", "offset"), [(1, 0), (3, 0), (10, 0), (2, 3)])
def test_near_copies_are_folded_as_by_the_slow_reference(top, offset):
    ranking, request = copies(60), SearchRequest(words="a", unique=True, top=top, offset=offset)
    folded = {choice.place: choice.copies for choice in ranking.choose(request)[request.offset :]}
    assert folded == folded_one_by_one(ranking, request)
    assert any(folded.values())


def test_folding_ends_with_its_request():
    over = Deadline()
    over.cancel()
    with over.active(), pytest.raises(TimeLimitError):
        copies(60).choose(SearchRequest(words="a", unique=True))


# --- moments of one file -----------------------------------------------------------------------------------


def ranked(*spans: tuple[str, float, float]) -> Ranking:
    """Items in this order, best first."""
    video = VideoFeatures(torch.ones(len(spans), 1, 4), torch.ones(len(spans), 1, dtype=torch.bool))
    items = ItemFrames([f"{n:04d}" for n in range(len(spans))], [Span(*span) for span in spans], video)
    return Ranking.by_score(items, torch.arange(len(spans), 0, -1).float())


def places(ranking: Ranking, **asked: Any) -> list[tuple[int, list[int]]]:
    chosen = ranking.choose(SearchRequest(words="a", **asked))
    return [(choice.place, choice.others) for choice in chosen]


FILM = [
    ("film", 8, 12),
    ("film", 10, 14),
    ("clip", 0, 5),
    ("film", 12, 16),
    ("film", 40, 44),
    ("film", 41, 43),
]


def test_a_file_is_one_hit_with_its_other_moments():
    assert places(ranked(*FILM)) == [(0, [3, 4]), (2, [])]


def test_each_moment_is_a_hit_where_that_is_asked_for():
    assert places(ranked(*FILM), by="moment") == [(0, []), (2, []), (3, []), (4, [])]
    assert places(ranked(*FILM), by="moment", top=2) == [(0, []), (2, [])]


def test_other_moments_are_found_below_the_last_hit():
    assert places(ranked(*FILM), top=1) == [(0, [3, 4])]


def test_by_is_file_or_moment():
    with pytest.raises(QueryError, match="file or moment"):
        SearchRequest(words="a", by="scene")  # type: ignore[arg-type]
