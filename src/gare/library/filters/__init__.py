"""Which items a search may return: a typed tree, and the language that people type it in."""

from gare.library.filters.filter_language import parse_filter
from gare.library.filters.filter_simplification import MOST_LEVELS, simplify
from gare.library.filters.filter_tree import (
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
    "MOST_LEVELS",
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
    "simplify",
]
