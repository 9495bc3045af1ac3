"""Tells a person that a query is in a language which the model does not read, and names a model that does; or
that it is too long.

The script of the letters decides, then words that only another language has, and last how the model's own
tokeniser takes the words apart. Where the languages of a model are not known, nothing is said: a wrong notice
is worse than none.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from gare.library.search.language_words import (
    ALSO_ENGLISH,
    BORROWED,
    ENGLISH,
    LANGUAGE_NAMES,
    NAME_WORDS,
    SHARED_WITH_ENGLISH,
    WORDS,
)
from gare.model.known_models import MANY, model_that_reads

_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")
_ELISION = re.compile(r"(?:[dljnst]|qu|dell|nell|sull|all)['’]\w{3}")
# English words are one piece of an English tokeniser, rarely two. Of short texts made of the rarer words of
# captions, 0.2 % or fewer have as many pieces a word as these, by their number of words.
_SPLINTERS = {0: 99.0, 1: 5.0, 2: 3.0}
_SPLINTERS_OF_MANY = 2.5
_SOME_SPLINTERS = 1.6  # next to one word that names have as well
_FEW_SPLINTERS = 1.2  # next to two of them

_SCRIPTS = {
    "CJK": ("zh", "Chinese"),
    "HIRAGANA": ("ja", "Japanese"),
    "KATAKANA": ("ja", "Japanese"),
    "HANGUL": ("ko", "Korean"),
    "CYRILLIC": ("ru", "Russian, or another language in Cyrillic letters"),
    "GREEK": ("el", "Greek"),
    "ARABIC": ("ar", "Arabic, Persian or Urdu"),
    "HEBREW": ("he", "Hebrew"),
    "DEVANAGARI": ("hi", "Hindi, or another language in Devanagari letters"),
    "BENGALI": ("bn", "Bengali"),
    "TAMIL": ("ta", "Tamil"),
    "TELUGU": ("te", "Telugu"),
    "GUJARATI": ("gu", "Gujarati"),
    "GURMUKHI": ("pa", "Punjabi"),
    "KANNADA": ("kn", "Kannada"),
    "MALAYALAM": ("ml", "Malayalam"),
    "THAI": ("th", "Thai"),
    "GEORGIAN": ("ka", "Georgian"),
    "ARMENIAN": ("hy", "Armenian"),
    "ETHIOPIC": ("am", "Amharic"),
    "KHMER": ("km", "Khmer"),
    "MYANMAR": ("my", "Burmese"),
    "SINHALA": ("si", "Sinhala"),
    "LAO": ("lo", "Lao"),
}
_UNNAMED = ("", "another language than English")


def language_notice(
    texts: Sequence[str], model: str, languages: Sequence[str], *, pieces: Sequence[int] = ()
) -> str | None:
    """What to tell whoever asked for these texts; None where there is nothing to tell.

    Args:
        model: its name, as it is shown.
        languages: those that the model reads, as codes; empty where they are not known.
        pieces: into how many tokens the model's tokeniser takes each text apart, where that is known.

    >>> language_notice(["un perro en la playa"], "gare-mini", ["en"])[:62]
    'This looks like Spanish, and gare-mini reads English only. A m'
    >>> language_notice(["a dog on the beach"], "gare-mini", ["en"]) is None
    True
    """
    if not languages or MANY in languages:
        return None
    counts = [*pieces, *[0] * (len(texts) - len(pieces))]
    found = [guess_language(text, count) for text, count in zip(texts, counts, strict=True)]
    foreign = next((guess for guess in found if guess is not None and guess[0] not in languages), None)
    if foreign is None:
        return None
    code, name = foreign
    if not code and "en" not in languages:
        return None
    reads = " and ".join(_ENGLISH_NAMES.get(language, language) for language in languages)
    notice = f"This looks like {name}, and {model} reads {reads} only."
    other = model_that_reads(code or MANY)
    if other is None:
        return notice
    return f"{notice} A model that reads it: {other.name} (gare index --model {other.name})."


def length_notice(model: str) -> str:
    """What to tell whoever asked for a longer text than the model reads."""
    return f"This is longer than {model} reads, and its end does not count. Say it in one short sentence."


def guess_language(text: str, num_pieces: int = 0) -> tuple[str, str] | None:
    """Code and name of the language of a text that is not English; None for English and where it is not sure.

    Args:
        num_pieces: into how many tokens an English tokeniser takes the text apart; 0 where that is not known.

    >>> guess_language("собака на пляже")[0], guess_language("ein Hund am Strand"), guess_language("2 dogs")
    ('ru', ('de', 'German'), None)
    """
    return _by_script(text) or _by_words(text, num_pieces)


def _by_script(text: str) -> tuple[str, str] | None:
    letters = [letter for letter in text if letter.isalpha()]
    scripts = Counter(_script(letter) for letter in letters)
    others = {script: count for script, count in scripts.items() if script in _SCRIPTS}
    if not others or 2 * sum(others.values()) < len(letters):
        return None
    if others.keys() & {"HIRAGANA", "KATAKANA"}:  # Japanese has Chinese characters too
        return _SCRIPTS["HIRAGANA"]
    return _SCRIPTS[max(others, key=lambda script: others[script])]


def _script(letter: str) -> str:
    return unicodedata.name(letter, "").partition(" ")[0].partition("-")[0]


@dataclass(frozen=True)
class _Evidence:
    """What the words of a text say about its language."""

    strong: Counter[str]
    """Words that only this language has, by language."""
    weak: Counter[str]
    """Words that this language has, and English or names as well."""
    english: int
    """English words; `surely_english` leaves out those that look the same elsewhere."""
    surely_english: int
    accents: int
    """Words in small letters with an accent; names may have one in English too."""
    num_words: int
    capitals: int
    """Words that begin with a capital letter: names, most likely, where there are two."""
    pieces_a_word: float


def _read_words(text: str, num_pieces: int) -> _Evidence:
    words = _WORD.findall(unicodedata.normalize("NFC", text))
    capitals = 0 if text.isupper() else sum(word[0].isupper() for word in words)
    strong: Counter[str] = Counter()
    weak: Counter[str] = Counter()
    english = surely_english = accents = 0
    for word in words:
        low = word.lower()
        languages = _vocabulary().get(low, frozenset())
        # Playa del Carmen; German writes its own nouns so.
        is_name = capitals > 1 and word[0].isupper() and "de" not in languages
        (strong if _is_sure(low) and not is_name else weak).update(languages)
        if word == low and _ELISION.match(word):
            weak.update(("fr", "it"))
        is_known = low in _vocabulary()
        is_english = low in ENGLISH or (low.endswith("ing") and len(low) > 4 and not is_known)
        english += is_english
        surely_english += is_english and low not in SHARED_WITH_ENGLISH
        accents += word == low and _has_accent(low)
    return _Evidence(
        strong, weak, english, surely_english, accents, len(words), capitals, num_pieces / max(1, len(words))
    )


def _by_words(text: str, num_pieces: int) -> tuple[str, str] | None:
    """Words of another language decide; without them, words that an English tokeniser has to splinter."""
    found = _read_words(text, num_pieces)
    scores = {name: found.strong[name] + 0.5 * found.weak[name] for name in found.strong | found.weak}
    score = max(scores.values(), default=0.0)
    best = [name for name in scores if scores[name] == score]
    if any(found.strong[name] for name in best) and score > found.surely_english:
        return _named(best)
    if found.accents > found.english and 2 * found.accents >= found.num_words:
        return _UNNAMED
    if found.surely_english or any(letter.isdigit() for letter in text):
        return None
    fewest = _SOME_SPLINTERS if score <= 0.5 else _FEW_SPLINTERS
    if best and found.num_words > 1 and found.capitals < 2 and found.pieces_a_word >= fewest:
        return _named(best)
    is_splintered = found.pieces_a_word >= _SPLINTERS.get(found.num_words, _SPLINTERS_OF_MANY)
    return _UNNAMED if is_splintered and not found.english and not found.capitals else None


def _named(languages: Sequence[str]) -> tuple[str, str]:
    """One language, or two that share what was found."""
    names = [LANGUAGE_NAMES[language] for language in languages]
    if len(languages) == 1:
        return languages[0], names[0]
    return ("", " or ".join(names)) if len(languages) == 2 else _UNNAMED


@lru_cache
def _vocabulary() -> dict[str, frozenset[str]]:
    """The languages of each word."""
    languages: dict[str, set[str]] = {}
    for language, words in WORDS.items():
        for word in words:
            if word not in ENGLISH:
                languages.setdefault(word, set()).add(language)
    return {word: frozenset(found) for word, found in languages.items()}


def _is_sure(word: str) -> bool:
    """Whether a word shows its language by itself."""
    return len(word) > 2 and word not in NAME_WORDS and word not in ALSO_ENGLISH


def _has_accent(word: str) -> bool:
    return word not in BORROWED and any(not letter.isascii() and letter.isalpha() for letter in word)


_ENGLISH_NAMES = {"en": "English", "zh": "Chinese", **LANGUAGE_NAMES}
