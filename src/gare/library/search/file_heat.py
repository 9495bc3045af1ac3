"""How well every part of a file matches a query: the line under a player.

It comes from all frames that are stored of the file. Some rows of them are read at a time: a film of ten
hours has a thousand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from gare.library.search.item_frames import ItemFrames
from gare.library.search.refined_moment import FrameLine
from gare.library.search.search_request import SearchRequest
from gare.library.search.searcher import Searcher, end_of
from gare.library.store.read_deadline import check_deadline

MOST_PARTS = 1000
"""Scores of a line, at most."""
_AT_ONCE = 64  # rows of frames


@torch.no_grad()
def file_heat(
    searcher: Searcher, request: SearchRequest, path: str, duration: float, num_parts: int
) -> list[float]:
    """The best cosine of the query with a frame in each of so many parts of equal length of a file.

    Args:
        path: a file of the library.
        duration: its seconds.
    """
    items = {key: item for item, key in searcher.store.items_of([path]).items()}  # one for each row of frames
    return spread_frames(_read_lines(searcher, request, list(items.values())), duration, num_parts)


@torch.no_grad()
def frame_scores(searcher: Searcher, request: SearchRequest, item: str) -> list[float]:
    """The cosine of the query with every frame that is stored with an item, its own and those beside them."""
    return [score for line in _read_lines(searcher, request, [item]) for score in line.cosines]


def _read_lines(searcher: Searcher, request: SearchRequest, ids: Sequence[str]) -> Iterator[FrameLine]:
    query = searcher.encoder.encode(request)
    for first in range(0, len(ids), _AT_ONCE):
        check_deadline()
        table = searcher.damaged.read_blocks(ids[first : first + _AT_ONCE])
        if not len(table):
            continue
        cosine_VF = searcher.scorer.cosines(query, ItemFrames.of(table, searcher.model).video)
        rows = table.drop_columns(["vectors"]).to_pylist()
        for row, cosines in zip(rows, cosine_VF.tolist(), strict=True):
            times = row["times"]
            yield FrameLine(times, end_of(times, row["end"]), cosines[: len(times)])


def spread_frames(lines: Iterable[FrameLine], duration: float, num_parts: int) -> list[float]:
    """The best cosine in each part. A frame counts until the next one; where there is none, the worst does.

    >>> spread_frames([FrameLine([0.0, 2.0], 3.0, [0.5, 0.1])], duration=4.0, num_parts=4)
    [0.5, 0.5, 0.1, 0.1]
    >>> spread_frames([], duration=4.0, num_parts=2)
    [0.0, 0.0]
    """
    best = [-math.inf] * num_parts
    step = max(duration, 1e-3) / num_parts
    for line in lines:
        for begin, end, cosine in zip(line.times, [*line.times[1:], line.end], line.cosines, strict=True):
            first = min(int(begin / step), num_parts - 1)
            last = min(max(math.ceil(end / step) - 1, first), num_parts - 1)
            for part in range(first, last + 1):
                best[part] = max(best[part], cosine)
    worst = min((score for score in best if score > -math.inf), default=0.0)
    return [max(score, worst) for score in best]
