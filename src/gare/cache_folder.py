"""Where this machine keeps what it can make again: bounds of scores, measured speeds."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/gare, or ~/.cache/gare. All of it may be deleted."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gare"
