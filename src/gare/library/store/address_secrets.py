"""Addresses of libraries without their passwords, for messages, logs and pages.

A password may be malformed, or stand where none is expected. Whatever may be one is left out: too much rather
than too little.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

_USER = re.compile(r"^(?P<before>[^:]*:/*[^/@:]*):(?P<password>.*)@", re.DOTALL)


def shown_address(uri: str) -> str:
    """The address as it may be shown.

    >>> shown_address("postgresql://me:se/cr@t@host/db?sslpassword=x&connect_timeout=3")
    'postgresql://me@host/db?sslpassword=…&connect_timeout=3'
    """
    shown = _USER.sub(r"\g<before>@", uri)
    parts = re.split(r"([?&;\s])", shown)
    is_secret = False
    for place, part in enumerate(parts):
        name, equals, _ = part.partition("=")
        if place % 2:
            continue
        if equals:
            is_secret = "pass" in unquote(name).lower()
            parts[place] = f"{name}=…" if is_secret else part
        elif is_secret and part:  # a password with a blank or an ampersand in it
            parts[place] = "…"
    return "".join(parts)


def password_of(uri: str) -> str | None:
    """The password between user and host, as a person meant it; None where there is none."""
    found = _USER.match(uri)
    return unquote(found["password"]) if found else None


def has_secret(uri: str) -> bool:
    """Whether something of the address is not shown."""
    return shown_address(uri) != uri
