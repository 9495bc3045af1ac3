"""What an editor asks of a video file: frame rate, time code, sound. It runs in a decoding process."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gare.data.decoder import (
    VideoFile,
    damage_errors,
    find_duration,
    import_av,
    open_video,
    pick_stream,
    reason,
)
from gare.data.decoder_messages import Failure, Media
from gare.data.timecode import RATES, nearest_rate, read_timecode
from gare.errors import VideoError

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream

_LOOKED_AT = 3000  # packets
_DIFFERENT = Fraction(1, 5)  # of the usual distance of two frames: containers round their times
_MOST = 2**31 - 1


def read_media(name: str, descriptor: int) -> Iterator[Media | Failure]:
    """The facts of a file; its name is for messages only."""
    av = import_av()
    file = VideoFile(Path(name), descriptor)
    try:
        with open_video(file, av, fflags="+genpts") as container:
            yield _facts(container, file, av)
    except VideoError as error:
        yield Failure(error.kind, str(error))
    except MemoryError:
        raise
    except damage_errors(av) as error:
        yield Failure("unreadable", f"{name} is not a video that can be read: {reason(error)}")


def _facts(container: InputContainer, file: VideoFile, av: Any) -> Media:
    picture = pick_stream(container, file.path)
    duration = max(0.0, find_duration(container, picture, file, av))
    distances = _distances(container, picture, av)
    is_variable = _is_uneven(distances)
    rate = _rate(picture, distances, is_variable=is_variable)
    sounds = [stream.codec_context for stream in container.streams.audio if stream.codec_context is not None]
    first_frame, is_drop = _first_frame(container, rate)
    return Media(
        duration=min(duration, float(_MOST)),
        rate=(rate.numerator, rate.denominator),
        width=picture.codec_context.width,
        height=picture.codec_context.height,
        sample_rate=min(_MOST, sounds[0].sample_rate) if sounds else 0,
        num_audio=min(len(sounds), 999),
        num_channels=min(sum(sound.layout.nb_channels for sound in sounds), 999),
        is_variable=is_variable,
        is_drop_frame=is_drop,
        first_frame=first_frame,
    )


def _rate(picture: VideoStream, distances: list[Fraction], *, is_variable: bool) -> Fraction:
    """The rate that the file states, or, where frames are missing, the one of those that are there."""
    stated = Fraction(picture.average_rate or picture.guessed_rate or 25)
    stated = min(max(stated, Fraction(1)), Fraction(240))
    if is_variable:
        return nearest_rate(stated, is_variable=True)
    usual = distances[len(distances) // 2] if distances else Fraction(0)
    found = [nearest_rate(rate) for rate in (stated, *([1 / usual] if usual else []))]
    return next((rate for rate in found if rate in RATES), found[0])


def _distances(container: InputContainer, picture: VideoStream, av: Any) -> list[Fraction]:
    """Seconds between frames that follow each other, by length, as far as the first minutes tell."""
    container.seek(picture.start_time or 0, stream=picture, backward=True)
    times = []
    try:
        for packet in islice(container.demux(picture), _LOOKED_AT):
            if packet.size and packet.pts is not None:
                times.append(packet.pts * (packet.time_base or Fraction(1)))
    except MemoryError:
        raise
    except damage_errors(av):
        pass  # as far as it could be read
    times.sort()
    # The last frames of what was looked at may miss some that come later in the file.
    return sorted(after - before for before, after in zip(times, times[1:-8] or times[1:], strict=False))


def _is_uneven(distances: list[Fraction]) -> bool:
    """Whether one distance in twenty or more is not the usual one: a lost frame makes no variable rate.

    >>> _is_uneven([Fraction(1, 25)] * 9), _is_uneven([Fraction(n, 25) for n in range(1, 9)])
    (False, True)
    """
    if not distances:
        return False
    usual = distances[len(distances) // 2]
    num_others = sum(abs(distance - usual) > _DIFFERENT * usual for distance in distances)
    return 20 * num_others >= len(distances)


def _first_frame(container: InputContainer, rate: Fraction) -> tuple[int, bool]:
    """The frame that the file's time code begins with; a track of its own or a tag says so."""
    tags = [container.metadata, *(stream.metadata for stream in container.streams)]
    stated = next((tag["timecode"] for tag in tags if "timecode" in tag), None)
    found = read_timecode(stated, rate) if stated else None
    return found or (0, False)
