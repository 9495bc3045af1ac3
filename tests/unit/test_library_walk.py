"""Which files are met, what is to be done about them, and how they are cut."""

from __future__ import annotations

import io
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clips import read_number, steady, write_video
from gare.errors import ConfigError, LibraryError
from gare.library.content import hash_file
from gare.library.extract import Facts, Failure, Job, Stretch, extract
from gare.library.plan import Known, check_roots, make_plan
from gare.library.shots import ShotDetector
from gare.library.splitting import Split, find_spans, parse_split
from gare.library.thumbnails import STRIP_FRAME_WIDTH, make_strip, make_thumbnail
from gare.library.walk import FoundFile, Walk, walk
from video_tree import FAILURES, GOOD, build_tree


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tree(tmp_path_factory.mktemp("walk") / "tree")


def names(walked: Walk) -> list[str]:
    return [os.path.basename(file.path) for file in walked.files]


def test_every_video_is_met_once_whatever_links_there_are(tree: Path) -> None:
    walked = walk([str(tree)])
    good = [file for file in walked.files if "/broken/" not in file.path]
    assert len(good) == GOOD
    assert len(set(walked.files)) == len(walked.files)
    problems = {os.path.relpath(problem.path, tree): problem.kind for problem in walked.problems}
    assert problems == {name: kind for name, kind in FAILURES.items() if kind in ("missing", "bad_name")}
    assert walk([str(tree), str(tree / "broken"), str(tree / "web.webm")]) == walked


def test_hidden_and_excluded_files_are_left_out(tree: Path) -> None:
    assert {"secret.avi", ".trash.avi"} <= set(names(walk([str(tree)], hidden=True)))
    assert "old.avi" not in names(walk([str(tree)], exclude=["*.avi"]))
    assert not any("2001" in file.path for file in walk([str(tree)], exclude=["year 2001"]).files)
    assert not any("/2002/00" in file.path for file in walk([str(tree)], exclude=["year 2002/00"]).files)
    assert not any("broken" in file.path for file in walk([str(tree)], skip=[str(tree / "broken")]).files)


def test_first_bytes_decide_where_the_name_does_not(tree: Path) -> None:
    found = names(walk([str(tree)]))
    assert {"no suffix", "stream.ts", "UPPER.MP4"} <= set(found)
    assert not {"program.ts", "README", "notes.txt"} & set(found)


def test_a_pipe_is_reported_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.mp4")
    os.mkfifo(tmp_path / "pipe")
    assert walk([str(tmp_path)]) == Walk()
    assert [problem.kind for problem in walk([str(tmp_path / "pipe.mp4")]).problems] == ["unreadable"]


def known(state: str = "indexed", kind: str = "", split: str = "whole") -> Known:
    return Known(10, 20, "c", state, kind, split)


def test_the_plan_names_what_is_new_changed_failed_and_gone() -> None:
    files = [FoundFile(f"/v/{name}", 10, 20) for name in ("same", "new", "split", "bad")]
    files.append(FoundFile("/v/touched", 10, 21))
    ledger = {
        "/v/same": known(),
        "/v/split": known(split="shots"),
        "/v/bad": known("failed", "corrupt"),
        "/v/touched": known(),
        "/v/gone": known(),
        "/elsewhere/gone": known(),
    }
    plan = make_plan(Walk(files), ledger, ["/v"], split="whole")
    assert [file.path for file in plan.new] == ["/v/new"]
    assert {file.path for file in plan.changed} == {"/v/split", "/v/touched"}
    assert (plan.num_unchanged, plan.failed_before, plan.gone) == (1, ["/v/bad"], ["/v/gone"])
    again = make_plan(Walk(files), ledger, ["/v"], split="whole", retry_failed=True)
    assert "/v/bad" in {file.path for file in again.changed}


def test_what_lies_in_a_folder_that_cannot_be_read_is_not_gone() -> None:
    from gare.library.walk import Problem

    walked = Walk(problems=[Problem("/v/closed", "no_permission", "", is_folder=True)])
    plan = make_plan(walked, {"/v/closed/a": known(), "/v/b": known()}, ["/v"], split="whole")
    assert plan.gone == ["/v/b"]


def test_a_root_that_is_suddenly_empty_is_skipped(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    with pytest.raises(LibraryError, match="does not exist"):
        check_roots([str(root)], {}, prune=False)
    ledger = {f"{root}/a.mp4": known()}
    assert "not there" in check_roots([str(root)], ledger, prune=False).skipped[str(root)]
    root.mkdir()
    assert "--prune" in check_roots([str(root)], ledger, prune=False).skipped[str(root)]
    assert check_roots([str(root)], ledger, prune=True).usable == [str(root)]
    (root / "b.txt").touch()
    assert check_roots([str(root)], ledger, prune=False).usable == [str(root)]


def test_content_is_the_bytes_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 3_000_000)
    (tmp_path / "b").write_bytes(b"x" * 3_000_000)
    (tmp_path / "c").write_bytes(b"x" * 2_999_999 + b"y")
    assert hash_file(str(tmp_path / "a")) == hash_file(str(tmp_path / "b")) != hash_file(str(tmp_path / "c"))


def test_ways_to_split_are_read_and_others_refused() -> None:
    assert [str(parse_split(text)) for text in ("whole", "shots", "auto", "window:7.50")] == [
        "whole",
        "shots",
        "auto",
        "window:7.5",
    ]
    for text in ("", "windows:3", "window", "window:0", "window:nan", "window:inf", "whole:3"):
        with pytest.raises(ConfigError, match="way to split"):
            parse_split(text)


