"""Moments of a library: of an item, or of what words find."""

from __future__ import annotations

from gare.errors import ClipError
from gare.library.editing.moments import LENGTH_S, Moment, moments_of, part_around
from gare.library.library import Library
from gare.library.search.search_request import SearchRequest


def moment_of_item(
    library: Library, item: str, times: tuple[float, float] | None = None, length: float = LENGTH_S
) -> Moment:
    """The part of an item's file between two times; without them, the item's own, from its start on."""
    row = library.get(item)
    if row is None:
        raise ClipError(f"there is no item '{item}' in this library; 'gare search' prints ids")
    start, end = times or part_around(row["start"], row["end"], row["start"], length)
    return Moment(row["path"], start, end, item, modified=row["modified"].timestamp())


def moments_of_words(
    library: Library, words: str, *, top: int, where: str | None = None, length: float = LENGTH_S
) -> list[Moment]:
    """The parts of what a search finds, best first."""
    hits = library.find(SearchRequest(words=words, top=top, where=where))
    return moments_of(hits, length)
