"""Films with dense frames: stored once, shared by items that are ranges of them, kept through everything."""

from __future__ import annotations

import json
import shutil
from datetime import timedelta
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pytest
import torch

from clips import read_number, steady, write_video
from faults import refuse
from gare import GARE, GareConfig, Library
from gare.data.video import VideoReader
from gare.errors import LibraryError
from gare.library.index import index_run
from gare.library.index.commit import Catalogue, Writer, make_frames
from gare.library.index.encode_segments import Encoded
from gare.library.index.index_report import IndexReport
from gare.library.index.index_run import IndexOptions, index_folders
from gare.library.library import model_stamp
from gare.library.store import Store, open_store
from gare.library.store.store_schema import DENSE, MOST_DENSE_FRAMES, is_dense
from gare.library.store.stored_frames import own_frames
from library_state import assert_same, read_state
from servers import HANG_S
from warm import run_gare, run_python

FILM_S, CLIP_S = 150, 9
DRIVER = Path(__file__).resolve().parents[1] / "index_driver.py"


@pytest.fixture(scope="module")
def model() -> GARE:
    torch.manual_seed(0)
    return GARE(GareConfig.load({"encoder": {"name": "tiny"}, "temporal": {"num_layers": 0}})).eval()


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("films")
    write_video(root / "film.mp4", steady(FILM_S))
    write_video(root / "clip.mp4", steady(CLIP_S))
    return root


@pytest.fixture
def videos(pristine: Path, tmp_path: Path) -> Path:
    shutil.copytree(pristine, tmp_path / "videos")
    return tmp_path / "videos"


@pytest.fixture
def store(model: GARE, tmp_path: Path) -> Store:
    return open_store(tmp_path / "library", stamp=model_stamp(model, "tiny"), create=True)


def index(store: Store, model: GARE, root: Path, extractor: Any = None, **options: Any) -> IndexReport:
    given = {"extractor": extractor} if extractor else {}
    return index_folders(store, model, [root], options=IndexOptions(num_workers=1, **options), **given)


def rows_of(store: Store, path: Path | None = None) -> list[dict[str, Any]]:
    ids = [row["id"] for batch in store.scan(columns=["id"]) for row in batch.to_pylist()]
    columns = ["id", "path", "start", "end", "tags", "added", "frames_key", "times", "vectors", "vector"]
    rows = store.fetch(ids, columns).to_pylist()
    return [row for row in rows if path is None or row["path"] == str(path)]


def check_no_orphans(store: Store) -> None:
    store.orphan_age = timedelta(0)  # type: ignore[attr-defined]
    store.maintain()
    assert store.frames_keys() == {row["frames_key"] for row in rows_of(store)}


def test_frames_are_stored_once_and_items_are_ranges_of_them(videos: Path, store: Store, model: GARE) -> None:
    report = index(store, model, videos)
    assert (report.new, report.video_seconds) == (2, pytest.approx(FILM_S + CLIP_S))
    film, clip = (rows_of(store, videos / name) for name in ("film.mp4", "clip.mp4"))
    assert [(row["start"], row["end"], len(row["times"])) for row in clip] == [(0.0, CLIP_S, CLIP_S)]
    blocks = {row["frames_key"]: row for row in film}
    assert store.frames_keys() == {*blocks, clip[0]["frames_key"]}
    assert len(film) > 2 * len(blocks) > 4
    times = sorted(time for row in blocks.values() for time in row["times"])
    assert times[0] == 0
    assert times[-1] > FILM_S - 4
    assert all(0 < after - before <= 4 + 1e-3 for before, after in pairwise(times))
    assert all(len(row["times"]) <= MOST_DENSE_FRAMES for row in blocks.values())
    assert max(row["end"] for row in film) == pytest.approx(FILM_S)
    for row in film:
        assert row["start"] == 0 or np.float32(row["start"]) in np.float32(row["times"])
        assert row["end"] > row["times"][-1] or np.float32(row["end"]) in np.float32(row["times"])


def test_vectors_are_those_of_the_model(videos: Path, store: Store, model: GARE) -> None:
    index(store, model, videos)
    block = max(rows_of(store, videos / "film.mp4"), key=lambda row: (len(row["times"]), row["start"]))
    with VideoReader(videos / "film.mp4") as reader:
        images = [reader.image_at(time + 1e-3)[1] for time in block["times"]]
    assert [read_number(image) for image in images] == [round(10 * time) for time in block["times"]]
    expected = model.encode_video([[image] for image in images]).frames_VFD[:, 0].numpy()
    stored = np.frombuffer(block["vectors"], "<f2").reshape(-1, model.dim)
    np.testing.assert_allclose(stored, expected, atol=2e-3)


def test_a_second_run_decodes_nothing(videos: Path, store: Store, model: GARE) -> None:
    index(store, model, videos)
    before = rows_of(store)
    again = index(store, model, videos, extractor=refuse)
    assert (again.unchanged, again.did_something) == (2, False)
    assert rows_of(store) == before