@pytest.mark.parametrize("duration", [0.5, 9.9, 10.0, 12.0, 13.0, 95.0, 3601.0])
def test_windows_cover_the_video_without_overlap(duration: float) -> None:
    spans = list(find_spans(Split("window", 10), duration))
    assert spans[0][0] == 0
    assert spans[-1][1] == duration
    assert all(before[1] == after[0] for before, after in pairwise(spans))
    assert all(2.5 <= end - start <= 12.5 for start, end in spans) or len(spans) == 1


def test_long_files_are_cut_automatically() -> None:
    assert len(list(find_spans(Split("auto"), 299))) == 1
    assert len(list(find_spans(Split("auto"), 3600))) == 60


def read(path: Path, split: str = "whole", num_frames: int = 12) -> tuple[list[Stretch], Facts | Failure]:
    results = list(extract(Job(str(path), parse_split(split), num_frames, 32)))
    stretches = [result for result in results if isinstance(result, Stretch)]
    assert isinstance(results[-1], Facts | Failure)
    return stretches, results[-1]


def frame_numbers(stretch: Stretch) -> list[int]:
    strip = Image.open(io.BytesIO(stretch.strip))
    boxes = [(x, 0, x + STRIP_FRAME_WIDTH, strip.height) for x in range(0, strip.width, STRIP_FRAME_WIDTH)]
    return [read_number(strip.crop(box)) for box in boxes]


def test_a_whole_file_gives_the_frames_a_model_is_trained_on(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mp4", steady(30), size=(320, 240))
    (stretch,), facts = read(path, num_frames=4)
    assert facts == Facts(30.0, 320, 240)
    assert (stretch.start, stretch.end, stretch.times) == (0.0, 30.0, (0.0, 9.0, 19.0, 29.0))
    assert frame_numbers(stretch) == [0, 90, 190, 290]
    assert stretch.pixels.shape == (4, 32, 32, 3)
    assert stretch.pixels.dtype == np.uint8


def test_windows_have_their_own_frames_and_times(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mp4", steady(25), size=(320, 240))
    stretches, _ = read(path, "window:10", num_frames=2)
    assert [(s.start, s.end, s.times) for s in stretches] == [
        (0.0, 10.0, (0.0, 9.0)),
        (10.0, 20.0, (10.0, 19.0)),
        (20.0, 25.0, (20.0, 24.0)),
    ]
    assert [frame_numbers(s) for s in stretches] == [[0, 90], [100, 190], [200, 240]]


def write_scenes(path: Path, scenes: list[tuple[float, str]]) -> Path:
    """Plain colours with a stripe that wanders, for so many seconds each."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=10)
        stream.width, stream.height, stream.pix_fmt = 128, 96, "yuv420p"
        for seconds, colour in scenes:
            for step in range(round(seconds * 10)):
                image = Image.new("RGB", (128, 96), colour)
                image.paste("white", (step % 128, 0, step % 128 + 8, 96))
                container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode(None))
    return path


def test_shots_begin_where_the_picture_changes(tmp_path: Path) -> None:
    scenes = [(5, "red"), (3, "blue"), (1, "black"), (6, "green"), (70, "navy")]
    path = write_scenes(tmp_path / "a.mp4", scenes)
    stretches, _ = read(path, "shots")
    starts = [stretch.start for stretch in stretches]
    # The black second is shorter than a shot may be: its end is the next cut, or it goes with its neighbour.
    assert starts[:3] == pytest.approx([0, 5, 8], abs=0.3)
    assert starts[-2:] == pytest.approx([15, 75], abs=0.6)
    assert [a.end for a in stretches[:-1]] == starts[1:]
    assert stretches[-1].end == pytest.approx(85, abs=0.2)
    assert all(s.start <= time < s.end for s in stretches for time in s.times)
    assert all(1 <= len(stretch.times) <= 12 for stretch in stretches)


def test_one_take_is_one_shot_however_busy(tmp_path: Path) -> None:
    detector = ShotDetector()
    generator = np.random.default_rng(0)
    noise = (Image.fromarray(generator.integers(0, 255, (96, 128, 3), dtype=np.uint8)) for _ in range(60))
    assert [detector.begins(index / 4, image) for index, image in enumerate(noise)] == [True] + 59 * [False]


@pytest.mark.parametrize("split", ["window:5", "shots"])
def test_a_duration_that_is_a_lie_ends_where_the_frames_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str
) -> None:
    path = write_video(tmp_path / "a.mp4", steady(12))
    monkeypatch.setattr("gare.data.video.find_duration", lambda *_: 1e9)
    stretches, facts = read(path, split)
    assert isinstance(facts, Facts)
    assert [stretch.start for stretch in stretches][:3] == ([0, 5, 10] if split == "window:5" else [0])
    assert max(time for stretch in stretches for time in stretch.times) < 12


def test_a_file_that_gives_too_many_items_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gare.library.extract.MAX_ITEMS", 3)
    _, outcome = read(write_video(tmp_path / "a.mp4", steady(9)), "window:1")
    assert outcome == Failure("too_many_items", "it gives more than 3 items; split it less finely")


def test_thumbnails_are_not_black() -> None:
    black, grey = Image.new("RGB", (640, 360)), Image.new("RGB", (640, 360), (90, 90, 90))
    scene = Image.linear_gradient("L").resize((640, 360)).convert("RGB")
    thumbnail = Image.open(io.BytesIO(make_thumbnail([black, grey, scene, black])))
    assert thumbnail.size == (320, 180)
    assert np.asarray(thumbnail.convert("L")).std() > 50
    strip = Image.open(io.BytesIO(make_strip([black, scene])))
    assert strip.size == (2 * STRIP_FRAME_WIDTH, 54)
    assert make_thumbnail([black])  # nothing else to show
