"""What a demanding newcomer tripped over: odd names, odd numbers, interruptions, and a library that grows."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

import gare
from clips import steady, write_video
from gare.errors import CheckpointError, LibraryError, QueryError
from gare.library.index.content_hash import HashQueue
from gare.library.index.index_run import IndexOptions
from gare.library.index.scan import FoundFile
from gare.library.search.stage1 import DEFAULT_CANDIDATES
from servers import HANG_S, wait_until
from warm import WarmProcess
from warm import run_gare as command

ODD_FOLDER = "odd ["
ODD_NAME = "b].mp4"
"""Together `[/b]`, which would be taken for the end of something bold, and fail."""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = {"encoder": {"name": "tiny"}, "temporal": {"num_layers": 1}}
    folder = tmp_path_factory.mktemp("model")
    gare.GARE(gare.GareConfig.load(config)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("videos")
    for number in range(4):
        write_video(root / f"v{number}.mp4", steady(2 + number, fps=3 + number))
    (root / ODD_FOLDER).mkdir()
    write_video(root / ODD_FOLDER / ODD_NAME, steady(2.5))
    write_video(root / "x.mp4", steady(2.7)).rename(root / "line\nbreak \x1b[31m[red].mp4")
    return root


@pytest.fixture
def library(model_folder: Path, videos: Path, tmp_path: Path) -> gare.Library:
    library = gare.Library.open(tmp_path / "library", model=model_folder)
    library.index(videos, options=IndexOptions(num_workers=2))
    return library


def test_names_are_shown_whole_and_harmless(library: gare.Library, videos: Path) -> None:
    """Square brackets are no markup, control characters reach no terminal, and a hit is a line."""
    shown = command("search", "a dog", "--library", library.store.uri)
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert len(lines) == 1 + len(library)
    assert any(line.rstrip().endswith(f"{ODD_FOLDER}/{ODD_NAME}") for line in lines)
    assert any(line.rstrip().endswith(r"line\nbreak \x1b[31m[red].mp4") for line in lines)
    assert "\x1b" not in shown.stdout
    piped = command("search", "a dog", "--library", library.store.uri, "--print0")
    assert set(piped.stdout.split("\0")[:-1]) == {str(file) for file in videos.rglob("*.mp4")}


@pytest.mark.parametrize(
    "arguments",
    [
        ("index", "~nobody-of-this-name"),
        ("index", "x" * 5000),
        ("index", ".", "--memory", "inf"),
        ("index", ".", "--seconds", "inf"),
        ("search", "dog", "--library", "x" * 5000),
    ],
    ids=["home", "long", "memory", "seconds", "library"],
)
def test_nonsense_gives_a_message(arguments: tuple[str, ...]) -> None:
    refused = command(*arguments)
    assert refused.returncode in (1, 2)
    assert refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_library_whose_making_was_cut_short_is_said_and_mended(model_folder: Path, tmp_path: Path) -> None:
    """As after a disk that was full: the facts are there, a table is not, and nothing was stored yet."""
    place = tmp_path / "library"
    gare.Library.open(place, model=model_folder).close()
    shutil.rmtree(place / "items.lance")
    with pytest.raises(LibraryError, match="run 'gare index' again"):
        gare.Library.open(place, read_only=True)
    assert len(gare.Library.open(place)) == 0


def test_a_library_that_lost_its_items_is_not_taken_for_an_empty_one(library: gare.Library) -> None:
    place = Path(library.store.uri)
    library.close()
    shutil.rmtree(place / "items.lance")
    for read_only in (True, False):
        with pytest.raises(LibraryError, match=r"items\.lance is gone"):
            gare.Library.open(place, read_only=read_only)


def test_odd_searches_are_refused(library: gare.Library, videos: Path, tmp_path: Path) -> None:
    with pytest.raises(QueryError, match="min_score"):
        library.search("dog", min_score=math.nan)
    with pytest.raises(QueryError, match="not a file"):
        library.search(image=videos)
    os.mkfifo(tmp_path / "pipe.jpg")
    with pytest.raises(QueryError, match="not a file"):
        library.search(image=tmp_path / "pipe.jpg")
    with pytest.raises(QueryError, match="name a video"):
        library.describe(["a dog"])


def test_an_empty_tag_is_refused(library: gare.Library, videos: Path) -> None:
    """No filter could ask for it."""
    with pytest.raises(LibraryError, match="tag is empty"):
        library.index(videos, options=IndexOptions(tags=("fine", " ")))


def test_like_finds_another_even_with_one_candidate(library: gare.Library) -> None:
    item = library.search("a dog", top=1)[0].id
    (hit,) = library.search(like=item, top=1, candidates=1)
    assert hit.id != item


def test_a_moment_lies_within_its_stretch(model_folder: Path, tmp_path: Path) -> None:
    """Frames appear every 0.7 s, so that the one shown when a window begins is older than the window."""
    (tmp_path / "videos").mkdir()
    write_video(tmp_path / "videos" / "slow.mp4", [0.7 * number for number in range(18)])
    library = gare.Library.open(tmp_path / "library", model=model_folder)
    library.index(tmp_path / "videos", options=IndexOptions(split="window:3", num_workers=1))
    hits = [hit for query in ("a", "b", "c") for hit in library.search(query)]
    assert any(hit.frame_times[0] < hit.start for hit in hits)
    assert all(hit.start <= hit.moment <= hit.end for hit in hits)


def test_copies_do_not_spoil_the_audit(model_folder: Path, videos: Path, tmp_path: Path) -> None:
    """Thirty copies score the same; whichever ten of them stage 1 finds first are right."""
    (tmp_path / "videos").mkdir()
    for number in range(30):
        shutil.copy(videos / "v1.mp4", tmp_path / "videos" / f"{number}.mp4")
    library = gare.Library.open(tmp_path / "library", model=model_folder)
    library.index(tmp_path / "videos", options=IndexOptions(num_workers=1))
    result = library.audit()
    assert result.ks[0] == 10
    assert result.coverage[0] == result.index_coverage == 1.0


def test_an_audit_is_outgrown(library: gare.Library, videos: Path, tmp_path: Path) -> None:
    few = library.audit().candidates
    assert library.default_candidates == few < DEFAULT_CANDIDATES
    for number in range(10):
        shutil.copy(videos / "v0.mp4", tmp_path / f"copy {number}.mp4")
    library.index(*sorted(tmp_path.glob("copy *.mp4")))
    assert library.default_candidates == DEFAULT_CANDIDATES


def test_a_folder_that_stays_closed_is_no_news(
    library: gare.Library, videos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The superuser may read every folder, so that the system's refusal is made up here."""
    scandir = os.scandir

    def refuse(path: str):
        if os.path.basename(path) == ODD_FOLDER:
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    report = library.index(videos)
    assert [failure.is_folder for failure in report.failures] == [True]
    assert (report.deleted, report.did_something) == (0, False)


