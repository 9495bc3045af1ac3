"""What a server writes down: everything about an error but what people searched for."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from gare.serve.observability import JsonLines


def log_line(formatter: JsonLines, quoted: str) -> dict[str, str]:
    try:
        try:
            raise ValueError(f"cannot plan array_has(tags, '{quoted}')")
        except ValueError as error:
            raise RuntimeError(str(error)) from error
    except RuntimeError:
        record = logging.LogRecord("gare.serve", logging.ERROR, "", 0, "bug", None, sys.exc_info())
    line: dict[str, str] = json.loads(formatter.format(record))
    return line


def test_an_unforeseen_error_is_logged_without_the_words_it_quotes():
    line = log_line(JsonLines(), "my secret")
    assert "my secret" not in json.dumps(line)
    assert line["traceback"].endswith("RuntimeError")
    assert "ValueError\n" in line["traceback"]
    assert "in log_line" in line["traceback"]


@pytest.mark.parametrize("name", ["gare.library", "asyncio", "some.package"])
def test_messages_from_elsewhere_are_logged_without_what_they_quote(name):
    record = logging.LogRecord(
        name, logging.WARNING, "", 0, "item %s is lost\nmy secret", ("my secret",), None
    )
    assert json.loads(JsonLines().format(record))["event"] == f"{name}: item %s is lost"
    assert "my secret" in JsonLines(queries=True).format(record)


def test_a_warning_is_logged_with_its_place_and_kind():
    text = "/x/module.py:35: UserWarning: my secret\n  code()\n"
    record = logging.LogRecord("py.warnings", logging.WARNING, "", 0, "%s", (text,), None)
    assert json.loads(JsonLines().format(record))["event"] == "/x/module.py:35: UserWarning"


def test_who_logs_queries_gets_the_message_too():
    assert "my secret" in log_line(JsonLines(queries=True), "my secret")["traceback"]
