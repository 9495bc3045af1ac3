"""A small library to try things with: real mp4 files made on the spot, in a second or two each.

Photographs come with scikit-image; only those are used that are in the public domain or CC0. The other
scenes are drawn here.
"""

from __future__ import annotations

import importlib.util
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from PIL import Image, ImageDraw, ImageFilter, ImageOps

from gare.atomic import replacing
from gare.errors import DataError
from gare.extras import install_command

SIZE = (640, 360)
FPS = 10
EXAMPLES = ("a cat looking at the camera", "a cup of coffee", "a smiling woman")

Scene = Callable[[float], Image.Image]
"""The picture at a moment, from 0 (its beginning) to 1 (its end)."""


@dataclass(frozen=True)
class Clip:
    """A sample video: its name and what it shows."""

    path: str
    parts: tuple[tuple[str, float], ...]
    """Photographs or drawn scenes, and how many seconds of each."""
    days_old: int


_PHOTOS = {
    "astronaut": "astronaut.png",  # NASA, public domain
    "camera": "camera.png",  # CC0, Lav Varshney
    "cat": "chelsea.png",  # CC0, Stefan van der Walt
    "coffee": "coffee.png",  # CC0, Rachel Michetti
    "galaxies": "hubble_deep_field.jpg",  # NASA, public domain
    "rocket": "rocket.jpg",  # SpaceX, public domain
    "bricks": "brick.png",  # CC0 Textures
    "grass": "grass.png",  # CC0 Textures
    "gravel": "gravel.png",  # CC0 Textures
    "retina": "retina.jpg",  # CC0
}
_TINTS = {  # these are in shades of grey
    "bricks": ((58, 20, 14), (214, 140, 112)),
    "grass": ((10, 32, 8), (176, 214, 96)),
    "gravel": ((40, 34, 28), (208, 198, 184)),
}
CLIPS = (
    Clip("animals/chelsea.mp4", (("cat", 6),), 12),
    Clip("animals/cat nap.mp4", (("grass", 4), ("cat", 5)), 40),
    Clip("kitchen/morning coffee.mp4", (("coffee", 7),), 3),
    Clip("kitchen/breakfast with the cat.mp4", (("coffee", 4), ("cat", 4), ("coffee", 3)), 5),
    Clip("space/launch pad.mp4", (("rocket", 8),), 200),
    Clip("space/crew portrait.mp4", (("astronaut", 6),), 210),
    Clip("space/deep field.mp4", (("galaxies", 9),), 220),
    Clip("space/mission film.mp4", (("astronaut", 4), ("rocket", 5), ("galaxies", 6)), 190),
    Clip("city/photographer.mp4", (("camera", 7),), 400),
    Clip("city/brick wall.mp4", (("bricks", 4),), 410),
    Clip("city/gravel path.mp4", (("gravel", 4),), 95),
    Clip("garden/lawn.mp4", (("grass", 5),), 60),
    Clip("laboratory/eye examination.mp4", (("retina", 6),), 500),
    Clip("drawn/red ball.mp4", (("ball", 6),), 1),
    Clip("drawn/starry night.mp4", (("stars", 8),), 2),
    Clip("drawn/sunset over the sea.mp4", (("sunset", 8),), 8),
    Clip("drawn/snowfall.mp4", (("snow", 7),), 15),
    Clip("drawn/evening, then night.mp4", (("sunset", 5), ("stars", 5)), 20),
    Clip("drawn/rain on a window.mp4", (("rain", 6),), 25),
)


def make_sample(
    folder: Path,
    clips: Sequence[Clip] = CLIPS,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Path]:
    """Write the clips that are not there yet; their paths."""
    paths = []
    for number, clip in enumerate(clips, 1):
        path = folder / clip.path
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as part:
                _write(part, _frames(clip))
                when = (datetime.now(UTC) - timedelta(days=clip.days_old)).timestamp()
                os.utime(part, (when, when))
        paths.append(path)
        on_progress(number, len(clips))
    return paths


