"""How many scenes of a long video come back first at the right second, and what it costs to index it.

Clips are planted in a film that is made of others. The film is indexed with default options in a library of
its own, and the caption of every planted clip is searched.
"""

from __future__ import annotations

import csv
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gare.bench.bench_timing import describe_device
from gare.bench.planted_film import Scene, write_film
from gare.data.containers import VIDEO_SUFFIXES
from gare.errors import ConfigError
from gare.library.library import Library
from gare.library.search.search_hit import SearchHit
from gare.model import GARE

Say = Callable[[str], None]
_LOOKED_AT = 10  # hits of each search
_TOLERANCE_S = 1.0  # a frame is up to a second older than what it shows


@dataclass(frozen=True)
class PlantedScene:
    """A scene of the film, and where its caption led to."""

    clip: str
    caption: str
    start: float
    end: float
    found_at: float | None
    """The second of the first hit; None where there was no hit."""
    rank: int | None
    """The place of the first hit within the scene, among ten; None: not among them."""


@dataclass(frozen=True)
class MomentsBenchmark:
    """What came back, and what it cost."""

    model: str
    device: str
    num_clips: int
    film_s: float
    num_planted: int
    num_first: int
    """Scenes that came back first, at a second within them."""
    num_among_ten: int
    index_s: float
    times_as_fast: float
    """How many times faster than the film plays it was indexed, decoding included."""
    num_items: int
    library_bytes: int
    bytes_per_hour: float
    search_ms: float
    """The mean time from words to hits."""
    scenes: tuple[PlantedScene, ...]


def benchmark_moments(
    sources: Sequence[Path],
    captions: Path | None,
    *,
    model: str,
    num_planted: int,
    minutes: float,
    seed: int,
    say: Say,
) -> MomentsBenchmark:
    """Make the film, index it, search it.

    Args:
        sources: clips, and folders of clips.
        captions: a CSV with the columns `video` (a file name) and `caption`; None: `captions.csv` beside the
            first clip.
        num_planted: how many clips are planted, of those that have a caption.
        minutes: how long the film is.
    """
    clips = _find_clips(sources)
    words = _read_captions(captions or clips[0].parent / "captions.csv")
    generator = random.Random(seed)
    planted, others = _choose(clips, words, num_planted, generator)
    with tempfile.TemporaryDirectory(prefix="gare-moments-") as name:
        folder = Path(name)
        (folder / "films").mkdir()
        (folder / "parts").mkdir()
        film = folder / "films" / "film.mp4"
        say(f"making a film of {minutes:g} minutes from {len(clips)} clips")
        scenes = write_film(film, planted, others, seconds=60 * minutes, seed=seed, folder=folder / "parts")
        say("indexing it")
        loaded = GARE.from_pretrained(model)
        with Library.open(folder / "library", model=loaded) as library:
            report = library.index(folder / "films")
            if report.failures:
                raise ConfigError(f"the film could not be indexed: {report.failures[0].message}")
            say("searching it")
            started = time.perf_counter()
            found = [_search(library, scene, words[scene.clip.name]) for scene in scenes]
            search_s = time.perf_counter() - started
            num_bytes = _folder_bytes(folder / "library")
            return MomentsBenchmark(
                model=model,
                device=describe_device(loaded.device),
                num_clips=len(clips),
                film_s=report.video_seconds,
                num_planted=len(found),
                num_first=sum(scene.rank == 1 for scene in found),
                num_among_ten=sum(scene.rank is not None for scene in found),
                index_s=report.seconds,
                times_as_fast=report.video_seconds / report.seconds,
                num_items=len(library),
                library_bytes=num_bytes,
                bytes_per_hour=num_bytes * 3600 / report.video_seconds,
                search_ms=1000 * search_s / len(found),
                scenes=tuple(found),
            )


def _find_clips(sources: Sequence[Path]) -> list[Path]:
    clips: list[Path] = []
    for source in sources:
        if not source.exists():
            raise ConfigError(f"{source} does not exist; give clips, or a folder of clips")
        inside = sorted(source.iterdir()) if source.is_dir() else [source]
        clips += [path for path in inside if path.suffix.lower() in VIDEO_SUFFIXES]
    clips = list(dict.fromkeys(clips))
    if not clips:
        raise ConfigError("no video among what was given; give clips, or a folder of clips")
    if len({clip.name for clip in clips}) < len(clips):
        raise ConfigError("two clips have the same name, so that captions cannot tell them apart")
    return clips


def _read_captions(path: Path) -> dict[str, str]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); name it with --captions") from None
    if not rows or not {"video", "caption"} <= rows[0].keys():
        raise ConfigError(f"{path} needs rows with the columns video and caption")
    return {row["video"]: row["caption"] for row in rows if row["caption"]}


def _choose(
    clips: Sequence[Path], words: dict[str, str], num_planted: int, generator: random.Random
) -> tuple[list[Path], list[Path]]:
    told = [clip for clip in clips if clip.name in words]
    if len(told) < num_planted or len(clips) == num_planted:
        raise ConfigError(
            f"{num_planted} clips cannot be planted: {len(told)} of {len(clips)} have a caption, and others "
            "are needed between them; plant fewer with --planted, or give more clips"
        )
    planted = generator.sample(told, num_planted)
    return planted, [clip for clip in clips if clip not in planted]


def _search(library: Library, scene: Scene, caption: str) -> PlantedScene:
    hits = library.search(caption, top=_LOOKED_AT, by="moment")
    ranks = [place + 1 for place, hit in enumerate(hits) if _is_in(hit, scene)]
    return PlantedScene(
        clip=scene.clip.name,
        caption=caption,
        start=scene.start,
        end=scene.end,
        found_at=hits[0].moment if hits else None,
        rank=ranks[0] if ranks else None,
    )


def _is_in(hit: SearchHit, scene: Scene) -> bool:
    return scene.start - _TOLERANCE_S < hit.moment < scene.end


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
