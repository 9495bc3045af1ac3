"""Moments one after another on a timeline, counted in frames: what cut lists for editors are written from."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from gare.data.boxed_cut import FACT_LIMITS, read_media_facts
from gare.data.decoder_messages import Media
from gare.data.timecode import can_drop, timeline_rate, to_frame
from gare.data.workers import Limits
from gare.errors import ClipError
from gare.library.editing.moments import Moment


@dataclass(frozen=True)
class TimelineClip:
    """A moment, in frames of its own file."""

    moment: Moment
    media: Media

    @cached_property
    def rate(self) -> Fraction:
        """Frames per second of the file."""
        return Fraction(*self.media.rate)

    @cached_property
    def num_file_frames(self) -> int:
        """How many frames the file has at that rate."""
        return max(1, to_frame(self.media.duration, self.rate))

    @cached_property
    def first(self) -> int:
        """The first frame of the moment, counted from the first of the file."""
        return max(0, min(to_frame(self.moment.start, self.rate), self.num_file_frames - 1))

    @cached_property
    def num_frames(self) -> int:
        """How many frames the moment has."""
        last = min(to_frame(self.moment.end, self.rate), self.num_file_frames)
        return max(1, last - self.first)


@dataclass(frozen=True)
class Timeline:
    """Clips one after another. The rate is that of most of them."""

    name: str
    clips: tuple[TimelineClip, ...]
    notices: tuple[str, ...] = ()
    """What an editor should know: files that were left out, rates that differ."""

    @cached_property
    def rate(self) -> Fraction:
        """Frames per second of the timeline."""
        return Counter(timeline_rate(clip.rate) for clip in self.clips).most_common(1)[0][0]

    @cached_property
    def is_drop_frame(self) -> bool:
        """Whether time codes follow the clock: at 29.97 and 59.94, unless files say that they do not."""
        if not can_drop(self.rate):
            return False
        coded = [clip.media for clip in self.clips if clip.media.first_frame]
        return not coded or any(media.is_drop_frame for media in coded)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """How many frames of the timeline each clip takes."""
        return tuple(
            clip.num_frames
            if clip.rate == self.rate
            else max(1, round(clip.num_frames / clip.rate * self.rate))
            for clip in self.clips
        )

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The frame of the timeline at which each clip begins."""
        return tuple(sum(self.lengths[:position]) for position in range(len(self.clips)))


def make_timeline(moments: Sequence[Moment], name: str, limits: Limits = FACT_LIMITS) -> Timeline:
    """Ask each file for its clock and put the moments one after another.

    Args:
        moments: in their order.
        name: of the timeline.
        limits: what the process may use that opens the files.

    Raises:
        ClipError: none of the files can be read.
    """
    found: dict[str, Media | ClipError] = {}
    for moment in moments:
        try:
            moment.check_unchanged()
        except ClipError as error:
            found[moment.path] = error
    found |= read_media_facts([each.path for each in moments if each.path not in found], limits=limits)
    clips, notices = [], []
    for moment in moments:
        facts = found[moment.path]
        if isinstance(facts, ClipError):
            notices.append(f"left out: {facts}")
        else:
            clips.append(TimelineClip(moment, facts))
    if not clips:
        raise ClipError("none of the files can be read: " + "; ".join(notices[:3]))
    timeline = Timeline(name, tuple(clips))
    return Timeline(name, timeline.clips, (*notices, *_rate_notices(timeline)))


def _rate_notices(timeline: Timeline) -> list[str]:
    notices = []
    others = sorted({clip.rate for clip in timeline.clips} - {timeline.rate})
    if others:
        rates = ", ".join(write_rate(rate) for rate in others)
        notices.append(f"files of {rates} frames a second are on a timeline of {write_rate(timeline.rate)}")
    num_variable = len({clip.moment.path for clip in timeline.clips if clip.media.is_variable})
    if num_variable:
        notices.append(
            f"{num_variable} files have a variable frame rate: their times are the nearest frame's"
        )
    return notices


def write_rate(rate: Fraction) -> str:
    """A rate as people write it.

    >>> write_rate(Fraction(24000, 1001)), write_rate(Fraction(25))
    ('23.976', '25')
    """
    return f"{math.floor(1000 * rate + Fraction(1, 2)) / 1000:g}"
