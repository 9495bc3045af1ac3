"""What is asked of a library: one object from the page, the API, the command line and MCP to the searcher."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, get_args

from gare.errors import QueryError
from gare.library.filters import Filter, parse_filter, simplify
from gare.library.search.query_language import UNWANTED, Term, parse_query
from gare.types import VideoFeatures

if TYPE_CHECKING:
    from PIL.Image import Image


By = Literal["file", "moment"]
"""`file`: a hit is a file, with its best moment and the others. `moment`: a file may be several hits."""

MOST_FOLDED = 256
"""How far down the ranking near-copies are looked for, or four times as far as the last hit."""


_FOLDED_MOMENTS = 3  # ranges of a film that are looked at for each moment


class BadTextError(QueryError):
    """A text with characters that no text can contain: a tokeniser or a database would fail on it."""


class StaleFeaturesError(QueryError):
    """Features of another model than the library has now."""


def check_text(text: str) -> str:
    """The text itself, or an error if it holds a NUL or half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadTextError("characters that no text can contain") from None
    if "\0" in text:
        raise BadTextError("characters that no text can contain")
    return text


@dataclass(frozen=True)
class SearchRequest:
    """What to search for, among which items, and how many hits to return. It is checked when it is made.

    Exactly one of `words`, `terms`, `image`, `video`, `features` and `like` is given.

    >>> request = SearchRequest(words="dog -people", unwanted=("rain",), where="duration:>10", top=5)
    >>> [(term.text, term.weight) for term in request.all_terms]
    [('dog', 1.0), ('people', -0.5), ('rain', -0.5)]
    >>> request.filter
    DurationBetween(shortest=10.000000000000002, longest=None)

    Raises:
        QueryError: nothing or two things are asked for, a number makes no sense, or the filter is too deep.
        ConfigError: the filter cannot be read.
    """

    words: str | None = None
    """Words as a person types them: "dog ^2 + snow -people"."""
    terms: tuple[Term, ...] = ()
    """Words that are taken apart already."""
    unwanted: tuple[str, ...] = ()
    """Further words that are not wanted; they go with `words` or `terms`."""
    image: str | os.PathLike[str] | Image | None = None
    video: str | os.PathLike[str] | None = None
    features: VideoFeatures | None = None
    """A picture or a clip whose frames are encoded already, such as an upload."""
    made_by: str | None = None
    """The fingerprint of the model that made `features`; None where it is the library's in any case."""
    like: str | None = None
    """The id of an item: find what resembles it. The item itself is left out."""
    where: Filter | str | None = None
    """Which items may be found: a filter, or its text."""
    top: int = 10
    """The number of hits to return."""
    offset: int = 0
    """The number of better hits to leave out: where a page begins."""
    candidates: int | None = None
    """How many items are scored exactly. None is what the last audit of the library recommends."""
    exhaustive: bool = False
    """Score every item exactly."""
    exact: bool = False
    """Return the same list as `exhaustive`, with a proof instead of scoring every item."""
    min_score: float | None = None
    by: By = "file"
    """Whether a file is one hit, or each of its moments is."""
    unique: bool = False
    """Fold near-copies into one hit."""
    explain: bool = False
    """Tell what the increment changed."""
    all_terms: tuple[Term, ...] = field(init=False)
    """Every term with its weight, from `words`, `terms` and `unwanted`; empty for anything but words."""
    filter: Filter | None = field(init=False)
    """`where`, read and simplified."""

    def __post_init__(self) -> None:
        given = [
            self.words is not None,
            bool(self.terms),
            *(part is not None for part in (self.image, self.video, self.features, self.like)),
        ]
        if sum(given) != 1:
            raise QueryError("search for one thing: words, an image, a video, or like an item of the library")
        if self.top < 1:
            raise QueryError(f"top must be at least 1, got {self.top}")
        if self.offset < 0:
            raise QueryError(f"offset must be at least 0, got {self.offset}")
        if self.exact and self.candidates is not None:
            raise QueryError("an exact search scores as many items as its proof needs; leave out candidates")
        if self.by not in get_args(By):
            raise QueryError(f"by must be {' or '.join(get_args(By))}, not '{self.by}'")
        if self.min_score is not None and math.isnan(self.min_score):
            raise QueryError("min_score must be a number")
        object.__setattr__(self, "all_terms", self._read_terms())
        where = parse_filter(self.where) if isinstance(self.where, str) else self.where
        object.__setattr__(self, "filter", None if where is None else simplify(where))

    @property
    def reach(self) -> int:
        """How far down the ranking the last hit may stand."""
        return self.offset + self.top

    @property
    def before_folding(self) -> SearchRequest:
        """What to look for so that enough is left when moments that turn out to be the same are folded."""
        if self.by == "file":
            return self
        return replace(self, offset=0, top=_FOLDED_MOMENTS * self.reach)

    @property
    def depth(self) -> int:
        """How many of the best items a ranking needs at least for the hits to be the true ones."""
        if self.unique:
            return max(4 * self.reach, MOST_FOLDED)
        return self.reach + len(self.skipped)

    @property
    def skipped(self) -> frozenset[str]:
        """Ids that are never hits."""
        return frozenset() if self.like is None else frozenset([self.like])

    def _read_terms(self) -> tuple[Term, ...]:
        unwanted = [Term(text.strip(), UNWANTED) for text in self.unwanted if text.strip()]
        if self.words is None and not self.terms:
            if unwanted:
                raise QueryError("unwanted words go with a query; pictures and items have none")
            return ()
        asked = self.terms if self.words is None else parse_query(self.words)
        terms = (*(term for term in asked if term.weight), *unwanted)
        if not any(term.weight > 0 for term in terms):
            raise QueryError("the query only says what is not wanted; say what is, too")
        for term in terms:
            check_text(term.text)
        return terms
