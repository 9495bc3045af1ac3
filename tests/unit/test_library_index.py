"""Which files are met, what is to be done about them, and how they are cut."""

from __future__ import annotations

import builtins
import errno
import io
import os
import time
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from clips import read_number, steady, write_video
from gare.cli import index_command
from gare.data.decoder_messages import Alive, Facts, Failure
from gare.data.workers import Limits, WorkerPool
from gare.errors import ConfigError, LibraryError
from gare.library.index.content_hash import hash_file
from gare.library.index.extract import (
    MAX_STILL,
    STRIP_FRAME_WIDTH,
    Job,
    extract,
    make_pictures,
    make_strip,
)
from gare.library.index.extract_task import Extracted, ExtractTask, Segment
from gare.library.index.index_report import IndexProgress
from gare.library.index.plan import Known, check_roots, make_plan
from gare.library.index.scan import FoundFile, Scan, scan_folders
from gare.library.index.segment import Segmentation, ShotDetector, find_spans, parse_segmentation
from gare.library.store.stored_pictures import picture_at, split_pictures
from servers import HANG_S
from video_tree import FAILURES, GOOD, build_tree


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tree(tmp_path_factory.mktemp("walk") / "tree")


def names(found: Scan) -> list[str]:
    return [os.path.basename(file.path) for file in found.files]


def test_every_video_is_met_once_whatever_links_there_are(tree: Path) -> None:
    found = scan_folders([str(tree)])
    good = [file for file in found.files if "/broken/" not in file.path]
    assert len(good) == GOOD
    assert len(set(found.files)) == len(found.files)
    problems = {os.path.relpath(problem.path, tree): problem.kind for problem in found.problems}
    assert problems == {name: kind for name, kind in FAILURES.items() if kind in ("missing", "bad_name")}
    assert scan_folders([str(tree), str(tree / "broken"), str(tree / "web.webm")]) == found


def test_hidden_and_excluded_files_are_left_out(tree: Path) -> None:
    assert {"secret.avi", ".trash.avi"} <= set(names(scan_folders([str(tree)], hidden=True)))
    assert "old.avi" not in names(scan_folders([str(tree)], exclude=["*.avi"]))
    assert not any("2001" in file.path for file in scan_folders([str(tree)], exclude=["year 2001"]).files)
    assert not any(
        "/2002/00" in file.path for file in scan_folders([str(tree)], exclude=["year 2002/00"]).files
    )
    assert not any(
        "broken" in file.path for file in scan_folders([str(tree)], skip=[str(tree / "broken")]).files
    )


def test_first_bytes_decide_where_the_name_does_not(tree: Path) -> None:
    found = names(scan_folders([str(tree)]))
    assert {"no suffix", "stream.ts", "UPPER.MP4"} <= set(found)
    assert not {"program.ts", "README", "notes.txt"} & set(found)


def test_a_pipe_is_reported_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.mp4")
    os.mkfifo(tmp_path / "pipe")
    assert scan_folders([str(tmp_path)]) == Scan()
    assert [problem.kind for problem in scan_folders([str(tmp_path / "pipe.mp4")]).problems] == ["unreadable"]


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
    plan = make_plan(Scan(files), ledger, ["/v"], segmentation="whole")
    assert [file.path for file in plan.new] == ["/v/new"]
    assert {file.path for file in plan.changed} == {"/v/split", "/v/touched"}
    assert (plan.num_unchanged, plan.failed_before, plan.gone) == (1, ["/v/bad"], ["/v/gone"])
    again = make_plan(Scan(files), ledger, ["/v"], segmentation="whole", retry_failed=True)
    assert "/v/bad" in {file.path for file in again.changed}


def test_what_lies_in_a_folder_that_cannot_be_read_is_not_gone() -> None:
    from gare.library.index.scan import Problem

    found = Scan(problems=[Problem("/v/closed", "no_permission", "", is_folder=True)])
    plan = make_plan(found, {"/v/closed/a": known(), "/v/b": known()}, ["/v"], segmentation="whole")
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


def test_an_address_that_cannot_be_read_says_which_can() -> None:
    for source, message in {
        "http://host/videos": "cannot be read; give a folder, a video, file:///",
        "file://host/videos": "is on another machine, host",
    }.items():
        with pytest.raises(LibraryError, match=message):
            check_roots([source], {}, prune=False)


def test_a_folder_whose_name_looks_like_an_address_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a:" / "b").mkdir(parents=True)
    (tmp_path / "a:" / "b" / "c.mp4").touch()
    monkeypatch.chdir(tmp_path)
    assert check_roots(["a://b"], {}, prune=False).usable == [str(tmp_path / "a:" / "b")]