def test_copies_and_moves_take_the_frames_along(videos: Path, store: Store, model: GARE) -> None:
    index(store, model, videos, tags=("mine",))
    film = rows_of(store, videos / "film.mp4")
    shutil.copy(videos / "film.mp4", videos / "copy.mp4")
    report = index(store, model, videos, extractor=refuse)
    assert (report.duplicate, report.num_items_encoded) == (1, 0)
    copied = rows_of(store, videos / "copy.mp4")
    assert {(row["start"], row["end"], row["vectors"]) for row in copied} == {
        (row["start"], row["end"], row["vectors"]) for row in film
    }
    assert not {row["frames_key"] for row in copied} & {row["frames_key"] for row in film}
    assert len({row["frames_key"] for row in copied}) == len({row["frames_key"] for row in film})

    (videos / "copy.mp4").unlink()
    assert index(store, model, videos, extractor=refuse).deleted == 1
    (videos / "film.mp4").rename(videos / "moved.mp4")
    report = index(store, model, videos, extractor=refuse)
    assert (report.moved, report.num_items_encoded) == (1, 0)
    moved = rows_of(store, videos / "moved.mp4")
    assert len(moved) == len(film) == len(rows_of(store)) - 1
    assert {row["added"] for row in moved} == {row["added"] for row in film}
    assert all(row["tags"] == ["mine"] for row in moved)
    check_no_orphans(store)


def test_a_film_that_changed_leaves_nothing_of_itself(videos: Path, store: Store, model: GARE) -> None:
    index(store, model, videos, tags=("mine",))
    before = {row["frames_key"] for row in rows_of(store)}
    write_video(videos / "film.mp4", steady(100))
    report = index(store, model, videos)
    assert (report.changed, report.unchanged) == (1, 1)
    film = rows_of(store, videos / "film.mp4")
    assert max(row["end"] for row in film) == pytest.approx(100)
    assert all(row["tags"] == ["mine"] for row in film)
    assert not {row["frames_key"] for row in film} & before
    check_no_orphans(store)


