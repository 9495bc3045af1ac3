"""A long video made of clips, with some of them planted in it once: a real file, for a real decoder.

Every clip is encoded once, with the same settings; the film is their packets one after the other. So it costs
as long as the clips to make, and not as long as it plays.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from PIL import Image

from gare.data.decoder import import_av
from gare.data.video import VideoReader

_WIDTH, _HEIGHT, _RATE = 640, 360, 25
_LONGEST_S = 60.0  # of a clip: a film of ten scenes should not be one of them


@dataclass(frozen=True)
class Scene:
    """Where a clip lies in the film, in seconds."""

    clip: Path
    start: float
    end: float


def write_film(
    target: Path, planted: Sequence[Path], others: Sequence[Path], *, seconds: float, seed: int, folder: Path
) -> list[Scene]:
    """Write the film, and say where the planted clips are.

    Args:
        planted: these are in it once, spread over the whole of it.
        others: they come again and again, in a random order, until the film is long enough.
        folder: for the encoded clips.
    """
    lengths = {clip: _encode(clip, folder / f"{n}.mp4") for n, clip in enumerate([*planted, *others])}
    parts = {clip: folder / f"{n}.mp4" for n, clip in enumerate([*planted, *others])}
    order = _order(planted, others, lengths, seconds, random.Random(seed))
    _join(target, [parts[clip] for clip in order], [lengths[clip] for clip in order])
    scenes, at = [], 0
    for clip in order:
        if clip in planted:
            scenes.append(Scene(clip, at / _RATE, (at + lengths[clip]) / _RATE))
        at += lengths[clip]
    return scenes


def _order(
    planted: Sequence[Path],
    others: Sequence[Path],
    lengths: dict[Path, int],
    seconds: float,
    generator: random.Random,
) -> list[Path]:
    """The clips of the film: what is planted at even distances, never two side by side where others are."""
    missing = int(seconds * _RATE) - sum(lengths[clip] for clip in planted)
    filling: list[Path] = []
    while missing > 0:
        for clip in generator.sample(list(others), len(others)):
            if missing > 0:
                filling.append(clip)
                missing -= lengths[clip]
    order, scenes = filling, generator.sample(list(planted), len(planted))
    step = len(filling) / len(scenes)
    for number, clip in reversed(list(enumerate(scenes))):
        order.insert(round((number + generator.uniform(0.2, 0.8)) * step), clip)
    return order


def _encode(clip: Path, target: Path) -> int:
    """Encode a clip at the size and rate of the film; how many frames it has."""
    av = import_av()
    count = 0
    with av.open(str(target), "w") as container:
        stream: Any = container.add_stream("libx264", rate=_RATE, options={"preset": "veryfast", "crf": "23"})
        stream.width, stream.height, stream.pix_fmt = _WIDTH, _HEIGHT, "yuv420p"
        for image in _pictures(clip):
            frame = av.VideoFrame.from_image(image)
            frame.pts, frame.time_base = count, Fraction(1, _RATE)
            container.mux(stream.encode(frame))
            count += 1
        container.mux(stream.encode(None))
    return count


def _pictures(clip: Path) -> Iterator[Image.Image]:
    with VideoReader(clip) as reader:
        shown_at, picture = -1.0, Image.new("RGB", (_WIDTH, _HEIGHT))
        for number in range(max(1, int(min(reader.duration, _LONGEST_S) * _RATE))):
            if number and number / _RATE < reader.next_change:
                yield picture
                continue
            shown = reader.image_at(number / _RATE)
            if shown is None:
                return
            if shown[0] > shown_at:
                shown_at, picture = shown[0], _framed(shown[1])
            yield picture


def _framed(image: Image.Image) -> Image.Image:
    """The whole picture in the middle of the screen, with black beside it."""
    scale = min(_WIDTH / image.width, _HEIGHT / image.height)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    screen = Image.new("RGB", (_WIDTH, _HEIGHT))
    corner = (_WIDTH - size[0]) // 2, (_HEIGHT - size[1]) // 2
    screen.paste(image.resize(size, Image.Resampling.BILINEAR), corner)
    return screen


def _join(target: Path, parts: Sequence[Path], lengths: Sequence[int]) -> None:
    """Copy the packets of all parts into one file."""
    av = import_av()
    with av.open(str(target), "w") as film:
        stream, at = None, 0
        for part, length in zip(parts, lengths, strict=True):
            with av.open(str(part)) as source:
                if stream is None:
                    stream = film.add_stream_from_template(source.streams.video[0])
                shift = int(at / _RATE / source.streams.video[0].time_base)
                for packet in source.demux(video=0):
                    if packet.dts is None:
                        continue  # the end
                    packet.pts += shift
                    packet.dts += shift
                    packet.stream = stream
                    film.mux(packet)
            at += length
