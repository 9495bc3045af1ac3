"""Two indexers and four searchers on one library at the same time, each a process of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch

import gare
from clips import steady, write_video
from servers import HANG_S
from warm import WarmProcess

NUM_VIDEOS = 12

INDEXER = """
import sys, gare
from gare.library.index.index_run import IndexOptions
place, folder = sys.argv[1:]
with gare.Library.open(place) as library:
    report = library.index(folder, options=IndexOptions(num_workers=1, commit_seconds=0.2))
    assert not report.failed, report.failures
    print(report.new)
"""

SEARCHER = """
import sys, time, gare
place, stop = sys.argv[1], sys.argv[2]
import pathlib
searches = 0
with gare.Library.open(place, read_only=True) as library:
    while not pathlib.Path(stop).exists() or not searches:
        hits = library.search("a dog runs", top=5)
        assert len({hit.id for hit in hits}) == len(hits)
        assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
        searches += 1
print(searches)
"""


def start(code: str, *arguments: Path) -> WarmProcess:
    return WarmProcess(["-c", code, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def end(process: WarmProcess) -> int:
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, err
    return int(out)


def test_no_error_and_no_lost_row(tmp_path: Path) -> None:
    torch.manual_seed(0)
    gare.GARE(gare.GareConfig.load({"encoder": {"name": "tiny"}})).save_pretrained(tmp_path / "model")
    for number in range(NUM_VIDEOS):
        folder = tmp_path / f"videos{number % 2}"
        folder.mkdir(exist_ok=True)
        write_video(folder / f"{number}.mp4", steady(1.5, fps=3 + number))
    place, stop = tmp_path / "library", tmp_path / "stop"
    gare.Library.open(place, model=tmp_path / "model").close()
    searchers = [start(SEARCHER, place, stop) for _ in range(4)]
    indexers = [start(INDEXER, place, tmp_path / f"videos{number}") for number in range(2)]
    assert [end(indexer) for indexer in indexers] == [NUM_VIDEOS // 2] * 2
    stop.touch()
    assert all(end(searcher) > 0 for searcher in searchers)
    with gare.Library.open(place) as library:
        paths = [item["path"] for item in library.items()]
        assert sorted(paths) == sorted(str(path) for path in tmp_path.glob("videos?/*.mp4"))
        assert len(library.search("a dog runs", top=100)) == NUM_VIDEOS
