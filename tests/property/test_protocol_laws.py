"""Laws of protocols. Scores are small integers, so that ties are common; rescoring is left out: it rounds."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gare.evaluate.protocol_grid import Protocol, ProtocolGrid
from gare.evaluate.score_table import table_of_matrix


@st.composite
def tables(draw):
    """Scores, with one to three texts a video, in any order."""
    num_videos = draw(st.integers(2, 6))
    extra = draw(st.lists(st.integers(0, num_videos - 1), max_size=6))
    video_of_text = draw(st.permutations([*range(num_videos), *extra]))
    cells = len(video_of_text) * num_videos
    values = draw(st.lists(st.integers(-3, 3), min_size=cells, max_size=cells))
    scores_TV = torch.tensor(values, dtype=torch.float32).reshape(len(video_of_text), num_videos)
    return scores_TV, torch.tensor(video_of_text), draw(st.permutations(range(num_videos)))


def plain(grid):
    """Every protocol with up to two changes, without rescoring."""
    for direction in ("text_to_video", "video_to_text"):
        base = Protocol(direction)
        for size in (0, 1, 2):
            for protocol in grid.changed(base, size) if size else (base,):
                if protocol.rescoring == "none":
                    yield protocol


@settings(deadline=None, max_examples=30)
@given(tables())
def test_the_order_of_videos_changes_no_rank(drawn):
    scores_TV, video_T, order = drawn
    names = [f"v{number}" for number in range(scores_TV.shape[1])]
    place = torch.tensor(order).argsort()
    grid = ProtocolGrid(table_of_matrix(scores_TV, video_of_text=video_T, video_ids=names))
    moved = ProtocolGrid(
        table_of_matrix(
            scores_TV[:, list(order)], video_of_text=place[video_T], video_ids=[names[each] for each in order]
        )
    )
    for protocol in plain(grid):
        ranks, other = grid.measure(protocol).ranks, moved.measure(protocol).ranks
        assert ranks.sort().values.equal(other.sort().values), protocol


@settings(deadline=None, max_examples=30)
@given(tables())
def test_every_fair_tie_rule_lies_between_the_bounds(drawn):
    scores_TV, video_T, _ = drawn
    grid = ProtocolGrid(table_of_matrix(scores_TV, video_of_text=video_T))
    for protocol in plain(grid):
        if protocol.ties in ("average", "trec"):
            bounds = [
                grid.measure(Protocol(**{**vars(protocol), "ties": ties})).ranks
                for ties in ("optimistic", "pessimistic")
            ]
            ranks = grid.measure(protocol).ranks
            assert (bounds[0] <= ranks).all(), protocol
            assert (ranks <= bounds[1]).all(), protocol
