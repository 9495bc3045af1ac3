"""A timeline as FCPXML, for Final Cut Pro and DaVinci Resolve.

OpenTimelineIO's adapter is not used: at 23.976 and 29.97 it writes no frame duration, and never any sound.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from xml.etree import ElementTree

from gare.library.editing.timeline import Timeline, TimelineClip
from gare.library.index.scan import on_one_line

_VERSION = "1.8"  # read by everything since 2018
_SAMPLE_RATES = {
    32_000: "32k",
    44_100: "44.1k",
    48_000: "48k",
    88_200: "88.2k",
    96_000: "96k",
    192_000: "192k",
}
_LAYOUTS = {1: "mono", 2: "stereo"}


def write_fcpxml(timeline: Timeline) -> str:
    """Every time is a whole number of frames, as a fraction of a second."""
    root = ElementTree.Element("fcpxml", version=_VERSION)
    resources = ElementTree.SubElement(root, "resources")
    formats = _add_formats(resources, timeline)
    assets = _add_assets(resources, timeline, formats)
    project = ElementTree.SubElement(root, "project", name=on_one_line(timeline.name))
    spine = ElementTree.SubElement(_add_sequence(project, timeline, formats), "spine")
    for clip, length, offset in zip(timeline.clips, timeline.lengths, timeline.offsets, strict=True):
        ElementTree.SubElement(spine, "asset-clip", _placed(timeline, clip, assets, length, offset))
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<!DOCTYPE fcpxml>\n{_to_text(root)}\n'


def _to_text(root: ElementTree.Element) -> str:
    return ElementTree.tostring(root, encoding="unicode")


_FormatKey = tuple[Fraction, int, int]


def _format_key(clip: TimelineClip) -> _FormatKey:
    return clip.rate, clip.media.width, clip.media.height


def _timeline_key(timeline: Timeline) -> _FormatKey:
    """Its rate, and the size of the first file that has it."""
    ordered = sorted(timeline.clips, key=lambda clip: clip.rate != timeline.rate)
    return timeline.rate, ordered[0].media.width, ordered[0].media.height


def _add_formats(resources: ElementTree.Element, timeline: Timeline) -> dict[_FormatKey, str]:
    """The format of the timeline and those of all files, each once."""
    keys = dict.fromkeys([_timeline_key(timeline), *map(_format_key, timeline.clips)])
    ids = {key: f"r{number}" for number, key in enumerate(keys, 1)}
    for key, name in ids.items():
        rate, width, height = key
        described = {"id": name, "frameDuration": _seconds(1, rate, reduced=False)}
        ElementTree.SubElement(resources, "format", {**described, "width": str(width), "height": str(height)})
    return ids


def _add_assets(
    resources: ElementTree.Element, timeline: Timeline, formats: dict[_FormatKey, str]
) -> dict[str, str]:
    ids: dict[str, str] = {}
    for clip in timeline.clips:
        path = clip.moment.path
        if path not in ids:
            ids[path] = f"r{len(formats) + len(ids) + 1}"
            described = dict(_described(clip, formats))
            ElementTree.SubElement(resources, "asset", {"id": ids[path], **described})
    return ids


def _described(clip: TimelineClip, formats: dict[_FormatKey, str]) -> Iterator[tuple[str, str]]:
    media = clip.media
    yield "name", on_one_line(os.path.basename(clip.moment.path))
    yield "src", Path(clip.moment.path).as_uri()
    yield "start", _seconds(media.first_frame, clip.rate)
    yield "duration", _seconds(clip.num_file_frames, clip.rate)
    yield "hasVideo", "1"
    yield "format", formats[_format_key(clip)]
    if media.num_channels:
        yield "hasAudio", "1"
        yield "audioSources", str(media.num_audio)
        yield "audioChannels", str(media.num_channels)
        yield "audioRate", str(media.sample_rate)


def _add_sequence(
    project: ElementTree.Element, timeline: Timeline, formats: dict[_FormatKey, str]
) -> ElementTree.Element:
    channels = max(clip.media.num_channels for clip in timeline.clips)
    more = {"audioLayout": _LAYOUTS.get(channels, "surround")} if channels else {}
    sample_rate = _SAMPLE_RATES.get(max(clip.media.sample_rate for clip in timeline.clips))
    if channels and sample_rate:
        more["audioRate"] = sample_rate
    described = {
        "format": formats[_timeline_key(timeline)],
        "duration": _seconds(sum(timeline.lengths), timeline.rate),
        "tcStart": "0s",
        "tcFormat": "DF" if timeline.is_drop_frame else "NDF",
        **more,
    }
    return ElementTree.SubElement(project, "sequence", described)


def _placed(
    timeline: Timeline, clip: TimelineClip, assets: dict[str, str], length: int, offset: int
) -> dict[str, str]:
    return {
        "name": clip.moment.title,
        "ref": assets[clip.moment.path],
        "offset": _seconds(offset, timeline.rate),
        "start": _seconds(clip.media.first_frame + clip.first, clip.rate),
        "duration": _seconds(length, timeline.rate),
        "tcFormat": "DF" if clip.media.is_drop_frame else "NDF",
    }


def _seconds(frames: int, rate: Fraction, *, reduced: bool = True) -> str:
    """Frames as a time of FCPXML.

    >>> _seconds(24, Fraction(24000, 1001)), _seconds(50, Fraction(25))
    ('1001/1000s', '2s')
    """
    time = frames / rate
    if time.denominator == 1 and reduced:
        return f"{time.numerator}s"
    return f"{time.numerator}/{time.denominator}s"
