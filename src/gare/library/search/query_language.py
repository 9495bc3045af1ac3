"""The query language: terms with weights, wanted and unwanted."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gare.errors import QueryError

UNWANTED = -0.5
"""Weight of a term that is not wanted: what is wanted still counts more."""

# A sign that stands by itself, or a minus in front of a word; "semi-final" and "rock - paper" are told apart.
_SIGN = re.compile(r"(?:^|\s)([+-])(?=\s|$)|(?:^|\s)(-)(?=[^\s\d-])")
_QUOTES = '"“”„«»'  # around a whole term; a phone types the curly ones
_WEIGHT = re.compile(r"\^(\d+(?:\.\d+)?)$")
_MOST_WEIGHT = 1000.0  # any more would not change the order, but leave the numbers of float32


@dataclass(frozen=True)
class Term:
    """Words and how much they count; a negative weight means not wanted."""

    text: str
    weight: float = 1.0


def parse_query(query: str) -> tuple[Term, ...]:
    """Terms of a query: ` + ` and ` - ` separate them, `-word` is one, too; `^2` after a term is its weight.

    >>> parse_query("a dog in the park")
    (Term(text='a dog in the park', weight=1.0),)
    >>> parse_query("dog - beach")
    (Term(text='dog', weight=1.0), Term(text='beach', weight=-0.5))
    >>> parse_query("dog ^2 + snow -people")
    (Term(text='dog', weight=2.0), Term(text='snow', weight=1.0), Term(text='people', weight=-0.5))
    """
    if not query.isascii() and any("\ud800" <= letter <= "\udfff" for letter in query):
        raise QueryError("the query is not UTF-8; set the terminal to UTF-8, or write it in plain letters")
    pieces = _SIGN.split(query)
    terms = [_term(pieces[0], 1.0)]
    for position in range(1, len(pieces), 3):
        spaced, attached, text = pieces[position : position + 3]
        if attached:  # only the next word is meant; what follows is wanted
            word, *rest = text.split(maxsplit=1)
            terms += [_term(word, UNWANTED), *(_term(wanted, 1.0) for wanted in rest)]
        else:
            terms.append(_term(text, 1.0 if spaced == "+" else UNWANTED))
    kept = tuple(term for term in terms if term is not None)
    if not kept:
        raise QueryError("an empty query; say in a few words what the video shows")
    if all(term.weight < 0 for term in kept):
        raise QueryError(f"'{query}' only says what is not wanted; say what is, too")
    return kept


def _term(text: str, weight: float) -> Term | None:
    text = text.strip()
    if found := _WEIGHT.search(text):
        text, factor = text[: found.start()].strip(), float(found[1])
        if factor > _MOST_WEIGHT:
            raise QueryError(f"a weight of ^{found[1][:20]} is too much; the most is ^{_MOST_WEIGHT:g}")
        weight *= factor
    bare = text.strip(_QUOTES).strip()
    is_quoted = text[:1] in _QUOTES and text[-1:] in _QUOTES and not set(bare) & set(_QUOTES)
    if is_quoted or not bare:
        text = bare
    return Term(text, weight) if text and weight else None
