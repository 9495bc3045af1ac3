"""A part of a video file as a file of its own: packets copied as they are, or frames encoded anew.

This runs in a decoding process, which has the file to read and the file to write as descriptors and can open
nothing else (`boxed_cut` is its parent). Times are seconds from the first frame of the picture.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from gare.data.containers import find_truncation
from gare.data.decoder import VideoFile, damage_errors, import_av, open_video, pick_stream, reason
from gare.data.decoder_messages import Cut, Failure
from gare.errors import VideoError

if TYPE_CHECKING:
    from av.audio.frame import AudioFrame
    from av.audio.stream import AudioStream
    from av.container import InputContainer, OutputContainer
    from av.stream import Stream
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

Packet = Any  # of PyAV, which is generic in its stubs alone
_BUFFER = 1 << 20
_BEFORE_S = (0, 10, 100, 1_000_000)  # some containers land late; then try from further back
_INTERLEAVED_S = 5  # sound may lie so far from its picture in the file
_SAME_MOMENT_S = Fraction(1, 10_000)  # containers round their times
_LONG_FRAME_S = Fraction(1, 10)  # a frame that stands longer than this is cut itself
_FINE = 10_000  # ticks a second, at least
_THREADS = 4
_MOST_SOUNDS = 64
_SAMPLES = 1024  # that an AAC frame has
_JITTER_S = 0.03  # rounded times of sound are no gaps
_BITS_PER_CHANNEL = 96_000
# Without B-frames every time is exact: containers tell how long the frame stands that is decoded last.
_QUALITY = {"crf": "18", "preset": "veryfast", "bf": "0"}
_PLACEHOLDER_BYTES = 16  # packets that show nothing new may be marked as keyframes (DivX)
_PIXELS = ("yuv420p", "yuvj420p", "yuv422p", "yuv444p", "yuv420p10le", "yuv422p10le", "yuv444p10le")


@dataclass(frozen=True)
class CutOrder:
    """Which part, and how."""

    name: str
    """The file's name, for messages only."""
    start: float
    end: float
    exact: bool
    container: str
    """FFmpeg's name of the container to write: mp4, mov, matroska or webm."""


def cut_video(order: CutOrder, source: int, target: int) -> Iterator[Cut | Failure]:
    """Write the part; say now and then how far it is, and at the end where it really begins and ends."""
    av = import_av()
    file = VideoFile(Path(order.name), source)
    try:
        _refuse_truncated(file)
        with (
            _open(file, av) as container,
            open(target, "wb", buffering=_BUFFER, closefd=False) as written,
        ):
            yield from _cut(order, container, written, av)
    except VideoError as error:
        yield Failure(error.kind, str(error))
    except MemoryError:
        raise
    except damage_errors(av) as error:
        yield _explain(order, error)


def _cut(order: CutOrder, container: InputContainer, written: BinaryIO, av: Any) -> Iterator[Cut]:
    picture = pick_stream(container, Path(order.name))
    span = _Span(picture, order)
    first = _keyframe_before(container, picture, span, av)
    with av.open(written, "w", format=order.container) as output:
        way = _Encoding if order.exact else _Copy
        work = way(span, container, output, first, av)
        yield from work.run()
    written.flush()
    yield work.state(is_whole=True)  # not before the last byte is written


def _refuse_truncated(file: VideoFile) -> None:
    with file.open_bytes() as start:
        missing = find_truncation(start)
    if missing:
        raise VideoError(f"{file.path} is truncated: {missing}; copy or download it again", "truncated")


def _open(file: VideoFile, av: Any) -> InputContainer:
    """The file, opened. What is no video cannot be cut by another way either."""
    try:
        return open_video(file, av, fflags="+genpts")
    except MemoryError:
        raise
    except damage_errors(av) as error:
        raise VideoError(f"{file.path} is not a video that can be read: {reason(error)}") from None


def _explain(order: CutOrder, error: Exception) -> Failure:
    number = getattr(error, "errno", None)
    if number == errno.EFBIG:
        return Failure("too_large", "the clip is larger than it may be; cut a shorter part")
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        return Failure("not_written", f"the clip cannot be written: {reason(error)}")
    way = "" if order.exact else "; --exact encodes it anew, and a name with .mkv takes any coding"
    return Failure("unreadable", f"{order.name} cannot be cut: {reason(error)}{way}")