def photograph(name: str) -> Image.Image:
    """A photograph of scikit-image."""
    found = importlib.util.find_spec("skimage")
    if found is None or found.origin is None:
        raise DataError(
            f"the sample videos are made of scikit-image's photographs: {install_command('demo')}"
        )
    photo = Image.open(Path(found.origin).parent / "data" / _PHOTOS[name])
    return ImageOps.colorize(photo.convert("L"), *_TINTS[name]) if name in _TINTS else photo.convert("RGB")


def _frames(clip: Clip) -> Iterator[Image.Image]:
    for number, (name, seconds) in enumerate(clip.parts):
        seed = sum(clip.path.encode()) + number
        scene = _pan(photograph(name), seed) if name in _PHOTOS else _DRAWN[name](random.Random(seed))
        total = round(seconds * FPS)
        for frame in range(total):
            yield scene(frame / max(1, total - 1))


def _write(path: Path, frames: Iterator[Image.Image]) -> None:
    import av

    with av.open(str(path), "w", format="mp4", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("libx264", rate=FPS, options={"preset": "ultrafast", "crf": "26"})
        stream.width, stream.height = SIZE
        stream.pix_fmt = "yuv420p"
        for image in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode(None))


# --- scenes -------------------------------------------------------------------------------------------------


def _pan(photo: Image.Image, seed: int) -> Scene:
    """The camera moves slowly across a photograph."""
    chance = random.Random(seed)
    scale = max(SIZE[0] / photo.width, SIZE[1] / photo.height) * 1.15
    large = photo.resize((round(photo.width * scale), round(photo.height * scale)), Image.Resampling.BICUBIC)
    room_x, room_y = large.width - SIZE[0], large.height - SIZE[1]
    from_x, to_x = chance.random(), chance.random()
    from_y, to_y = 0.2 * chance.random(), 0.5 * chance.random()  # faces are in the upper half

    def draw(time: float) -> Image.Image:
        eased = 0.5 - 0.5 * math.cos(math.pi * time)
        left = room_x * (from_x + (to_x - from_x) * eased)
        top = room_y * (from_y + (to_y - from_y) * eased)
        box = (left, top, left + SIZE[0], top + SIZE[1])
        return large.resize(SIZE, Image.Resampling.BILINEAR, box)

    return draw


def _ball(chance: random.Random) -> Scene:
    def draw(time: float) -> Image.Image:
        image = _sky((236, 240, 245), (205, 214, 226))
        pencil = ImageDraw.Draw(image)
        pencil.rectangle((0, 290, SIZE[0], SIZE[1]), fill=(150, 125, 96))
        x, height = 60 + 520 * time, abs(math.sin(time * 4 * math.pi)) * 200
        pencil.ellipse((x - 46, 288, x + 46, 306), fill=(122, 101, 77))
        pencil.ellipse((x - 46, 206 - height, x + 46, 298 - height), fill=(211, 38, 32))
        pencil.ellipse((x - 26, 220 - height, x - 2, 240 - height), fill=(240, 120, 110))
        return image

    return draw


def _stars(chance: random.Random) -> Scene:
    stars = [(chance.random(), chance.random() * 0.8, chance.random()) for _ in range(260)]
    hills = [chance.random() for _ in range(9)]

    def draw(time: float) -> Image.Image:
        image = _sky((6, 10, 34), (34, 42, 92))
        pencil = ImageDraw.Draw(image)
        for x, y, phase in stars:
            bright = int(150 + 105 * math.sin(8 * time + 6.3 * phase))
            at = ((x + 0.04 * time) % 1 * SIZE[0], y * SIZE[1])
            size = 1.2 + 1.6 * phase**6
            pencil.ellipse((at[0] - size, at[1] - size, at[0] + size, at[1] + size), fill=(bright,) * 3)
        pencil.ellipse((470, 48, 530, 108), fill=(244, 240, 214))
        points = [(i * SIZE[0] / 8, 285 + 50 * hill) for i, hill in enumerate(hills)]
        pencil.polygon([(0, 360), *points, (640, 360)], fill=(8, 10, 20))
        return image

    return draw


