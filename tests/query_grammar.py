"""The filter language and the query language as grammars: texts with what they mean, and damaged texts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import Any

from hypothesis import strategies as st

from gare.library.filters import (
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
)
from gare.library.search.query_language import UNWANTED, Term


@dataclass(frozen=True)
class Written:
    """A filter as a person types it, and the tree that it means."""

    text: str
    meaning: Filter


# --- filters -----------------------------------------------------------------------------------------------

VALUES = ["a", "b", "zz", "o'brien", 'say "hi"', "back\\slash", "x y", "(1)", "not", "or", "and", "tag:a",
          "%", "_", "été", "[a-z]", "*", "-- x", "'; DROP TABLE items; --"]  # fmt: skip
_values = st.sampled_from(VALUES) | st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=4
)
_blanks = st.sampled_from([" ", "  ", "\t", "\n "])


def _quoted(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


@st.composite
def _fields(draw: st.DrawFn) -> Written:
    name = draw(st.sampled_from(["tag", "folder", "name", "id", "duration", "date"]))
    key = draw(st.sampled_from([name, name.upper(), name.capitalize()]))
    if name == "duration":
        low, high = draw(st.tuples(*[st.sampled_from([0, 5, 10, 60])] * 2))
        return Written(f"{key}:{low}..{high}", DurationBetween(float(low), float(high)))
    if name == "date":
        year, month = draw(st.integers(1970, 2030)), draw(st.integers(1, 12))
        first, last = date(year, month, 1), date(year, month, 28)
        return Written(f"{key}:{first}..{last}", ModifiedBetween(first, last))
    value = draw(_values.filter(lambda text: not (name in ("folder", "id") and text[0] in "~,")))
    meaning: dict[str, Any] = {
        "tag": HasTag(value), "folder": InFolder(value), "name": NameLike(value),
        "id": IdIn(tuple(value.split(","))),
    }  # fmt: skip
    is_bare = value.isalnum() and draw(st.booleans())
    return Written(f"{key}:{value if is_bare else _quoted(value)}", meaning[name])


@st.composite
def _group(draw: st.DrawFn, inner: st.SearchStrategy[Written]) -> Written:
    kind = draw(st.sampled_from(["not", "and", "or", "brackets"]))
    blank = draw(_blanks)
    if kind in ("not", "brackets"):
        part = draw(inner)
        if kind == "brackets":
            return Written(f"({blank}{part.text}{blank})", part.meaning)
        negations = draw(st.integers(1, 4))
        word = draw(st.sampled_from(["not", "NOT", "Not"]))
        text = f"{word}{blank}" * negations + f"({part.text})"
        return Written(text, Not(part.meaning) if negations % 2 else part.meaning)
    parts = draw(st.lists(inner, min_size=2, max_size=4))
    meanings = tuple(part.meaning for part in parts)
    if kind == "or":
        joined = f"{blank}{draw(st.sampled_from(['or', 'OR']))}{blank}".join(part.text for part in parts)
        return Written(f"({joined})", Or(meanings))
    sign = draw(st.sampled_from(["", "and ", "AND "]))
    return Written(f"({f'{blank}{sign}'.join(part.text for part in parts)})", And(meanings))


filters: st.SearchStrategy[Written] = st.recursive(_fields(), _group, max_leaves=8)


@st.composite
def deep_filters(draw: st.DrawFn) -> Written:
    """Up to sixty levels, of one kind or of several in turn."""
    written = draw(filters)
    shells = draw(st.lists(st.sampled_from(["not", "or", "and", "()"]), min_size=1, max_size=4))
    for level in range(draw(st.integers(0, 48))):
        text, meaning = written.text, written.meaning
        match shells[level % len(shells)]:
            case "not":
                written = Written(f"not ({text})", Not(meaning))
            case "or":
                written = Written(f"(tag:a or {text})", Or((HasTag("a"), meaning)))
            case "and":
                written = Written(f"(tag:b {text})", And((HasTag("b"), meaning)))
            case _:
                written = Written(f"({text})", meaning)
    return written


# --- queries -----------------------------------------------------------------------------------------------

_words = st.sampled_from(["dog", "semi-final", "a", "C++", "x^y", "3-2", "5", "été", "rock'n'roll", "²"])
_phrases = st.lists(_words, min_size=1, max_size=4).map(" ".join)


@dataclass(frozen=True)
class Query:
    """A query as a person types it, and its terms."""

    text: str
    terms: tuple[Term, ...]


@st.composite
def queries(draw: st.DrawFn) -> Query:
    """A wanted phrase, then further ones with a sign and perhaps a weight."""
    text, terms = "", []
    for number in range(draw(st.integers(1, 5))):
        phrase = draw(_phrases)
        sign = draw(st.sampled_from(["+", "-"])) if number else "+"
        weight = draw(st.sampled_from([None, "0.5", "2", "1000"]))
        text += (f"{draw(_blanks)}{sign}{draw(_blanks)}" if number else "") + phrase
        text += f" ^{weight}" if weight else ""
        terms.append(Term(phrase, (1.0 if sign == "+" else UNWANTED) * float(weight or 1)))
    return Query(text, tuple(terms))


# --- damage ------------------------------------------------------------------------------------------------

_BITS = ["(", ")", '"', "\\", ":", " or ", " not ", "and", "tag:", "..", "<=", "^", "^9999", " - ", "-",
         "\0", "\ud800", "'", ";", "--", "%", "*", "[", "]",
         "\n", "٣", "𝟝", "1e999", "nan", "inf", "-1", "²"]  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> str:
    """A text of the language with some of it taken out, doubled, moved or replaced."""
    text = draw(texts)
    for _ in range(draw(st.integers(1, 4))):
        first, last = sorted(draw(st.tuples(*[st.integers(0, len(text))] * 2)))
        bit = draw(st.sampled_from(_BITS))
        match draw(st.integers(0, 3)):
            case 0:
                text = text[:first] + text[last:]
            case 1:
                text = text[:first] + bit + text[first:]
            case 2:
                text = text[:last] + text[first:]
            case _:
                text = text[:first] + bit * draw(st.integers(1, 60)) + text[last:]
    return text
