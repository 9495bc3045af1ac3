"""A timeline as OpenTimelineIO's own JSON. It is written here, so that no package has to be installed."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

from gare.library.editing.timeline import Timeline, TimelineClip
from gare.library.index.scan import on_one_line


def write_otio(timeline: Timeline) -> str:
    """A track of pictures and, where a file has sound, a track of sound with a gap for each that has none."""
    tracks = [_track("V1", "Video", [_clip(clip) for clip in timeline.clips])]
    if any(clip.media.num_channels for clip in timeline.clips):
        sound = [_clip(clip) if clip.media.num_channels else _gap(clip) for clip in timeline.clips]
        tracks.append(_track("A1", "Audio", sound))
    stack = {"OTIO_SCHEMA": "Stack.1", "name": "tracks", "children": tracks, **_item()}
    root = {
        "OTIO_SCHEMA": "Timeline.1",
        "name": on_one_line(timeline.name),
        "global_start_time": None,
        "tracks": stack,
        "metadata": {},
    }
    return json.dumps(root, ensure_ascii=False, indent=2) + "\n"


def _item(source_range: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "source_range": source_range,
        "effects": [],
        "markers": [],
        "enabled": True,
        "metadata": {},
    }


def _track(name: str, kind: str, children: list[dict[str, Any]]) -> dict[str, Any]:
    return {"OTIO_SCHEMA": "Track.1", "name": name, "kind": kind, "children": children, **_item()}


def _clip(clip: TimelineClip) -> dict[str, Any]:
    media, moment = clip.media, clip.moment
    facts = {
        "id": moment.id,
        "score": moment.score,
        "best_second": moment.best,
        "audio_channels": media.num_channels,
        "variable_frame_rate": media.is_variable,
        "drop_frame": media.is_drop_frame,
    }
    return {
        "OTIO_SCHEMA": "Clip.2",
        "name": moment.title,
        **_item(_range(media.first_frame + clip.first, clip.num_frames, clip.rate)),
        "metadata": {"gare": facts},
        "media_references": {"DEFAULT_MEDIA": _reference(clip)},
        "active_media_reference_key": "DEFAULT_MEDIA",
    }


def _reference(clip: TimelineClip) -> dict[str, Any]:
    return {
        "OTIO_SCHEMA": "ExternalReference.1",
        "name": "",
        "target_url": Path(clip.moment.path).as_uri(),
        "available_range": _range(clip.media.first_frame, clip.num_file_frames, clip.rate),
        "available_image_bounds": None,
        "metadata": {},
    }


def _gap(clip: TimelineClip) -> dict[str, Any]:
    return {"OTIO_SCHEMA": "Gap.1", "name": "", **_item(_range(0, clip.num_frames, clip.rate))}


def _range(first: int, num_frames: int, rate: Fraction) -> dict[str, Any]:
    return {
        "OTIO_SCHEMA": "TimeRange.1",
        "start_time": _time(first, rate),
        "duration": _time(num_frames, rate),
    }


def _time(frames: int, rate: Fraction) -> dict[str, Any]:
    return {"OTIO_SCHEMA": "RationalTime.1", "rate": float(rate), "value": float(frames)}