class _Span:
    """The part of a file in the clocks of its streams, exactly."""

    def __init__(self, picture: VideoStream, order: CutOrder) -> None:
        self.picture, self.order = picture, order
        self.origin = (picture.start_time or 0) * _tick(picture)
        self.start = self.origin + _microseconds(order.start)
        self.end = self.origin + _microseconds(order.end)

    def has_begun(self, moment: Fraction) -> bool:
        """Whether what comes on screen at this moment is there at the start."""
        return moment <= self.start + _SAME_MOMENT_S

    def has_ended(self, moment: Fraction) -> bool:
        """Whether this moment is past the part."""
        return moment >= self.end - _SAME_MOMENT_S

    def sound_before(self, first: Fraction) -> Fraction:
        """From where to read, so that the sound of a keyframe is not missed."""
        return max(self.origin, first - _INTERLEAVED_S)

    def to_seconds(self, moment: Fraction) -> float:
        return float(moment - self.origin)

    def refuse_nothing(self, end: Fraction) -> None:
        """Refuse a part that begins when the last picture has gone."""
        if end <= self.start:
            message = f"{self.order.name} has no picture from {self.order.start:g} s on"
            raise VideoError(f"{message}; choose an earlier start", "zero_length")


def _microseconds(seconds: float) -> Fraction:
    """A time as it was meant: 3.2 is no binary number."""
    return Fraction(round(1_000_000 * seconds), 1_000_000)


def _tick(stream: Stream) -> Fraction:
    return stream.time_base or Fraction(1, 1_000_000)


def _moment(packet: Packet, stamp: int | None) -> Fraction | None:
    return None if stamp is None else stamp * (packet.time_base or Fraction(1, 1_000_000))


def _pts(packet: Packet) -> Fraction | None:
    return _moment(packet, packet.dts if packet.pts is None else packet.pts)


def _dts(packet: Packet) -> Fraction | None:
    return _moment(packet, packet.pts if packet.dts is None else packet.dts)


def _is_keyframe(packet: Packet) -> bool:
    return bool(packet.is_keyframe) and packet.size > _PLACEHOLDER_BYTES


def _seek(container: InputContainer, stream: VideoStream, moment: Fraction, av: Any) -> None:
    try:
        container.seek(math.floor(moment / _tick(stream)), stream=stream, backward=True)
    except MemoryError:
        raise
    except damage_errors(av):  # a raw stream: from its first byte, by position
        container.seek(0, any_frame=True, backward=True)


def _keyframe_before(container: InputContainer, picture: VideoStream, span: _Span, av: Any) -> Fraction:
    """The last moment up to the start where a picture can be decoded without those before it."""
    for margin in _BEFORE_S:
        _seek(container, picture, max(span.origin, span.start - margin), av)
        found = None
        for packet in container.demux(picture):
            shown, decoded = _pts(packet), _dts(packet)
            if shown is not None and span.has_begun(shown) and _is_keyframe(packet):
                found = shown
            if decoded is not None and not span.has_begun(decoded):
                break
        if found is not None:
            return found
    raise VideoError(
        f"{span.order.name} has no keyframe before {span.order.start:g} s; use --exact", "corrupt"
    )


# --- without loss -------------------------------------------------------------------------------------------


