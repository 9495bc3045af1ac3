"""Numbers as words in captions."""

from __future__ import annotations

from typing import Any


def number(value: float | None, digits: int = 3) -> str:
    """Short, with a real minus sign.

    >>> number(-0.12345), number(1234.5), number(0.00001234), number(None)
    ('−0.123', '1,234', '1.23e−05', 'n/a')
    """
    if value is None:
        return "n/a"
    if value and (abs(value) < 10**-digits):
        shown = f"{value:.2e}"
    elif abs(value) >= 1000:
        shown = f"{value:,.0f}"
    else:
        shown = f"{value:.{digits}f}"
    return shown.replace("-", "−")


def percent(share: float | None, digits: int = 1) -> str:
    """
    >>> percent(0.1234)
    '12.3 %'
    """
    return "n/a" if share is None else f"{100 * share:.{digits}f} %"


def spread(values: dict[str, Any], digits: int = 3) -> str:
    """Median with the range of nine in ten."""
    return (
        f"{number(values['median'], digits)} (90 % within {number(values['low'], digits)} to "
        f"{number(values['high'], digits)})"
    )


def one_line(text: str) -> str:
    """Captions and ids may hold anything; tabs and line breaks would tear a table or a title apart.

    >>> one_line("a dog\\n\\tcatches")
    'a dog catches'
    """
    return " ".join(text.split())


def clip(text: str, width: int) -> str:
    """
    >>> clip("a man is cooking", 9)
    'a man is…'
    """
    return text if len(text) <= width else text[: width - 1].rstrip() + "…"
