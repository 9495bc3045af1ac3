"""The examples in docs/evaluation.md run and print what they say."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

from gare.evaluate.protocol_grid import CHOICES, MEANINGS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evaluation.md"


def test_examples_run():
    # Without the fences, which doctest would take for expected output.
    text = re.sub(r"^```.*$", "", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    examples = doctest.DocTestParser().get_doctest(text, {}, PAGE.name, str(PAGE), 0)
    assert len(examples.examples) > 10
    assert doctest.DocTestRunner().run(examples).failed == 0


def test_the_choices_of_the_referee_are_those_of_the_code():
    rows = re.findall(
        r"^\| (\w*) \| `(\w+)` \| (.+) \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    names = [value for name, values in CHOICES.items() if name != "direction" for value in values]
    assert [(value, meaning) for _, value, meaning in rows] == [(value, MEANINGS[value]) for value in names]
    assert [name for name, _, _ in rows if name] == [name for name in CHOICES if name != "direction"]