class _Copy:
    """Packets as they are, from the keyframe before the start on."""

    def __init__(
        self, span: _Span, container: InputContainer, output: OutputContainer, first: Fraction, av: Any
    ) -> None:
        self._span, self._container, self._output, self._first = span, container, output, first
        self._av = av
        streams = [span.picture, *_sounds(container)]
        self._outputs = {stream.index: output.add_stream_from_template(stream) for stream in streams}
        self._streams = streams
        self._open = {stream.index for stream in streams}
        self._held: list[Packet] = []
        self._started = False
        self._end, self._num_frames = first, 0

    def run(self) -> Iterator[Cut]:
        told = self._first
        for packet in self._packets():
            if packet.stream_index == self._span.picture.index:
                self._take_picture(packet)
            else:
                self._take_sound(packet)
            if self._end - told >= 1:
                told = self._end
                yield self.state(is_whole=False)
        self._span.refuse_nothing(self._end)

    def state(self, *, is_whole: bool) -> Cut:
        to_seconds = self._span.to_seconds
        return Cut(to_seconds(self._first), to_seconds(self._end), self._num_frames, is_whole)

    def _packets(self) -> Iterator[Packet]:
        """From a little before the keyframe, for the sake of its sound, to where no stream has more."""
        _seek(self._container, self._span.picture, self._span.sound_before(self._first), self._av)
        for packet in self._container.demux(self._streams):
            decoded = _dts(packet)
            if decoded is None or not packet.size:
                continue
            if self._span.has_ended(decoded):
                self._open.discard(packet.stream_index)
                if not self._open or decoded > self._span.end + _INTERLEAVED_S:
                    return
                continue
            yield packet

    def _take_picture(self, packet: Packet) -> None:
        shown = _pts(packet)
        assert shown is not None  # what has no time at all was left out
        if not self._started:
            self._started = _is_keyframe(packet) and shown == self._first
        if not self._started or shown < self._first:  # before it, or leaning on what is before it
            return
        if self._span.has_ended(shown):
            self._held.append(packet)  # kept only where a frame that is wanted leans on it
            return
        for wanted in (*self._held, packet):
            length = _moment(wanted, wanted.duration) or 1 / _steady_rate(self._span.picture)
            self._end = max(self._end, (_pts(wanted) or self._first) + length)
            self._num_frames += 1
            self._write(wanted)
        self._held.clear()

    def _take_sound(self, packet: Packet) -> None:
        moment = _pts(packet)
        if moment is not None and self._first <= moment < self._span.end:
            self._write(packet)

    def _write(self, packet: Packet) -> None:
        shift = round(self._first / (packet.time_base or Fraction(1)))
        packet.pts = None if packet.pts is None else packet.pts - shift
        packet.dts = None if packet.dts is None else packet.dts - shift
        packet.stream = self._outputs[packet.stream_index]
        self._output.mux(packet)


def _sounds(container: InputContainer) -> list[AudioStream]:
    """All that can be read, within reason: a file may list thousands."""
    return [stream for stream in container.streams.audio if stream.codec_context is not None][:_MOST_SOUNDS]


# --- exactly ------------------------------------------------------------------------------------------------


