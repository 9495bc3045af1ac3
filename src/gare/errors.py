"""Errors that a user can mend. Each message says what was wrong, what was expected and what to do.

Callers who pass nonsense to a function get `ValueError`; these are for files, checkpoints and settings.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

VideoProblem = Literal["missing", "unreadable", "truncated", "corrupt", "no_video", "zero_length"]
"""Why a video gives no frames, or not all: `no_video` is audio only, `corrupt` is damage in mid-stream."""


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Refuse a value that is none of the choices, and list them.

    >>> check_choice("anchor", "videos", ("video", "text"))
    Traceback (most recent call last):
    ...
    ValueError: anchor 'videos' is not one of video, text
    """
    if value not in choices:
        raise ValueError(f"{name} '{value}' is not one of {', '.join(choices)}")


class GareError(Exception):
    """Base of every error that a user can cause and mend; the command line prints it without a traceback."""


class MissingExtraError(GareError, ImportError):
    """Packages that a command needs and that are not installed."""


class ConfigError(GareError, ValueError):
    """A recipe, preset or override that does not describe a valid configuration."""


class CheckpointError(GareError):
    """Weights that are missing, damaged, of another model, or not weights at all."""


class EncoderError(GareError):
    """An encoder of one's own that failed; the error it raised is the cause."""


class DataError(GareError):
    """Annotations, a manifest or a cache that is missing, malformed or incomplete."""


class EvaluationError(GareError):
    """Results that are missing, damaged or of another protocol, or a gallery that is not the whole split."""


class VideoError(GareError):
    """A video or image that cannot be opened or decoded; `kind` says why in one word."""

    def __init__(self, message: str, kind: VideoProblem = "unreadable") -> None:
        super().__init__(message)
        self.kind = kind


class ClipError(GareError):
    """A clip or a list of hits that cannot be written; `kind` says why in one word, where a decoder knows."""

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


class TrainingError(GareError):
    """A run that cannot go on: a loss or gradient that is not finite, a disk that is full."""


class LostPeerError(TrainingError):
    """A run of several processes that cannot go on, because one of the others is gone."""


class LibraryError(GareError):
    """A library that is missing, damaged, full, read-only, out of reach, or made by another model."""

    logged: str = ""
    """What a server may log of it. The message may quote a filter, an id or a path, and is not logged."""


class ClusterError(GareError):
    """A cluster that cannot be reached, does not answer in time, or has lost what it was asked for."""


class SlowClusterError(ClusterError):
    """A cluster that has not answered so far, and may still do so."""


class MissingLibraryError(LibraryError):
    """There is no library at this address."""


class DamagedLibraryError(LibraryError):
    """A library that cannot be read as it was written; `reason` says what is wrong, without what to do."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or message


class QueryError(GareError, ValueError):
    """A search that asks for nothing, or for something that cannot be read."""


class TimeLimitError(GareError):
    """A search or a list that was ended because its time was up, or because nobody waits for it any more."""


class ServeError(GareError):
    """A server that may not or cannot start: no token for a network, a port that is taken."""
