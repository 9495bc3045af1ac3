"""Which items a check reads: all, a share, or one of several equal parts; and how far the last one came.

Every item has a place on a circle, by a hash of its id. A share is an arc of it. `n/t` is always the same
arc, so that all n of t together cover every item once. A percentage goes on where the last one ended, so that
40 checks of 2.5 % cover every item too. The place is noted in a small file of the user, not in the library:
a check writes nothing into a library.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gare.atomic import write_text

_CIRCLE = 2**32


@dataclass(frozen=True)
class ReadShare:
    """An arc of the circle, from 0 to 1."""

    size: float
    start: float | None = None
    """None goes on where the last check ended."""

    @classmethod
    def parse(cls, text: str) -> ReadShare:
        """Read `all`, `2.5%` or `n/t`.

        >>> ReadShare.parse("2/4")
        ReadShare(size=0.25, start=0.25)
        >>> ReadShare.parse("2.5%").size
        0.025

        Raises:
            ValueError: it is none of them.
        """
        text = text.strip()
        if text == "all":
            return cls(1.0)
        if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text):
            percent = float(match[1])
            if 0 < percent <= 100:
                return cls(percent / 100)
        if match := re.fullmatch(r"(\d+)/(\d+)", text):
            number, total = int(match[1]), int(match[2])
            if 1 <= number <= total:
                return cls(1 / total, (number - 1) / total)
        raise ValueError(
            f"'{text}' is no share of the data: write all, a percentage such as 2.5%, or n/t such as 1/7"
        )


def place_of(item: str) -> int:
    """The place of an item on the circle, in 32 bits."""
    return zlib.crc32(item.encode())


def choose_items(ids: Iterable[str], start: float, size: float) -> list[str]:
    """The items of an arc, in the order of their places."""
    first = round(start * _CIRCLE) % _CIRCLE
    last = round((start + size) * _CIRCLE)
    length = min(_CIRCLE, last - round(start * _CIRCLE))
    ranked = ((((place_of(item) - first) % _CIRCLE), item) for item in ids)
    return [item for distance, item in sorted(ranked) if distance < length]


def place_after(item: str) -> float:
    """Where to go on when this item was read last."""
    return ((place_of(item) + 1) % _CIRCLE) / _CIRCLE


# --- how far the last check came ----------------------------------------------------------------------------


def load_place(library: str) -> float:
    """Where the last check of this library ended; 0 without one."""
    try:
        place = float(json.loads(_place_file(library).read_text(encoding="utf-8"))["place"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0
    return place if 0 <= place < 1 else 0.0


def save_place(library: str, place: float) -> None:
    """Note where a check ended. Where that cannot be written, the next one begins anew."""
    file = _place_file(library)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps({"library": library, "place": place}) + "\n")
    except OSError:
        pass


def _place_file(library: str) -> Path:
    home = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    name = hashlib.blake2b(library.encode(), digest_size=8).hexdigest()
    return Path(home) / "gare" / f"check-{name}.json"