class _Encoding:
    """Frames from the one on screen at the start to the last one before the end; sound to the sample."""

    def __init__(
        self, span: _Span, container: InputContainer, output: OutputContainer, first: Fraction, av: Any
    ) -> None:
        self._span, self._container, self._output, self._first = span, container, output, first
        self._av = av
        self._tick = _fine_tick(_tick(span.picture))
        self._encoder = self._add_picture()
        self._sounds = {stream.index: _Sound(stream, output, av) for stream in _sounds(container)}
        self._waiting: tuple[Fraction, VideoFrame] | None = None
        self._begin: Fraction | None = None
        self._end, self._num_frames = span.start, 0
        self._durations: dict[int, int] = {}

    def _add_picture(self) -> Any:
        picture, context = self._span.picture, self._span.picture.codec_context
        encoder: Any = self._output.add_stream("libx264", rate=_steady_rate(picture), options=_QUALITY)
        encoder.width, encoder.height = context.width & ~1 or 2, context.height & ~1 or 2  # even, for H.264
        encoder.pix_fmt = context.pix_fmt if context.pix_fmt in _PIXELS else "yuv420p"
        encoder.codec_context.time_base = encoder.time_base = self._tick
        encoder.codec_context.thread_count = _THREADS
        for name in ("color_range", "color_primaries", "color_trc", "colorspace", "sample_aspect_ratio"):
            value = getattr(context, name, None)
            if value is not None:
                setattr(encoder.codec_context, name, value)
        return encoder

    def run(self) -> Iterator[Cut]:
        told = self._end
        for moment, frame in self._frames():
            self._take_frame(moment, frame)
            if self._end - told >= 1:
                told = self._end
                yield self.state(is_whole=False)
        self._show_until(self._natural_end())
        self._span.refuse_nothing(self._end)
        self._write(self._encoder.encode(None))
        for sound in self._sounds.values():
            sound.finish(self._begin or self._span.start, self._end)

    def state(self, *, is_whole: bool) -> Cut:
        to_seconds, begin = self._span.to_seconds, self._begin or self._span.start
        return Cut(to_seconds(begin), to_seconds(self._end), self._num_frames, is_whole)

    def _frames(self) -> Iterator[tuple[Fraction, VideoFrame]]:
        """Pictures up to the first after the end. Sound waits until it is known where the picture begins."""
        picture = self._span.picture
        picture.codec_context.thread_count = _THREADS
        _seek(self._container, picture, self._span.sound_before(self._first), self._av)
        streams = [picture, *(sound.stream for sound in self._sounds.values())]
        has_ended, last = False, self._first - 1
        for packet in self._container.demux(streams):
            decoded = _dts(packet)
            if decoded is not None and decoded > self._span.end + _INTERLEAVED_S:
                break
            if packet.stream_index != picture.index:
                self._sounds[packet.stream_index].take(packet, self._span, self._begin)
                continue
            for frame in _decode(packet, self._av):
                moment = None if frame.pts is None else frame.pts * _tick(picture)
                if moment is None or moment < self._first or has_ended:
                    continue
                if moment <= last:  # frames come in their order; some files have wrong times
                    moment = last + 1 / _steady_rate(picture)
                last = moment
                has_ended = self._span.has_ended(moment)
                yield moment, frame
        if not has_ended:
            yield from self._rest()

    def _rest(self) -> Iterator[tuple[Fraction, VideoFrame]]:
        """Frames that a decoder held back, where the file or the part of it that was read has ended."""
        for frame in _flush(self._span.picture, self._av):
            if frame.pts is not None:
                yield frame.pts * _tick(self._span.picture), frame

    def _take_frame(self, moment: Fraction, frame: VideoFrame) -> None:
        if not self._span.has_begun(moment):
            self._show_until(moment)
        self._waiting = None if self._span.has_ended(moment) else (moment, frame)

    def _natural_end(self) -> Fraction:
        """When the frame that waits leaves the screen, where none follows."""
        if self._waiting is None:
            return self._span.end
        moment, frame = self._waiting
        length = (frame.duration or 0) * _tick(self._span.picture)
        return moment + (length or 1 / _steady_rate(self._span.picture))

    def _show_until(self, end: Fraction) -> None:
        """Encode the frame that waits; now it is known how long it is on screen."""
        if self._waiting is None:
            return
        moment, frame = self._waiting
        self._waiting = None
        # A frame is begun with its first tick and shown to its last one; one that stands for long is cut.
        end = end if end - self._span.end <= _LONG_FRAME_S else self._span.end
        if self._begin is None:
            self._begin = moment if self._span.start - moment <= _LONG_FRAME_S else self._span.start
            if frame.rotation:
                self._encoder.set_display_rotation(frame.rotation)
        moment = max(moment, self._begin)
        frame.pts, frame.time_base = round((moment - self._begin) / self._tick), self._tick
        self._durations[frame.pts] = max(1, round((end - moment) / self._tick))
        frame.pict_type = self._av.video.frame.PictureType.NONE  # what it was in the file says nothing here
        self._write(self._encoder.encode(frame))
        self._num_frames += 1
        self._end = max(self._end, end)

    def _write(self, packets: list[Packet]) -> None:
        for packet in packets:
            if packet.pts in self._durations:
                packet.duration = self._durations.pop(packet.pts)
            self._output.mux(packet)


def _steady_rate(picture: VideoStream) -> Fraction:
    found = picture.average_rate or picture.guessed_rate or Fraction(25)
    return min(max(Fraction(found), Fraction(1)), Fraction(240))


