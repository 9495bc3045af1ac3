"""Which moments of a file are shown, and the line of its heat."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gare.library.search.file_heat import spread_frames
from gare.library.search.item_frames import ItemFrames, Span
from gare.library.search.ranked_items import Choice, Ranking, fold_parts
from gare.library.search.refined_moment import FrameLine, refine, still_matches
from gare.library.search.search_request import SearchRequest
from gare.types import VideoFeatures


def ranked(*spans: tuple[str, float, float]) -> Ranking:
    """Items in this order, best first."""
    video = VideoFeatures(torch.ones(len(spans), 1, 4), torch.ones(len(spans), 1, dtype=torch.bool))
    items = ItemFrames([f"{n:04d}" for n in range(len(spans))], [Span(*span) for span in spans], video)
    return Ranking.by_score(items, torch.arange(len(spans), 0, -1).float())


FILM = [("film", 8, 12), ("film", 10, 14), ("clip", 0, 5), ("film", 20, 24), ("other", 0, 9)]


def test_what_resembles_a_moment_is_in_other_files():
    chosen = ranked(*FILM).choose(SearchRequest(like="0001"))
    assert [choice.place for choice in chosen] == [2, 4]


def test_by_moment_it_may_be_elsewhere_in_the_same_file():
    chosen = ranked(*FILM).choose(SearchRequest(like="0001", by="moment"))
    assert [choice.place for choice in chosen] == [2, 3, 4]


def test_what_resembles_a_still_is_not_that_still():
    chosen = ranked(("still", 0, 0), ("clip", 0, 5)).choose(SearchRequest(like="0000"))
    assert [choice.place for choice in chosen] == [1]


# --- moments that turn out to be one -----------------------------------------------------------------------


def test_moments_that_turn_out_to_overlap_are_one():
    parts = {0: Span("film", 5, 20), 1: Span("film", 5, 20), 2: Span("film", 20, 30), 3: Span("film", 28, 40)}
    assert fold_parts([Choice(0, others=[1, 2, 3])], parts) == [Choice(0, others=[2])]


def test_a_hit_that_turns_out_to_be_part_of_a_better_one_goes():
    parts = {0: Span("film", 5, 20), 1: Span("clip", 5, 20), 2: Span("film", 6, 9), 3: Span("film", 30, 31)}
    choices = [Choice(0), Choice(1, copies=[4]), Choice(2), Choice(3)]
    assert fold_parts(choices, parts) == [Choice(0), Choice(1, copies=[4]), Choice(3)]


def test_moments_that_match_too_little_are_not_among_the_parts():
    assert fold_parts([Choice(0, others=[1])], {0: Span("film", 5, 20)}) == [Choice(0)]


@given(best=st.floats(-1, 1), usual=st.floats(-1, 1), cosine=st.floats(-1, 1), less=st.floats(0, 1))
def test_what_matches_better_matches_too(best, usual, cosine, less):
    assert still_matches(best, best, usual)
    if still_matches(cosine - less, best, usual):
        assert still_matches(cosine, best, usual)


def test_by_moment_more_is_looked_for_than_shown():
    deeper = SearchRequest(words="a", top=5, offset=10, by="moment").before_folding
    assert deeper.offset == 0
    assert deeper.top > 15
    by_file = SearchRequest(words="a", top=5, offset=10)
    assert by_file.before_folding is by_file


@given(cosines=st.lists(st.floats(-1, 1), min_size=1, max_size=40), usual=st.floats(-1, 1), data=st.data())
def test_a_moment_holds_its_best_frame_and_begins_before_it_ends(cosines, usual, data):
    first = data.draw(st.integers(0, len(cosines) - 1))
    last = data.draw(st.integers(first + 1, len(cosines)))
    part = refine(line_of(cosines), float(first), float(last), usual)
    assert 0 <= part.start <= part.best < part.end <= len(cosines)
    assert cosines[int(part.best)] == max(cosines[first:last])


# --- the line of heat --------------------------------------------------------------------------------------


def line_of(cosines: list[float], first: float = 0.0) -> FrameLine:
    times = [first + number for number in range(len(cosines))]
    return FrameLine(times, first + len(cosines), cosines)


@given(cosines=st.lists(st.floats(-1, 1), min_size=1, max_size=60), num_parts=st.integers(1, 40))
def test_the_best_and_the_worst_frame_are_not_lost(cosines, num_parts):
    scores = spread_frames([line_of(cosines)], len(cosines), num_parts)
    assert len(scores) == num_parts
    assert max(scores) == max(cosines)
    assert min(scores) >= min(cosines)
    if num_parts >= 2 * len(cosines):  # some part lies within every frame
        assert min(scores) == min(cosines)


@given(cosines=st.lists(st.floats(-1, 1), min_size=2, max_size=60), data=st.data())
def test_blocks_make_the_same_line_as_one(cosines, data):
    cut = data.draw(st.integers(1, len(cosines) - 1))
    blocks = [line_of(cosines[cut:], cut), line_of(cosines[:cut])]
    num_parts = data.draw(st.integers(1, 40))
    whole = spread_frames([line_of(cosines)], len(cosines), num_parts)
    assert spread_frames(blocks, len(cosines), num_parts) == whole


@pytest.mark.parametrize("duration", [0.0, 0.001, 0.5])
def test_a_still_has_a_line(duration):
    assert spread_frames([FrameLine([0.0], duration, [0.3])], duration, 3) == [0.3, 0.3, 0.3]


def test_a_line_is_bounded_however_long_the_film():
    ten_hours = [line_of([0.1] * 32, 32 * block) for block in range(1125)]
    assert len(spread_frames(ten_hours, 36_000, 200)) == 200
