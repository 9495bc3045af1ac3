"""The manifest: what it accepts, what it refuses and how it says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gare.data.manifest import Counts, Header, Manifest, Row, find_manifest, join
from gare.errors import DataError

ROWS = (
    Row("v1", "v1.mp4", "a dog runs", "train"),
    Row("v2", "v2.mp4", "rain, and 'wind'", "train", 1.5, 4.0),
    Row("v1", "v1.mp4", "a puppy\nruns \u2028fast", "train"),
    Row("v3", "sub/v3.mp4", "snöw ❄", "test"),
)
EXPECTED = {"train": Counts(2, 3), "test": Counts(1, 1)}
MANIFEST = Manifest(Header("pets", "all captions", EXPECTED), ROWS)


def write(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_bytes(text.encode(encoding))
    return path


def test_helpers_agree_with_each_other() -> None:
    assert MANIFEST.splits == ["train", "test"]
    assert MANIFEST.counts == EXPECTED
    assert [video.video_id for video in MANIFEST.videos("train")] == ["v1", "v2"]
    assert MANIFEST.video_index("train") == [0, 1, 0]
    assert MANIFEST.captions_per_video("train") == [2, 1]
    with pytest.raises(DataError, match="no split 'val', only train, test"):
        MANIFEST.captions("val")


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_saved_and_loaded_is_the_same(tmp_path: Path, suffix: str) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow", reason="Parquet is an extra")
    path = tmp_path / f"manifest.{suffix}"
    MANIFEST.save(path)
    loaded = Manifest.load(path)
    assert loaded.rows == ROWS
    assert replace(loaded.header, root=".") == MANIFEST.header
    assert loaded.source(ROWS[0]) == f"{tmp_path}/v1.mp4"
    assert find_manifest(tmp_path) == path


def test_a_plain_csv_is_a_manifest_too(tmp_path: Path) -> None:
    text = "\ufeffsplit,video_id,extra,caption,path\r\ntrain,v1,x,a dog,v1.mp4\r\n\r\n"
    manifest = Manifest.load(write(tmp_path / "plain.csv", text))
    assert manifest.rows == (Row("v1", "v1.mp4", "a dog", "train"),)
    assert manifest.header.name == "plain"


HEAD = "video_id,path,caption,split\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("video_id,path,split\nv1,v1.mp4,train\n", "line 1: no column caption, found video_id, path, split"),
        (HEAD + "v1,v1.mp4,,train\n", "line 2: empty caption for v1; write one or delete the line"),
        (HEAD + ",v1.mp4,a,train\n", "line 2: empty video_id"),
        (HEAD + "v1,,a,train\n", "line 2: empty path for v1"),
        (HEAD + "v1,v1.mp4,a,dev\n", "line 2: split 'dev' is not one of train, val, test"),
        (HEAD + "v1,v1.mp4,a, b,train\n", "line 2: 5 fields instead of 4; put a text with commas in quotes"),
        (
            HEAD + "v1,v1.mp4,a,train\n\nv1,v1.mp4,a,train\n",
            "line 4: the same video and caption as line 2; delete",
        ),
        (
            HEAD + "v1,v1.mp4,a,train\nv1,v1.mp4,b,test\n",
            "line 3: v1 is in 'test', but line 2 has it in 'train'",
        ),
        (
            HEAD + "v1,v1.mp4,a,train\nv1,x.mp4,b,train\n",
            "line 3: v1 has another path, start or end than in line 2",
        ),
        ("start," + HEAD + "soon,v1,v1.mp4,a,train\n", "line 2: start or end: .*'soon'.* write seconds"),
        ("start,end," + HEAD + "5,2,v1,v1.mp4,a,train\n", "line 2: end 2.0 is not after start 5.0"),
        (HEAD, "has no rows"),
        ("", "line 1: no column video_id, path, caption, split"),
        ('# gare-manifest {"name": "x", "version": 99}\n' + HEAD, "manifest version 99.* update gare"),
        ('# gare-manifest {"nom": "x"}\n' + HEAD, "line 1: the manifest header cannot be read"),
    ],
)
def test_mistakes_are_named_with_their_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Manifest.load(write(tmp_path / "manifest.csv", text))


def test_line_numbers_count_the_header_and_captions_of_several_lines(tmp_path: Path) -> None:
    path = tmp_path / "manifest.csv"
    MANIFEST.save(path)
    path.write_text(path.read_text(encoding="utf-8") + "v9,v9.mp4,,train,,\n", encoding="utf-8")
    with pytest.raises(DataError, match="line 8: empty caption for v9"):
        Manifest.load(path)


def test_encodings_are_named(tmp_path: Path) -> None:
    text = HEAD + "v1,v1.mp4,a dog,train\nv2,v2.mp4,ein Bär,train\n"
    with pytest.raises(DataError, match="line 1: this is UTF-16; save it as UTF-8"):
        Manifest.load(write(tmp_path / "a.csv", text, "utf-16"))
    with pytest.raises(DataError, match="line 3: this is not UTF-8"):
        Manifest.load(write(tmp_path / "b.csv", text, "latin-1"))
    with pytest.raises(DataError, match="does not exist"):
        Manifest.load(tmp_path / "none.csv")


def test_many_mistakes_are_summed_up(tmp_path: Path) -> None:
    text = HEAD + "".join(f"v{number},v.mp4,,train\n" for number in range(50))
    with pytest.raises(DataError, match="and 45 more like these"):
        Manifest.load(write(tmp_path / "manifest.csv", text))


def test_a_gallery_never_shrinks_silently(tmp_path: Path) -> None:
    path = tmp_path / "manifest.csv"
    MANIFEST.save(path)
    lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    path.write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")
    with pytest.raises(DataError, match="test: 0 videos, 0 captions instead of 1 videos, 1 captions"):
        Manifest.load(path)
    assert Manifest.load(path, allow_missing=True).splits == ["train"]
    with pytest.raises(DataError, match="train: 1 videos, 1 captions instead of 2 videos, 3 captions"):
        MANIFEST.without(["v1"]).check_counts()


def test_hold_out_depends_on_ids_and_seed_alone() -> None:
    rows = tuple(Row(f"v{number}", "x.mp4", "a", "train") for number in range(30))
    held_out = Manifest(Header("x"), rows).hold_out(5, seed=1)
    assert held_out.counts == {"train": Counts(25, 25), "val": Counts(5, 5)}
    again = Manifest(Header("x"), rows[::-1]).hold_out(5, seed=1)
    assert {v.video_id for v in again.videos("val")} == {v.video_id for v in held_out.videos("val")}
    assert "held out" in held_out.header.protocol
    expected = Manifest(Header("x", expected={"train": Counts(31, 31)}), rows).hold_out(5)
    assert expected.header.expected == {"train": Counts(26, 26), "val": Counts(5, 5)}  # one is still missing
    with pytest.raises(DataError, match="already has a split 'val'"):
        held_out.hold_out(5)
    with pytest.raises(DataError, match="cannot hold out 30 of 30"):
        Manifest(Header("x"), rows).hold_out(30)


def test_join_and_select() -> None:
    images = Manifest(
        Header("images", "one frame", {"train": Counts(1, 1)}, root="/images"),
        (Row("i1", "t.tar::i1.webp", "a cat", "train"), Row("i2", "t.tar::i2.webp", "a cow", "test")),
    )
    both = join("both", [MANIFEST, images.select("train")])
    assert both.counts == {"train": Counts(3, 4), "test": Counts(1, 1)}
    assert both.source(both.videos("train")[-1]) == "/images/t.tar::i1.webp"
    both.check_counts()
    with pytest.raises(DataError, match="v1 is in pets and in other"):
        join("both", [MANIFEST, Manifest(Header("other"), ROWS[:1])])
