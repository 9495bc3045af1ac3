"""Real video files whose frames carry their own number, so that a test can tell which moments were taken."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

_BITS = 16
SAMPLE_RATE = 48_000
_CLOCK = Fraction(1, 1000)  # timestamps are given in milliseconds


def numbered_image(number: int, size: tuple[int, int] = (64, 48)) -> Image.Image:
    """The number in binary, as black and white stripes from left (most significant) to right."""
    width, height = size
    bits = [(number >> shift) & 1 for shift in reversed(range(_BITS))]
    columns = np.repeat(np.array(bits, dtype=np.uint8) * 255, width // _BITS)
    return Image.fromarray(np.tile(columns, (height, 1))).convert("RGB")


def read_number(image: Image.Image) -> int:
    row = np.asarray(image.convert("L").resize((_BITS, 1), Image.Resampling.BOX))[0]
    return int("".join("1" if value > 127 else "0" for value in row), 2)


def write_video(
    path: Path,
    times: Sequence[float],
    *,
    pictures: Sequence[Image.Image] | None = None,
    size: tuple[int, int] = (64, 48),
    codec: str = "libx264",
    keyframe_every: int = 12,
    options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
) -> Path:
    """A video whose frame k shows the number k, or picture k, at `times[k]` seconds."""
    with av.open(str(path), "w", options=container_options or {}) as container:
        stream = container.add_stream(codec, rate=10, options=options or {})
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        stream.time_base = stream.codec_context.time_base = _CLOCK
        stream.codec_context.gop_size = keyframe_every
        for number, time in enumerate(times):
            picture = numbered_image(number, size) if pictures is None else pictures[number].resize(size)
            frame = av.VideoFrame.from_image(picture)
            frame.pts, frame.time_base = round(time / _CLOCK), _CLOCK
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def write_film(
    path: Path,
    num_frames: int,
    *,
    rate: Fraction = Fraction(25),
    times: Sequence[float] | None = None,
    codec: str = "libx264",
    sound: str = "aac",
    layout: str = "stereo",
    options: dict[str, str] | None = None,
    timecode: str | None = None,
) -> Path:
    """A film whose frame k shows the number k; a tone begins with each second, higher in each channel.

    A keyframe comes every 24 frames. Frames come at `rate`, or at `times`.
    """
    clock = _CLOCK if times is not None else 1 / rate
    with av.open(str(path), "w") as container:
        if timecode:
            container.metadata["timecode"] = timecode
        picture = container.add_stream(codec, rate=rate, options={"sc_threshold": "0", **(options or {})})
        picture.width, picture.height, picture.pix_fmt = 64, 48, "yuv420p"
        picture.codec_context.time_base, picture.codec_context.gop_size = clock, 24
        track = container.add_stream(sound, rate=SAMPLE_RATE, layout=layout) if sound else None
        for number in range(num_frames):
            frame = av.VideoFrame.from_image(numbered_image(number))
            frame.pts = number if times is None else round(times[number] / clock)
            frame.time_base = clock
            container.mux(picture.encode(frame))
        container.mux(picture.encode(None))
        if track is not None:
            seconds = float(num_frames / rate) if times is None else times[-1] + 0.1
            _add_tones(container, track, round(seconds * SAMPLE_RATE), layout)
    return path


def _add_tones(container: Any, track: Any, num_samples: int, layout: str) -> None:
    seconds = np.arange(num_samples) / SAMPLE_RATE
    channels = range(track.codec_context.layout.nb_channels)
    tones = np.stack([np.sin(2 * np.pi * (400 + 200 * channel) * seconds) for channel in channels])
    samples = (0.5 * tones * (seconds % 1 < 0.1)).astype(np.float32)
    for start in range(0, num_samples, 1024):
        part = np.ascontiguousarray(samples[:, start : start + 1024])
        frame = av.AudioFrame.from_ndarray(part, "fltp", layout)
        frame.sample_rate, frame.pts = SAMPLE_RATE, start
        container.mux(track.encode(frame))
    container.mux(track.encode(None))


def write_audio(path: Path, codec: str = "aac", seconds: float = 1.0) -> Path:
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=48000)
        stream.layout = "mono"
        samples = 1024
        for start in range(0, int(48000 * seconds), samples):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, samples), dtype=np.float32), "fltp", "mono")
            frame.sample_rate, frame.pts = 48000, start
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def set_rotation(path: Path) -> Path:
    """Mark an mp4 or mov as 'turn 90° clockwise to display', as phones held upright do."""
    content = bytearray(path.read_bytes())
    matrix = content.index(b"tkhd") + 44
    one, minus_one = (1 << 16).to_bytes(4, "big"), (-(1 << 16)).to_bytes(4, "big", signed=True)
    zero, w = bytes(4), (1 << 30).to_bytes(4, "big")
    width = int.from_bytes(content[matrix + 40 : matrix + 44], "big")
    x = width.to_bytes(4, "big")
    content[matrix : matrix + 36] = b"".join([zero, one, zero, minus_one, zero, zero, x, zero, w])
    path.write_bytes(content)
    return path


def steady(seconds: float, fps: float = 10) -> list[float]:
    return [number / fps for number in range(round(seconds * fps))]
