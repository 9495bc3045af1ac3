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
from gare.data.timecode import nearest_rate, read_timecode
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
    is_variable = _is_variable(container, picture, av)
    average = picture.average_rate or picture.guessed_rate or Fraction(25)
    rate = nearest_rate(min(max(Fraction(average), Fraction(1)), Fraction(240)), is_variable=is_variable)
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


def _is_variable(container: InputContainer, picture: VideoStream, av: Any) -> bool:
    """Whether frames come at distances that differ, as far as the first minutes tell."""
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
    return _is_uneven(sorted(times))


def _is_uneven(times: list[Fraction]) -> bool:
    """Whether one distance in twenty or more is not the usual one: a lost frame makes no variable rate.

    >>> _is_uneven([Fraction(n, 25) for n in range(9)]), _is_uneven([Fraction(n * n, 25) for n in range(9)])
    (False, True)
    """
    # The last frames of what was looked at may miss some that come later in the file.
    distances = sorted(after - before for before, after in zip(times, times[1:-8] or times[1:], strict=False))
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