def test_content_is_the_bytes_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 3_000_000)
    (tmp_path / "b").write_bytes(b"x" * 3_000_000)
    (tmp_path / "c").write_bytes(b"x" * 2_999_999 + b"y")
    a, b, c = (hash_file(str(tmp_path / name)).content for name in "abc")
    assert a == b != c


def test_ways_to_split_are_read_and_others_refused() -> None:
    assert [str(parse_segmentation(text)) for text in ("whole", "shots", "auto", "window:7.50")] == [
        "whole",
        "shots",
        "auto",
        "window:7.5",
    ]
    for text in ("", "windows:3", "window", "window:0", "window:nan", "window:inf", "whole:3"):
        with pytest.raises(ConfigError, match="is not a segmentation"):
            parse_segmentation(text)


@pytest.mark.parametrize("duration", [0.5, 9.9, 10.0, 12.0, 13.0, 95.0, 3601.0])
def test_windows_cover_the_video_without_overlap(duration: float) -> None:
    spans = list(find_spans(Segmentation("window", 10), duration))
    assert spans[0][0] == 0
    assert spans[-1][1] == duration
    assert all(before[1] == after[0] for before, after in pairwise(spans))
    assert all(2.5 <= end - start <= 12.5 for start, end in spans) or len(spans) == 1


def test_long_files_are_cut_automatically() -> None:
    assert len(list(find_spans(Segmentation("auto"), 299))) == 1
    assert len(list(find_spans(Segmentation("auto"), 3600))) == 60


def read(path: Path, split: str = "whole", num_frames: int = 12) -> tuple[list[Segment], Facts | Failure]:
    task = ExtractTask(Job(str(path), parse_segmentation(split), num_frames, 32))
    messages = extract(task.item, task.open())
    taken = [task.take(message) for message in messages if not isinstance(message, Alive)]
    task.close()
    results: list[Extracted] = [result for result in taken if result is not None]
    stretches = [result for result in results if isinstance(result, Segment)]
    assert isinstance(results[-1], Facts | Failure)
    return stretches, results[-1]


def frame_numbers(stretch: Segment) -> list[int]:
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
    monkeypatch.setattr("gare.library.index.extract.MAX_ITEMS", 3)
    _, outcome = read(write_video(tmp_path / "a.mp4", steady(9)), "window:1")
    assert outcome == Failure("too_many_items", "it gives more than 3 items; use longer segments (--split)")


@pytest.mark.parametrize("split", ["whole", "window:2", "shots"])
def test_the_box_changes_nothing(tmp_path: Path, split: str) -> None:
    """Nothing can be imported in the box, and this process has imported everything: compare the two."""
    path = write_scenes(tmp_path / "a.mp4", [(3, "red"), (3, "blue"), (2, "green")])
    boxed: list[Any] = []
    with WorkerPool(extract, 1, task=ExtractTask, limits=Limits()) as pool:
        pool.submit(Job(str(path), parse_segmentation(split), 12, 32))
        while pool.unfinished:
            event = pool.next_event(HANG_S)
            assert event is not None
            assert event.lost is None
            boxed += [event.result] if event.result is not None else []
    segments, outcome = read(path, split)
    assert boxed.pop() == outcome
    assert isinstance(outcome, Facts)
    assert len(boxed) == len(segments) > 0
    for one, other in zip(boxed, segments, strict=True):
        assert (one.start, one.end, one.times) == (other.start, other.end, other.times)
        assert np.array_equal(one.pixels, other.pixels)
        assert (one.thumbnail, one.strip) == (other.thumbnail, other.strip)


def test_thumbnails_are_not_black() -> None:
    black, grey = Image.new("RGB", (640, 360)), Image.new("RGB", (640, 360), (90, 90, 90))
    scene = Image.linear_gradient("L").resize((640, 360)).convert("RGB")
    pictures = make_pictures([black, grey, scene, black])
    thumbnail = Image.open(io.BytesIO(pictures))  # an older gare takes it for one picture
    assert thumbnail.size == (320, 180)
    assert np.asarray(thumbnail.convert("L")).std() > 50
    strip = Image.open(io.BytesIO(make_strip([black, scene])))
    assert strip.size == (2 * STRIP_FRAME_WIDTH, 54)
    assert len(split_pictures(make_pictures([black]))) == 2  # nothing else to show


