"""The formats of a list of moments, by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gare.atomic import creating
from gare.data.boxed_cut import FACT_LIMITS
from gare.data.workers import Limits
from gare.errors import ClipError
from gare.library.editing.edl_format import write_edl
from gare.library.editing.fcpxml_format import write_fcpxml
from gare.library.editing.moments import Moment
from gare.library.editing.otio_format import write_otio
from gare.library.editing.simple_lists import (
    write_ffmetadata,
    write_m3u8,
    write_mpv_edl,
    write_table,
    write_webvtt,
)
from gare.library.editing.timeline import Timeline, make_timeline


@dataclass(frozen=True)
class ListFormat:
    """How a list is written: from moments alone, or from a timeline, which asks files for their clock."""

    suffix: str
    media_type: str
    write: Callable[[Sequence[Moment], str], str] | None = None
    write_timeline: Callable[[Timeline], str] | None = None


ListName = Literal["m3u8", "mpv", "edl", "fcpxml", "otio", "csv", "chapters", "webvtt"]
"""The names of the formats."""
FORMATS: dict[ListName, ListFormat] = {
    "m3u8": ListFormat(".m3u8", "application/vnd.apple.mpegurl", write_m3u8),
    "mpv": ListFormat(".mpv.edl", "text/plain", write_mpv_edl),
    "edl": ListFormat(".edl", "text/plain", write_timeline=write_edl),
    "fcpxml": ListFormat(".fcpxml", "application/xml", write_timeline=write_fcpxml),
    "otio": ListFormat(".otio", "application/json", write_timeline=write_otio),
    "csv": ListFormat(".csv", "text/csv", write_table),
    "chapters": ListFormat(".ffmetadata", "text/plain", write_ffmetadata),
    "webvtt": ListFormat(".vtt", "text/vtt", write_webvtt),
}
"""What a list can be written as."""


@dataclass(frozen=True)
class WrittenList:
    """A list as text, and what there is to say about it."""

    text: str
    notices: tuple[str, ...] = ()


def choose_format(name: str | None, path: Path | None) -> ListName:
    """The format of this name; without a name, the one that the end of a file's name means.

    >>> choose_format("edl", None), choose_format(None, Path("a.mpv.edl")), choose_format(None, Path("a.EDL"))
    ('edl', 'mpv', 'edl')
    """
    for known in FORMATS:
        if known == name:
            return known
    listed = ", ".join(FORMATS)
    if name is not None:
        raise ClipError(f"'{name}' is no format; choose one of {listed}")
    if path is not None:
        endings = {
            key: each.suffix for key, each in FORMATS.items() if path.name.lower().endswith(each.suffix)
        }
        if endings:
            return max(endings, key=lambda key: len(endings[key]))
    raise ClipError(f"add --format, one of {listed}")


def write_list(
    moments: Sequence[Moment], name: ListName, title: str, *, limits: Limits = FACT_LIMITS
) -> WrittenList:
    """The list in a format.

    Args:
        moments: in their order.
        name: of the format, a key of `FORMATS`.
        title: of the list.
        limits: what the process may use that asks files for their clock.

    Raises:
        ClipError: there is nothing to list, or no file of it can be read.
    """
    if not moments:
        raise ClipError("there is no hit to write")
    chosen = FORMATS[name]
    if chosen.write is not None:
        return WrittenList(chosen.write(moments, title))
    assert chosen.write_timeline is not None
    timeline = make_timeline(moments, title, limits)
    return WrittenList(chosen.write_timeline(timeline), timeline.notices)


def save_list(text: str, path: Path) -> None:
    """Write a list into a new file.

    Raises:
        ClipError: there is such a file, or it cannot be written.
    """
    try:
        with creating(path) as part:
            part.write_bytes(text.encode("utf-8", "surrogateescape"))
    except FileExistsError:
        raise ClipError(f"{path} exists, and nothing is overwritten; choose another name") from None
    except OSError as error:
        raise ClipError(f"{os.fspath(path)} cannot be written: {error.strerror or error}") from None