def test_a_file_from_the_future_settles(library: gare.Library, videos: Path, tmp_path: Path) -> None:
    file = Path(shutil.copy(videos / "v2.mp4", tmp_path / "new.mp4"))
    tomorrow = time.time() + 86_400
    os.utime(file, (tomorrow, tomorrow))
    assert library.index(file, options=IndexOptions(settle_seconds=2.0)).duplicate == 1


def test_hashing_a_huge_file_stops_when_told(tmp_path: Path) -> None:
    with open(tmp_path / "huge.mp4", "wb") as file:
        file.truncate(2**36)  # a minute of reading; it takes no room on the disk
    hashes = HashQueue([FoundFile(str(tmp_path / "huge.mp4"), 2**36, 0)])
    (running,) = hashes._running
    wait_until(running.running, "the first bytes")
    hashes.close()
    running.result(timeout=HANG_S)


def test_ctrl_c_ends_a_watch(library: gare.Library, videos: Path) -> None:
    arguments = ["index", str(videos), "--library", library.store.uri, "--watch", "0.2"]
    with WarmProcess(["gare", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert "unchanged" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    assert "Traceback" not in errors


def test_a_library_remembers_how_it_was_split(model_folder: Path, videos: Path, tmp_path: Path) -> None:
    with gare.Library.open(tmp_path / "library", model=model_folder) as library:
        library.index(videos, options=IndexOptions(num_workers=1, split="window:1"))
        num_items = len(library)
        again = library.index(videos, options=IndexOptions(num_workers=1))
        assert (again.did_something, len(library)) == (False, num_items)
        assert num_items > 6


def test_a_model_name_too_long_for_a_path_is_explained(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a folder"):
        gare.Library.open(tmp_path / "library", model="x" * 5000)
