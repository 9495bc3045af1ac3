"""Which split a file or folder holds, by its name."""

from __future__ import annotations

import re
from pathlib import PurePath

from gare.data.manifest import Split

_SPLITS: dict[str, Split] = {
    "train": "train",
    "training": "train",
    "validation": "val",
    "valid": "val",
    "val": "val",
    "dev": "val",
    "test": "test",
    "testing": "test",
}


def split_of_name(path: PurePath) -> Split | None:
    """The split that a part of a path begins with, as a word of its own; None where no part does.

    >>> split_of_name(PurePath("data/validation-00000-of-00002.parquet")), split_of_name(PurePath("0001.tar"))
    ('val', None)
    """
    for part in path.parts:
        word = re.match(r"[A-Za-z]+", part)
        if word and word[0].lower() in _SPLITS:
            return _SPLITS[word[0].lower()]
    return None
