"""A library to serve: a dozen small real videos that look different, made by a tiny model."""

from __future__ import annotations

import colorsys
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import av
import torch
from PIL import Image, ImageDraw

from gare import GARE, GareConfig
from gare.library.library import Library

COLOURS = ("red", "orange", "yellow", "lime", "green", "teal", "azure", "blue", "violet", "pink")


@dataclass(frozen=True)
class Served:
    videos: Path
    library: Path
    model: Path


def save_tiny_model(folder: Path) -> Path:
    torch.manual_seed(0)
    model = GARE(GareConfig.load({"encoder": {"name": "tiny"}, "temporal": {"num_layers": 2}})).eval()
    model.save_pretrained(folder)
    return folder


def make_videos(folder: Path) -> Path:
    """Ten colours in two folders, each changing its shade once; one file is no video."""
    for number, name in enumerate(COLOURS):
        target = folder / ("warm" if number < 5 else "cold")
        target.mkdir(parents=True, exist_ok=True)
        path = target / f"{name}.mp4"
        write_colour(path, number / len(COLOURS), seconds=2 + 2 * number)
        when = datetime(2020 + number, 6, 1, tzinfo=UTC).timestamp()
        os.utime(path, (when, when))
    (folder / "broken.mp4").write_bytes(b"this is no video at all")
    return folder


def write_colour(path: Path, hue: float, *, seconds: float, size: tuple[int, int] = (160, 90)) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=4)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        total = int(4 * seconds)
        for number in range(total):
            light = 0.9 if number < total / 2 else 0.5
            rgb = tuple(int(255 * part) for part in colorsys.hsv_to_rgb(hue, 0.8, light))
            image = Image.new("RGB", size, rgb)
            x = size[0] * number / total
            ImageDraw.Draw(image).ellipse((x - 12, 30, x + 12, 54), fill="white")
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode(None))


FILM_COLOURS = ("red", "green", "blue", "red", "yellow", "blue", "green", "black")
"""The scenes of the film, twelve seconds each."""
SCENE_S = 12


def write_film(path: Path, *, size: tuple[int, int] = (160, 90)) -> None:
    """A file that is long enough to have moments: one colour after the other, a white ball in each."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=4, options={"g": "8"})
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for colour in FILM_COLOURS:
            for number in range(4 * SCENE_S):
                image = Image.new("RGB", size, colour)
                x = size[0] * number / (4 * SCENE_S)
                ImageDraw.Draw(image).ellipse((x - 12, 30, x + 12, 54), fill="white")
                container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode(None))


def make_film_library(folder: Path) -> Served:
    """A film, an upright clip and a still, indexed by default: in moments."""
    torch.manual_seed(0)
    model = GARE(GareConfig.load({"encoder": {"name": "tiny"}, "temporal": {"num_layers": 0}})).eval()
    model.save_pretrained(folder / "model")
    videos = folder / "videos"
    videos.mkdir(parents=True)
    write_film(videos / "film.mp4")
    write_colour(videos / "upright.mp4", 0.3, seconds=5, size=(90, 160))
    write_colour(videos / "still.mp4", 0.6, seconds=0.25)
    with Library.open(folder / "library", model=folder / "model") as library:
        library.index(videos)
    return Served(videos, folder / "library", folder / "model")


def make_served(folder: Path, *, index: bool = True) -> Served:
    model = save_tiny_model(folder / "model")
    videos = make_videos(folder / "videos")
    with Library.open(folder / "library", model=model) as library:
        if index:
            library.index(videos)
    return Served(videos, folder / "library", model)
