"""Where clips go: into the folder that was named and nowhere else, under names that nothing has yet.

Names are made of those of video files, and anyone may have named those.
"""

from __future__ import annotations

import os
import re
import unicodedata
from pathlib import Path

from gare.data.boxed_cut import CUT_LIMITS, CutClip, OnCut, container_for, cut_clip
from gare.data.workers import Limits
from gare.errors import ClipError
from gare.library.editing.moments import Moment, write_clock

_UNSAFE = re.compile(r"[^\w .,+@()\[\]-]")
_MOST_BYTES = 120  # of the file's own name in that of a clip
_RESERVED = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\.|$)")  # of Windows
_MOST_NAMES = 10_000


def clip_name(moment: Moment, suffix: str) -> str:
    """A name for the clip of a moment: one part of a path, whatever the file is called.

    >>> clip_name(Moment("/videos/Ein Hund.mov", 63.2, 75.0), ".mov")
    'Ein Hund_0-01-03.200_0-01-15.000.mov'
    >>> clip_name(Moment("/videos/..\\\\..\\\\x\\n$(rm).mp4", 0, 1), ".mp4")
    'x_(rm)_0-00-00.000_0-00-01.000.mp4'
    """
    stem = os.path.splitext(os.path.basename(moment.path))[0]
    times = "_".join(write_clock(time).replace(":", "-") for time in (moment.start, moment.end))
    return f"{_safe(stem)}_{times}{suffix}"


def _safe(name: str) -> str:
    plain = unicodedata.normalize("NFC", name)
    plain = re.sub("_+", "_", _UNSAFE.sub("_", plain)).strip(" ._-")
    plain = plain.encode("utf-8", "ignore")[:_MOST_BYTES].decode("utf-8", "ignore").strip(" ._-")
    return f"clip_{plain}" if not plain or _RESERVED.match(plain) else plain


def cut_moment(
    moment: Moment,
    folder: Path,
    *,
    exact: bool = False,
    suffix: str | None = None,
    limits: Limits = CUT_LIMITS,
    on_cut: OnCut | None = None,
) -> CutClip:
    """Cut a moment into a folder. A name that is taken gets a number: nothing is overwritten.

    Args:
        moment: which part of which file.
        folder: where the clip goes; made if it is not there.
        exact: encode anew, with the first and last frame that were asked for.
        suffix: the container, such as ".mkv"; default: as the file's.
        limits: what the process that cuts may use.
        on_cut: is told how far it is.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ClipError(f"{folder} cannot be made: {error.strerror or error}") from None
    target = _new_name(folder, clip_name(moment, suffix or container_for(moment.path, exact=exact)))
    return cut_clip(moment.path, target, moment.start, moment.end, exact=exact, limits=limits, on_cut=on_cut)


def _new_name(folder: Path, name: str) -> Path:
    stem, suffix = os.path.splitext(name)
    for number in range(1, _MOST_NAMES):
        path = folder / (name if number == 1 else f"{stem}-{number}{suffix}")
        if not os.path.lexists(path):
            return path
    raise ClipError(f"{folder} has thousands of clips named {name}; choose another folder")
