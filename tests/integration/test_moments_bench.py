"""`gare bench moments`: the film is what it says, and known scenes come back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

from clips import steady, write_video
from gare.bench.planted_film import write_film
from gare.data.video import VideoReader
from warm import run_gare

COLOURS = {"red": (220, 20, 20), "green": (20, 200, 20), "blue": (20, 20, 220), "grey": (120, 120, 120)}


@pytest.fixture
def clips(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "clips").mkdir()
    (tmp_path / "parts").mkdir()
    times = steady(2)
    return {
        name: write_video(
            tmp_path / "clips" / f"{name}.mp4",
            times,
            pictures=[Image.new("RGB", (64, 48), colour)] * len(times),
        )
        for name, colour in COLOURS.items()
    }


def colour_at(reader: VideoReader, time: float) -> str:
    shown = reader.image_at(time)
    assert shown is not None
    middle = shown[1].getpixel((320, 180))
    return min(COLOURS, key=lambda name: sum(abs(a - b) for a, b in zip(COLOURS[name], middle, strict=True)))


def test_the_film_shows_each_planted_clip_once_where_it_says(clips: dict[str, Path], tmp_path: Path) -> None:
    planted, others = [clips["red"], clips["green"]], [clips["blue"], clips["grey"]]
    film = tmp_path / "film.mp4"
    scenes = write_film(film, planted, others, seconds=30, seed=0, folder=tmp_path / "parts")
    assert sorted(scene.clip.stem for scene in scenes) == ["green", "red"]
    with VideoReader(film) as reader:
        assert 30 <= reader.duration < 33
        seen = [colour_at(reader, second / 4 + 0.01) for second in range(4 * 30)]
    for scene in scenes:
        assert scene.end - scene.start == pytest.approx(2)
        shown = [number / 4 for number, colour in enumerate(seen) if colour == scene.clip.stem]
        assert min(shown) == pytest.approx(scene.start, abs=0.25)
        assert max(shown) == pytest.approx(scene.end, abs=0.3)


def test_known_scenes_come_back_first(shared: Path, tmp_path: Path) -> None:
    names = ["v_SoccerJuggling_g23_c01.avi", "video676.mp4", "WUzgd7C1pWA.mp4"]
    for name in [*names, "captions.csv"]:
        shutil.copy(shared / "data/clips" / name, tmp_path)
    done = run_gare("bench", "moments", tmp_path, "--planted", 2, "--minutes", 1.5, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["num_planted"], result["num_first"], result["num_among_ten"]) == (2, 2, 2)
    assert 90 <= result["film_s"] < 102
    assert result["times_as_fast"] == pytest.approx(result["film_s"] / result["index_s"])
    assert result["bytes_per_hour"] == pytest.approx(result["library_bytes"] * 3600 / result["film_s"])
    for scene in result["scenes"]:
        assert scene["rank"] == 1
        assert scene["start"] - 1 < scene["found_at"] < scene["end"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "does not exist"),
        (["."], "no video among"),
        (["clips"], "captions.csv cannot be read"),
        (["clips", "--captions", "wrong.csv"], "needs rows with the columns video and caption"),
        (["clips", "--captions", "few.csv", "--planted", "2"], "1 of 4 have a caption"),
    ],
)
def test_what_cannot_be_measured_is_explained(
    arguments: list[str], message: str, clips: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "wrong.csv").write_text("a,b\n1,2\n")
    (tmp_path / "few.csv").write_text("video,caption\nred.mp4,something red\n")
    given = [str(tmp_path / one) if "." in one or one in ("nowhere", "clips") else one for one in arguments]
    refused = run_gare("bench", "moments", *given)
    assert refused.returncode == 1
    assert message in refused.stderr.replace("\n", " ")
    assert "Traceback" not in refused.stderr
