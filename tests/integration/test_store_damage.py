"""A damaged library is never called unchanged: it says what is wrong and what to do, without a traceback."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from clips import steady, write_video
from gare import GARE, GareConfig
from gare.errors import DamagedLibraryError, LibraryError
from gare.library.store import open_store
from gare.library.store.lance_storage import explained, explanation
from stores import STAMP, make_rows
from warm import run_gare as gare


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three videos and their library; nothing is changed here."""
    place = tmp_path_factory.mktemp("damage")
    torch.manual_seed(0)
    model = GARE(GareConfig.load({"encoder": {"name": "tiny"}, "temporal": {"num_layers": 1}}))
    model.save_pretrained(place / "model")
    (place / "videos").mkdir()
    for number in range(3):
        write_video(place / "videos" / f"{number}.mp4", steady(1 + number))
    made = gare("index", place / "videos", "--library", place / "library", "--model", place / "model")
    assert made.returncode == 0, made.stderr
    return place


def data_file(library: Path, table: str) -> Path:
    return max((library / f"{table}.lance" / "data").iterdir(), key=lambda path: path.stat().st_size)


def lose_frames(library: Path) -> None:
    shutil.rmtree(library / "frames.lance")


def lose_items(library: Path) -> None:
    shutil.rmtree(library / "items.lance")


def lose_frame_data(library: Path) -> None:
    data_file(library, "frames").unlink()


def lose_item_data(library: Path) -> None:
    data_file(library, "items").unlink()


def cut_frame_data(library: Path) -> None:
    path = data_file(library, "frames")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def lose_a_row_of_frames(library: Path) -> None:
    import lance

    dataset = lance.dataset(str(library / "frames.lance"))
    key = dataset.to_table(columns=["frames_key"])["frames_key"][0].as_py()
    dataset.delete(f"frames_key = '{key}'")


DAMAGES = [
    lose_frames,
    lose_items,
    lose_frame_data,
    lose_item_data,
    cut_frame_data,
    lose_a_row_of_frames,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_told_with_what_to_do(damage: Callable[[Path], None], place: Path, tmp_path: Path) -> None:
    library = tmp_path / "library"
    shutil.copytree(place / "library", library)
    damage(library)
    for command in (("index", place / "videos"), ("search", "a dog")):
        done = gare(*command, "--library", library)
        if command[0] == "search" and damage is lose_a_row_of_frames:  # the other two are found
            assert done.returncode == 0, done.stderr
            assert "1 damaged item was left out" in done.stderr
            continue
        assert done.returncode == 1, done.stdout
        assert "is damaged" in done.stderr
        assert f"gare check --repair {library}'" in done.stderr  # the library, not one of its tables
        assert "Traceback" not in done.stderr
        assert ".rs:" not in done.stderr
        assert "unchanged" not in done.stdout


def test_a_whole_library_passes(place: Path) -> None:
    done = gare("index", place / "videos", "--library", place / "library")
    assert done.returncode == 0
    assert "3 unchanged" in done.stdout


def test_a_library_that_was_never_finished_is_not_damaged(tmp_path: Path) -> None:
    """A process died between the facts and the tables."""
    open_store(tmp_path / "library", stamp=STAMP, create=True).close()
    shutil.rmtree(tmp_path / "library" / "items.lance")
    open_store(tmp_path / "library").upsert(*make_rows(["/a.mp4"]))
    open_store(tmp_path / "library").check()


def test_a_wrong_bucket_is_not_damage(new_library: Callable[[str], str]) -> None:
    new_library("s3")  # sets the address and the keys
    with pytest.raises(LibraryError) as caught:
        open_store("s3://no-such-bucket-here/library", stamp=STAMP, create=True)
    assert "damaged" not in str(caught.value)
    assert "bucket" in str(caught.value)


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(ValueError, match="k must be"), explained("/library"):
        raise ValueError("k must be 1 or more")


def test_one_flipped_bit_leaves_the_item_out_names_it_and_is_mended(place: Path, tmp_path: Path) -> None:
    library, videos = tmp_path / "library", tmp_path / "videos"
    shutil.copytree(place / "videos", videos)
    made = gare("index", videos, "--library", library, "--model", place / "model")
    assert made.returncode == 0
    store = open_store(library, read_only=True)
    item = next(iter(store.scan(columns=["id"])))["id"][1].as_py()
    (row,) = store.fetch([item], ["path", "vectors"]).to_pylist()
    path = data_file(library, "frames")
    content = bytearray(path.read_bytes())
    content[content.index(row["vectors"]) + len(row["vectors"]) // 2] ^= 1
    path.write_bytes(content)
    for more in ((), ("--exhaustive",)):
        found = gare("search", "a dog", "--library", library, *more)
        assert found.returncode == 0
        assert item not in found.stdout
        assert item in found.stderr
        assert "gare check --repair" in found.stderr
    os.utime(row["path"])  # whoever touches the file has it made anew too
    assert gare("index", videos, "--library", library).returncode == 0
    mended = gare("search", "a dog", "--library", library)
    assert (mended.returncode, mended.stderr) == (0, "nothing better is there: all 3 items were scored\n")
    assert item in mended.stdout
    (mended,) = open_store(library, read_only=True).fetch([item], ["vectors"]).to_pylist()
    assert mended["vectors"] == row["vectors"]


@pytest.mark.parametrize(
    ("message", "is_damage"),
    [
        ("External error: Lance reader producer terminated before end of stream", True),
        ("Invalid user input: no such column, /build/rust/lance/src/scan.rs:1:2", True),
        ("External error: Commit conflict for version 3, /build/rust/lance/src/commit.rs:1:2", False),
        ("an argument of ours is wrong", False),
    ],
)
def test_what_lance_refuses_to_read_is_damage(message: str, is_damage: bool) -> None:
    found = explanation("library", ValueError(message))
    assert isinstance(found, DamagedLibraryError) is is_damage
