"""What a store's own errors mean to its user."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from gare.errors import GareError, LibraryError

Result = TypeVar("Result")

# Lance reports everything as text; these words are the operating system's, in any of its layers.
_MEANINGS = {
    ("no space left", "disk quota", "os error 28", "file too large"): (
        "the disk is full. What was acknowledged is safe; free some space and run the same command again"
    ),
    ("read-only file system", "os error 30", "permission denied", "os error 13", "accessdenied"): (
        "it cannot be written. Check its permissions, or copy the library to a place you may write"
    ),
    ("error sending request", "connection refused", "timed out", "dns error", "service unavailable", "503"): (
        "the storage cannot be reached. Check the address, the credentials and that the service runs"
    ),
    ("file name too long", "os error 36"): "its name is too long for a folder; give another --library",
    ("nosuchbucket", "invalidaccesskeyid", "signaturedoesnotmatch", "403 forbidden"): (
        "the storage refuses. Check the bucket's name, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    ),
}  # fmt: skip


@contextlib.contextmanager
def explained(uri: str) -> Iterator[None]:
    """Turn what Lance and the system raise into a `LibraryError` that says what to do."""
    try:
        yield
    except (GareError, FileNotFoundError):
        raise
    except (OSError, RuntimeError, ValueError) as error:
        text = str(error).lower()
        for words, meaning in _MEANINGS.items():
            if any(word in text for word in words):
                raise LibraryError(f"library {uri}: {meaning}. ({_first_line(error)})") from error
        raise


def damaged(uri: str, error: Exception) -> LibraryError:
    return LibraryError(
        f"library {uri} is damaged: {_first_line(error)}. Restore it from a copy, or move it away and run "
        "'gare index' again: videos are read anew, nothing outside the library is touched."
    )


def with_retries(action: Callable[[], Result], *, seconds: float = 60.0) -> Result:
    """Repeat an action that lost against another writer, a little later each time."""
    deadline = time.monotonic() + seconds
    pause = 0.02
    while True:
        try:
            return action()
        except (OSError, RuntimeError, ValueError) as error:
            if "conflict" not in str(error).lower() or time.monotonic() > deadline:
                raise
        time.sleep(pause * random.uniform(0.5, 1.5))  # two that met once should not meet again
        pause = min(2 * pause, 2.0)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__