def test_every_says_how_often_a_frame_is_taken(videos: Path, store: Store, model: GARE) -> None:
    index(store, model, videos, split=f"{DENSE}:5")
    blocks = {row["frames_key"]: row["times"] for row in rows_of(store, videos / "film.mp4")}
    assert [len(times) for times in blocks.values()] == [FILM_S // 5]  # short by this measure: one block
    report = index(store, model, videos, split=f"{DENSE}:1")
    assert report.changed == 2
    check_no_orphans(store)


def test_killed_half_way_it_ends_as_if_never_killed(pristine: Path, model: GARE, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    for task, number in (("together", 1), ("kill", 3)):
        command = [DRIVER, task, pristine, tmp_path / task, tmp_path / "model", number]
        result = run_python(list(map(str, command)), timeout=HANG_S)
        assert result.returncode == 0, result.stdout + result.stderr
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary["num_killed"] >= 1
    whole, killed = (open_store(tmp_path / task) for task in ("together", "kill"))
    assert_same(read_state(killed), read_state(whole))
    check_no_orphans(killed)


# --- libraries that were made before ------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["whole", "auto"])
def test_an_old_library_is_brought_up_to_date_with_one_decoding(
    split: str, videos: Path, store: Store, model: GARE, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        before.setattr(index_run, "_MOMENTS_NOTE", "an older gare wrote no such note")
        index(store, model, videos, split=split, tags=("mine",))
    assert not any(is_dense(row["frames_key"]) for row in rows_of(store))
    report = index(store, model, videos)
    assert (report.changed, report.video_seconds) == (2, pytest.approx(FILM_S + CLIP_S))
    rows = rows_of(store)
    assert all(is_dense(row["frames_key"]) and row["tags"] == ["mine"] for row in rows)
    assert not index(store, model, videos, extractor=refuse).did_something
    check_no_orphans(store)


def test_windows_that_were_asked_for_stay(videos: Path, store: Store, model: GARE, monkeypatch: Any) -> None:
    with monkeypatch.context() as before:
        before.setattr(index_run, "_MOMENTS_NOTE", "an older gare wrote no such note")
        index(store, model, videos, split="window:30")
    assert index(store, model, videos, extractor=refuse).unchanged == 2


def test_a_library_of_format_1_gets_dense_frames(
    videos: Path, store: Store, model: GARE, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        before.setattr(index_run, "_MOMENTS_NOTE", "an older gare wrote no such note")
        index(store, model, videos, split="whole")
    store.close()
    place = tmp_path / "library"
    lance.dataset(str(place / "items.lance")).drop_columns(["checksum"])
    facts = lance.dataset(str(place / "facts.lance"))
    facts.update({"value": "'1'"}, where="key = 'schema_version'")
    with Library.open(place, model=model) as library:
        assert {hit.path for hit in library.search("anything")} == {str(path) for path in videos.iterdir()}
        assert library.index(videos).changed == 2
        assert library.search("anything", by="moment", top=50)[-1].id
        assert all(is_dense(row["frames_key"]) for row in rows_of(library.store))


def test_a_model_that_sees_frames_together_has_no_moments(
    videos: Path, tiny_model: GARE, tmp_path: Path
) -> None:
    store = open_store(tmp_path / "other", stamp=model_stamp(tiny_model, "tiny"), create=True)
    with pytest.raises(LibraryError, match="--split auto"):
        index(store, tiny_model, videos, split=DENSE)
    index(store, tiny_model, videos)
    assert store.get_notes()["split"] == "auto"


# --- searching ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library(pristine: Path, model: GARE, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with Library.open(tmp_path_factory.mktemp("search") / "library", model=model) as library:
        library.index(pristine)
        yield library


def overlap(one: Any, other: Any) -> bool:
    return one.path == other.path and one.start < other.end and other.start < one.end


@pytest.mark.parametrize("way", [{}, {"exhaustive": True}, {"exact": True}])
def test_a_film_is_one_hit_with_its_other_moments(library: Library, way: dict[str, bool]) -> None:
    hits = library.search("a dog", **way)
    assert [Path(hit.path).name for hit in hits] in (["film.mp4", "clip.mp4"], ["clip.mp4", "film.mp4"])
    film = next(hit for hit in hits if hit.path.endswith("film.mp4"))
    assert film.file_duration == pytest.approx(FILM_S)
    assert film.others
    assert film.start <= film.moment < film.end
    parts = [(film.start, film.end), *((other.start, other.end) for other in film.others)]
    assert not any(a[0] < b[1] and b[0] < a[1] for a, b in combinations(parts, 2))
    assert film.score >= max(other.score for other in film.others)


@pytest.mark.parametrize("way", [{}, {"exhaustive": True}, {"exact": True}])
def test_moments_are_hits_that_do_not_overlap(library: Library, way: dict[str, bool]) -> None:
    hits = library.search("a dog", by="moment", top=12, **way)
    assert len(hits) > 3
    assert not any(overlap(one, other) for one, other in combinations(hits, 2))
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    assert all(hit.start <= hit.moment < hit.end for hit in hits)


def test_the_score_is_that_of_the_frames_of_the_range(library: Library) -> None:
    hits = library.search("a dog", by="moment", top=5)
    table = library.store.fetch(
        [hit.id for hit in hits], ["id", "frames_key", "start", "end", "times", "vectors"]
    )
    text = library.model.encode_text(["a dog"])
    for hit, row in zip(hits, own_frames(table, library.model.config.num_frames).to_pylist(), strict=True):
        frames_FD = torch.from_numpy(
            np.frombuffer(row["vectors"], "<f2").reshape(-1, library.model.dim).copy()
        )
        video = library.features([hit.id])
        assert torch.equal(video.frames_VFD[0], frames_FD.float())
        with torch.no_grad():
            score = float(library.model.score(text, video)[0, 0])
        assert hit.score == pytest.approx(score, abs=1e-5)
        assert hit.frame_times == pytest.approx(row["times"])


def test_whoever_removes_a_moment_removes_its_file(pristine: Path, model: GARE, tmp_path: Path) -> None:
    with Library.open(tmp_path / "library", model=model) as library:
        library.index(pristine)
        film = next(hit for hit in library.search("a dog") if hit.path.endswith("film.mp4"))
        num_items = len(library)
        assert library.delete([film.id]) == num_items - 1
        assert [hit.path for hit in library.search("a dog")] == [str(pristine / "clip.mp4")]
        assert not library.index(pristine).did_something


def test_the_command_line_says_how_fast_it_was(pristine: Path, model: GARE, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    done = run_gare("index", pristine, "--library", tmp_path / "library", "--model", tmp_path / "model")
    assert done.returncode == 0, done.stderr
    assert "times as fast as they play" in done.stdout
    refused = run_gare("index", pristine, "--library", tmp_path / "library", "--every", 2, "--split", "whole")
    assert refused.returncode == 2
    assert "goes with --split moments" in refused.stderr


# --- memory -------------------------------------------------------------------------------------------------


def test_rows_of_a_very_long_film_do_not_wait_for_its_end(store: Store) -> None:
    """A hundred thousand frames: what is held is bounded, whatever the length."""
    writer = Writer(store, Catalogue(store), max_seconds=3600, known=set())
    picture, vectors = bytes(20_000), np.ones((32, store.stamp.dim), "<f2").tobytes()
    num_blocks, most_held = 100_000 // 32, 0
    for number in range(num_blocks):
        start = 32.0 * number
        times = tuple(start + second for second in range(32))
        segment = Encoded(start, start + 32, times, picture, b"", vectors, ())
        writer.add_frames([make_frames("content", f"{DENSE}:1", segment)])
        most_held = max(most_held, len(writer._frames))
    assert most_held * len(picture) < 33 * 2**20 < num_blocks * len(picture)
    assert len(store.frames_keys() or ()) == num_blocks - len(writer._frames)