def test_every_frame_has_a_picture_of_its_own() -> None:
    shades = [Image.new("RGB", (360, 640), (shade, shade, shade)) for shade in (0, 80, 160, 240)]
    pictures = make_pictures(shades)
    assert len(split_pictures(pictures)) == 5
    times = [0.0, 1.0, 2.5, 4.0]
    for moment, shade in ((0.0, 0), (0.9, 0), (1.0, 80), (2.4996, 160), (3.9, 160), (99.0, 240)):
        shown = Image.open(io.BytesIO(picture_at(pictures, times, moment)))
        assert shown.size == (144, 256)
        assert shown.getpixel((10, 10)) == pytest.approx((shade, shade, shade), abs=3)


def test_a_row_with_one_picture_shows_that_one() -> None:
    first = split_pictures(make_pictures([Image.new("RGB", (32, 18), "red")]))[0]
    assert picture_at(first, [0.0, 1.0], 1.0) == first
    assert picture_at(first + first, [0.0, 1.0], 1.0) == first  # and one whose pictures are not of its frames


@pytest.mark.parametrize(
    ("split", "most"), [("auto", 0), ("window:1", 0), ("window:300", MAX_STILL + 1), ("shots", 3)]
)
def test_a_small_file_that_claims_to_last_for_weeks_is_refused_before_it_costs(
    tmp_path: Path, split: str, most: int
) -> None:
    path = write_video(tmp_path / "a.mkv", [0.0, 0.1, 2_900_000.0])
    assert path.stat().st_size < 8192
    begun = time.process_time()
    segments, outcome = read(path, split)
    assert time.process_time() - begun < 30
    assert len(segments) <= most
    assert split == "shots" or (isinstance(outcome, Failure) and outcome.kind == "too_many_items")


def test_a_small_file_with_millions_of_frames_in_its_index_is_refused_before_they_are_read(
    tmp_path: Path,
) -> None:
    path = write_video(tmp_path / "a.mp4", steady(2))
    content, many = bytearray(path.read_bytes()), (300_000).to_bytes(4, "big")
    for box, place, value in (
        (b"stts", 12, many),  # so many frames of equal duration,
        (b"stsz", 8, (1).to_bytes(4, "big")),  # of one byte each,
        (b"stsz", 12, many),
        (b"stsc", 16, many),  # all in one chunk
    ):
        at = content.index(box) + place
        content[at : at + 4] = value
    path.write_bytes(content)
    for split in ("whole", "shots"):
        segments, outcome = read(path, split)
        assert segments == []
        assert isinstance(outcome, Failure)
        assert outcome.kind == "corrupt"
        assert "more frames than it has bytes" in outcome.message


def test_too_many_items_are_known_before_one_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gare.library.index.extract.MAX_ITEMS", 3)
    segments, outcome = read(write_video(tmp_path / "a.mp4", steady(9)), "window:1")
    assert segments == []
    assert isinstance(outcome, Failure)


def test_out_of_memory_is_not_damage() -> None:
    import av

    from gare.data.decoder import Decoder

    def fail() -> None:
        raise av.error.MemoryError(errno.ENOMEM, "Cannot allocate memory")

    stream = SimpleNamespace(start_time=0, time_base=Fraction(1, 1000), average_rate=25)
    container = SimpleNamespace(demux=lambda _: iter([SimpleNamespace(decode=fail)]))
    with pytest.raises(MemoryError):
        Decoder(container, stream, av, may_seek=True)  # type: ignore[arg-type]


def test_a_decoder_that_does_not_fit_into_memory_is_not_a_missing_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gare.data.decoder import import_av

    real = builtins.__import__

    def refuse_av(name: str, *rest: Any, **more: Any) -> Any:
        if name == "av":
            raise ImportError("libavcodec.so.61: failed to map segment from shared object")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse_av)
    with pytest.raises(MemoryError, match="not enough memory"):
        import_av()


def test_a_name_does_not_write_to_the_terminal_through_the_progress_line(monkeypatch):
    monkeypatch.setattr(index_command, "_LINE_EVERY_S", 0.0)
    out = io.StringIO()
    with index_command._show_progress(Console(file=out, width=200)) as show:
        show(IndexProgress(1, 2, 0, "/films/new\nline\x1b[31m.mp4", at=3.0))
        show(IndexProgress(2, 2, 0, "/fi\rlms/a.mp4"))
    assert [line.rpartition("in ")[2] for line in out.getvalue().splitlines()] == [
        r"new\nline\x1b[31m.mp4 at 0:00:03",
        r"/fi\rlms",
    ]
