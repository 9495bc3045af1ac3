"""The examples in docs/evaluation.md run and print what they say."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evaluation.md"


def test_examples_run():
    # Without the fences, which doctest would take for expected output.
    text = re.sub(r"^```.*$", "", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    examples = doctest.DocTestParser().get_doctest(text, {}, PAGE.name, str(PAGE), 0)
    assert len(examples.examples) > 10
    assert doctest.DocTestRunner().run(examples).failed == 0
