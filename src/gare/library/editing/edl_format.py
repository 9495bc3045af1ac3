"""A timeline as an EDL (CMX 3600), the cut list that every editor reads.

OpenTimelineIO's adapter is not used: it writes neither the frame count mode (FCM) nor channels of sound.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from fractions import Fraction

from gare.data.timecode import write_timecode
from gare.errors import ClipError
from gare.library.editing.timeline import Timeline, TimelineClip
from gare.library.index.scan import on_one_line

_MOST_EVENTS = 999
_CHANNELS = {0: "V", 1: "B", 2: "AA/V"}  # B is both: picture and one channel


def write_edl(timeline: Timeline) -> str:
    """The events, with source times in the file's own time code and record times from one hour on.

    An EDL has one rate. Times of a file of another rate are those of the same moment at the timeline's rate.
    """
    if len(timeline.clips) > _MOST_EVENTS:
        raise ClipError(f"an EDL has {_MOST_EVENTS} events at most; ask for fewer hits (--top)")
    mode = "DROP FRAME" if timeline.is_drop_frame else "NON-DROP FRAME"
    lines = [f"TITLE: {on_one_line(timeline.name)[:70]}", f"FCM: {mode}", ""]
    for number, (clip, length, offset) in enumerate(
        zip(timeline.clips, timeline.lengths, timeline.offsets, strict=True), 1
    ):
        lines += _event(timeline, number, clip, length, offset)
    return "\n".join(lines) + "\n"


def _event(timeline: Timeline, number: int, clip: TimelineClip, length: int, offset: int) -> Iterator[str]:
    first = round(Fraction(clip.media.first_frame + clip.first) / clip.rate * timeline.rate)
    record = _hour(timeline) + offset
    frames = (first, first + length, record, record + length)
    times = " ".join(write_timecode(frame, timeline.rate, drop=timeline.is_drop_frame) for frame in frames)
    channels = clip.media.num_channels
    yield f"{number:03d}  {'AX':<8} {_CHANNELS[min(2, channels)]:<5} C        {times}"
    if channels > 2:
        yield "AUD  " + " ".join(f"{channel:>2}" for channel in range(3, channels + 1))
    yield f"* FROM CLIP NAME: {on_one_line(os.path.basename(clip.moment.path))}"
    yield f"* FROM FILE: {on_one_line(clip.moment.path)}"


def _hour(timeline: Timeline) -> int:
    """The frame whose time code is 01:00:00:00, where programmes begin."""
    whole = round(timeline.rate)
    return 3600 * whole - (whole // 15 * 54 if timeline.is_drop_frame else 0)