def _sunset(chance: random.Random) -> Scene:
    def draw(time: float) -> Image.Image:
        image = _sky((70, 60, 120), (255, 150, 70))
        pencil = ImageDraw.Draw(image)
        y = 120 + 90 * time
        pencil.ellipse((260, y - 60, 380, y + 60), fill=(255, 226, 140))
        pencil.rectangle((0, 220, 640, 360), fill=(36, 52, 92))
        for row in range(14):
            level = 226 + row * row * 0.7
            width = 40 + 9 * row + 14 * math.sin(time * 20 + row)
            pencil.line((320 - width, level, 320 + width, level), fill=(250, 176, 104), width=2 + row // 5)
        return image

    return draw


def _snow(chance: random.Random) -> Scene:
    flakes = [(chance.random(), chance.random(), 0.5 + chance.random()) for _ in range(220)]

    def draw(time: float) -> Image.Image:
        image = _sky((176, 190, 208), (226, 232, 240))
        pencil = ImageDraw.Draw(image)
        pencil.polygon(
            [(0, 270), (160, 250), (360, 280), (640, 246), (640, 360), (0, 360)], fill=(248, 250, 253)
        )
        for x, top in ((90, 120), (210, 150), (520, 104), (600, 170)):
            for step in range(4):
                width, y = 20 + 17 * step, top + 34 * step
                pencil.polygon([(x, y), (x - width, y + 52), (x + width, y + 52)], fill=(52, 88, 74))
                pencil.line((x - width, y + 52, x + width, y + 52), fill=(240, 245, 250), width=4)
        for across, down, speed in flakes:
            size = 1.5 + 2 * speed
            at_x = (across * SIZE[0] + 20 * math.sin(6 * time + 9 * down)) % SIZE[0]
            at_y = (down + time * speed) % 1 * SIZE[1]
            pencil.ellipse((at_x - size, at_y - size, at_x + size, at_y + size), fill=(255, 255, 255))
        return image

    return draw


def _rain(chance: random.Random) -> Scene:
    drops = [(chance.random(), chance.random(), 0.3 + chance.random()) for _ in range(130)]
    lights = [(chance.randrange(640), chance.randrange(60, 300), chance.randrange(20, 60)) for _ in range(16)]
    street = _sky((24, 32, 46), (44, 54, 70))
    pencil = ImageDraw.Draw(street)
    for x, y, size in lights:
        pencil.ellipse(
            (x - size, y - size, x + size, y + size),
            fill=chance.choice(((230, 170, 80), (200, 70, 60), (110, 150, 200))),
        )
    street = street.filter(ImageFilter.GaussianBlur(18))

    def draw(time: float) -> Image.Image:
        image = street.copy()
        pencil = ImageDraw.Draw(image)
        for x, y, speed in drops:
            at = (y + time * speed) % 1 * SIZE[1]
            left = x * SIZE[0]
            pencil.line((left, at - 26 * speed, left, at), fill=(170, 186, 205), width=2)
            pencil.ellipse((left - 3, at - 3, left + 3, at + 5), fill=(205, 216, 230))
        return image

    return draw


def _sky(top: tuple[int, int, int], bottom: tuple[int, int, int]) -> Image.Image:
    column = Image.linear_gradient("L").resize(SIZE)
    return ImageOps.colorize(column, top, bottom)


_DRAWN: dict[str, Callable[[random.Random], Scene]] = {
    "ball": _ball,
    "stars": _stars,
    "sunset": _sunset,
    "snow": _snow,
    "rain": _rain,
}