def _fine_tick(tick: Fraction) -> Fraction:
    """The clock of the file, or a multiple of it that is fine enough for any frame rate.

    >>> _fine_tick(Fraction(1, 12800)), _fine_tick(Fraction(1001, 24000))
    (Fraction(1, 12800), Fraction(91, 912000))
    """
    return tick / max(1, math.ceil(tick * _FINE))


def _decode(packet: Packet, av: Any) -> list[Any]:
    """The frames of a packet; none where it is damaged, as a player shows none."""
    try:
        return packet.decode() if packet.size else []
    except MemoryError:
        raise
    except damage_errors(av):
        return []


def _flush(stream: Any, av: Any) -> list[Any]:
    try:
        frames: list[Any] = stream.codec_context.decode(None)
    except MemoryError:
        raise
    except damage_errors(av):  # the end of a file is one of them
        return []
    return frames


class _Sound:
    """A stream of sound: its samples from begin to end, whatever is missing as silence."""

    def __init__(self, stream: AudioStream, output: OutputContainer, av: Any) -> None:
        self.stream, self._output, self._av = stream, output, av
        context = stream.codec_context
        self._rate = context.sample_rate
        self._layout = context.layout.name
        self._encoder: Any = output.add_stream("aac", rate=self._rate, layout=self._layout)
        self._encoder.codec_context.bit_rate = _BITS_PER_CHANNEL * context.layout.nb_channels
        self._resampler = av.AudioResampler(format="fltp", layout=self._layout, rate=self._rate)
        self._early: list[tuple[Fraction, np.ndarray]] = []
        self._samples = np.zeros((context.layout.nb_channels, 0), np.float32)
        self._num_written = 0

    def take(self, packet: Packet, span: _Span, begin: Fraction | None) -> None:
        """Samples of a packet. Before it is known where the picture begins, they wait."""
        for frame in _decode(packet, self._av):
            moment = None if frame.pts is None else frame.pts * (frame.time_base or _tick(self.stream))
            if moment is not None and span.start - 2 * _INTERLEAVED_S < moment < span.end + 1:
                self._early += [(moment, samples) for samples in self._to_samples(frame)]
        if begin is not None:
            # What is beyond the end may be less than a frame of the picture: `finish` knows.
            self._place(begin, round((span.end - begin) * self._rate))

    def finish(self, begin: Fraction, end: Fraction) -> None:
        """Everything from the begin of the picture to its end."""
        length = round((end - begin) * self._rate)
        self._place(begin, length)
        self._encode(length, whole_frames=False)
        self._output.mux(self._encoder.encode(None))

    def _to_samples(self, frame: AudioFrame) -> list[np.ndarray]:
        return [made.to_ndarray() for made in self._resampler.resample(frame)]

    def _place(self, begin: Fraction, end: int) -> None:
        """Put samples where their times say, and encode what is known."""
        for moment, samples in self._early:
            at = round((moment - begin) * self._rate)
            if not self._num_known or abs(at - self._num_known) > _JITTER_S * self._rate:
                while self._num_known < min(at, end):  # silence, a second at a time
                    missing = min(self._rate, at - self._num_known)
                    self._append(np.zeros((len(samples), missing), np.float32), end)
                samples = samples[:, max(0, self._num_known - at) :]
            self._append(samples, end)
        self._early.clear()

    @property
    def _num_known(self) -> int:
        return self._num_written + self._samples.shape[1]

    def _append(self, samples: np.ndarray, end: int) -> None:
        self._samples = np.concatenate([self._samples, samples], axis=1)
        self._encode(end, whole_frames=True)

    def _encode(self, end: int, *, whole_frames: bool) -> None:
        least = _SAMPLES if whole_frames else 1
        while min(self._samples.shape[1], end - self._num_written) >= least:
            length = min(_SAMPLES, end - self._num_written)
            part, self._samples = self._samples[:, :length], self._samples[:, length:]
            frame = self._av.AudioFrame.from_ndarray(np.ascontiguousarray(part), "fltp", self._layout)
            frame.sample_rate, frame.pts = self._rate, self._num_written
            frame.time_base = Fraction(1, self._rate)
            self._num_written += part.shape[1]
            self._output.mux(self._encoder.encode(frame))
