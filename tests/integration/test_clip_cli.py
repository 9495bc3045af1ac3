"""`gare clip` and `gare search --out` on a library of five films."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import warnings
from pathlib import Path

import av
import pytest

from clips import read_number, write_film
from gare.library.library import Library
from serve_library import save_tiny_model
from warm import run_gare as run

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its plugins
    import opentimelineio as otio

NAMES = ("one.mp4", "two [draft].mp4", "three\nlines.mp4", "four; five.mov", "$(six).mkv")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("films")
    for number, name in enumerate(NAMES):
        (folder / "videos").mkdir(exist_ok=True)
        write_film(folder / "videos" / name, 96 + 24 * number)
    with Library.open(folder / "library", model=save_tiny_model(folder / "model")) as opened:
        opened.index(folder / "videos")
        assert len(opened) == len(NAMES)
    return folder / "library"


@pytest.fixture(scope="module")
def film(library: Path) -> Path:
    return library.parent / "videos" / "one.mp4"


def search(library: Path, *arguments: object) -> list[dict]:
    result = run("search", "a film", "--library", str(library), "--top", "5", "--json", *map(str, arguments))
    return json.loads(result.stdout)


def first_number(path: Path) -> int:
    with av.open(str(path)) as container:
        return read_number(next(container.decode(video=0)).to_image())


def test_a_part_of_a_file(film, tmp_path):
    result = run("clip", str(film), "--start", "0:01.5", "--end", "3", "--out", str(tmp_path))
    assert result.returncode == 0, result.stderr
    (clip,) = tmp_path.iterdir()
    assert clip.name == "one_0-00-01.500_0-00-03.000.mp4"
    assert result.stdout.startswith(f"{clip}  0:00:00.960 to ")
    assert "begins 0.54 s before the start, at a keyframe" in result.stdout
    assert first_number(clip) == 24


def test_an_exact_part_into_a_file(film, tmp_path):
    target = tmp_path / "scene.mp4"
    arguments = ("clip", str(film), "--start", "1.6", "--end", "3", "--exact", "--out", str(target), "--json")
    result = run(*arguments)
    assert result.returncode == 0, result.stderr
    (row,) = json.loads(result.stdout)
    assert row == {
        "path": str(target),
        "source": str(film),
        "id": "",
        "asked": [1.6, 3.0],
        "start": 1.6,
        "end": 3.0,
        "frames": 35,
        "bytes": target.stat().st_size,
    }
    assert first_number(target) == 40
    before = target.read_bytes()
    again = run(*arguments)
    assert again.returncode == 1
    assert "nothing is overwritten" in again.stderr
    assert target.read_bytes() == before


def test_the_hits_of_words(library, tmp_path):
    options = ("--library", str(library), "--top", "5", "--length", "2", "--out", str(tmp_path / "clips"))
    result = run("clip", "a film", *options, "--json")
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)
    hits = search(library)
    assert [row["id"] for row in rows] == [hit["id"] for hit in hits]
    for row, hit in zip(rows, hits, strict=True):
        start, end = row["asked"]
        assert end - start == pytest.approx(2)
        assert hit["start"] <= start <= hit["moment"] <= end <= hit["end"]
        assert row["start"] <= start + 0.001
        assert Path(row["path"]).parent == tmp_path / "clips"
    assert len(list((tmp_path / "clips").iterdir())) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["clips"]


def test_an_item(library, tmp_path):
    hit = search(library)[0]
    result = run("clip", hit["id"], "--library", str(library), "--out", str(tmp_path), "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)[0]["source"] == hit["path"]
    result = run(
        "clip", hit["id"], "--library", str(library), "--start", "1", "--end", "2", "--out", str(tmp_path)
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["FILM"], "--start and --end"),
        (["FILM", "--start", "x", "--end", "2"], "is no time"),
        (["FILM", "--start", "2", "--end", "1"], "later end"),
        (["none.mp4", "--start", "1", "--end", "2"], "there is no file"),
        (["none.mp4"], "there is no file 'none.mp4'; name one"),
        (["./two words.mp4"], "there is no file"),
        (["a film", "--start", "1"], "both --start and --end"),
        (["0" * 20], "no item"),
        (["a film", "--top", "2", "--out", "OUT/x.mp4"], "one file"),
        (["FILM", "--start", "90", "--end", "91"], "no picture"),
    ],
)
def test_mistakes_are_named(library, film, tmp_path, arguments, message):
    given = [each.replace("FILM", str(film)).replace("OUT", str(tmp_path)) for each in arguments]
    result = run("clip", *given, "--library", str(library), cwd=tmp_path)
    assert result.returncode == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_changed_is_not_cut(tmp_path):
    film = write_film(tmp_path / "videos.mp4", 50)
    with Library.open(tmp_path / "library", model=save_tiny_model(tmp_path / "model")) as opened:
        opened.index(film)
    os.utime(film, (1e9, 1e9))
    result = run("clip", "a film", "--library", str(tmp_path / "library"), "--out", str(tmp_path / "clips"))
    assert result.returncode == 1
    assert "changed after it was indexed" in result.stderr


def ranges(timeline: otio.schema.Timeline) -> list[tuple[float, float]]:
    found = [clip.source_range for clip in timeline.tracks[0].find_clips()]
    return [(part.start_time.value, part.duration.value) for part in found]


def test_lists_for_editors_are_read_back_with_the_same_ranges(library, tmp_path):
    """Lengths of whole seconds: OpenTimelineIO's reader of FCPXML rounds some others a frame down."""
    hits = search(library)
    for name in ("edl", "fcpxml", "otio"):
        path = tmp_path / f"hits.{name}"
        result = run("search", "a film", "--library", str(library), "--top", "5", "--out", str(path))
        assert result.returncode == 0, result.stderr
        assert result.stdout == f"{path}: 5 hits\n"
    expected = [(round(25 * hit["start"]), round(25 * (hit["end"] - hit["start"]))) for hit in hits]
    assert sorted(expected) == [(0, 96), (0, 120), (0, 144), (0, 168), (0, 192)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        edl = otio.adapters.read_from_file(str(tmp_path / "hits.edl"), "cmx_3600", rate=25)
        fcpxml = otio.adapters.read_from_string((tmp_path / "hits.fcpxml").read_text(), "fcpx_xml")
    timeline = otio.adapters.read_from_file(str(tmp_path / "hits.otio"))
    assert ranges(edl) == ranges(fcpxml) == ranges(timeline) == expected
    assert [track.name for track in edl.tracks] == ["V", "A1", "A2"]
    assert [track.kind for track in timeline.tracks] == ["Video", "Audio"]


def test_lists_of_seconds(library, tmp_path):
    hits = search(library)

    def listed(name: str) -> str:
        result = run("search", "a film", "--library", str(library), "--top", "5", "--format", name)
        assert result.returncode == 0, result.stderr
        return result.stdout

    rows = list(csv.DictReader(io.StringIO(listed("csv"), newline="")))
    assert [(row["path"], float(row["start"]), row["id"]) for row in rows] == [
        (hit["path"], hit["start"], hit["id"]) for hit in hits
    ]
    playlist = listed("m3u8")
    assert len(re.findall("^file:///", playlist, re.MULTILINE)) == 5
    assert len(playlist.splitlines()) == 2 + 4 * 5
    assert listed("mpv").startswith("# mpv EDL v0\n")
    assert listed("chapters").count("[CHAPTER]") == listed("webvtt").count("-->") == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "avi"], "is no format"),
        (["--out", "hits.txt"], "--format"),
        (["--out", "hits.csv", "--json"], "leave out --json"),
        (["--out", "taken.csv"], "nothing is overwritten"),
        (["--out", "none/hits.csv"], "cannot be written"),
    ],
)
def test_mistakes_with_lists_are_named(library, tmp_path, arguments, message):
    (tmp_path / "taken.csv").write_text("mine")
    result = run("search", "a film", "--library", str(library), *arguments, cwd=tmp_path)
    assert result.returncode == 1
    assert message in result.stderr
    assert (tmp_path / "taken.csv").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_file_that_is_gone_is_left_out_of_a_cut_list_and_said(tmp_path):
    (tmp_path / "videos").mkdir()
    for name, num_frames in {"here.mp4": 50, "gone.mp4": 60}.items():
        write_film(tmp_path / "videos" / name, num_frames)
    with Library.open(tmp_path / "library", model=save_tiny_model(tmp_path / "model")) as opened:
        opened.index(tmp_path / "videos")
    (tmp_path / "videos" / "gone.mp4").unlink()
    result = run("search", "a film", "--library", str(tmp_path / "library"), "--format", "edl")
    assert result.returncode == 0, result.stderr
    assert "left out: " in result.stderr
    assert "here.mp4" in result.stdout
    assert "gone.mp4" not in result.stdout
