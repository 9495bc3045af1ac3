"""Which items a search may return: a typed tree (`tree`) and the language people type it in (`text`)."""

from gare.library.filters.text import parse_filter
from gare.library.filters.tree import (
    And,
    DurationBetween,
    Filter,
    HasTag,
    IdIn,
    InFolder,
    ModifiedBetween,
    NameLike,
    Not,
    Or,
    matches,
)

__all__ = [
    "And",
    "DurationBetween",
    "Filter",
    "HasTag",
    "IdIn",
    "InFolder",
    "ModifiedBetween",
    "NameLike",
    "Not",
    "Or",
    "matches",
    "parse_filter",
]
