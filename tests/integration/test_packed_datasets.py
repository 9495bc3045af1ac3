"""`gare data prepare` on WebDataset shards and Hugging Face datasets: real ones, never unpacked."""

from __future__ import annotations

import io
import json
import sys
import tarfile
import uuid
from dataclasses import replace
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from clips import numbered_image, read_number, steady, write_video
from gare.cli.main import app
from gare.data.datasets import read_dataset
from gare.data.frame_cache import FrameCache
from gare.data.loader import FrameSource, PairLoader
from gare.data.manifest import Counts, Header, Manifest
from gare.data.video import read_frames, source_exists
from gare.errors import DataError, VideoError
from gare.train import RunConfig, train
from toy_data import recipe

SECONDS = (2.0, 3.0, 1.5, 2.5)


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("clips")
    return [write_video(folder / f"{n}.mp4", steady(seconds)) for n, seconds in enumerate(SECONDS)]


def member(name: str, content: bytes = b"", **changes) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in changes.items():
        setattr(info, key, value)
    return info, content


def write_tar(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    return path


def png(number: int) -> bytes:
    buffer = io.BytesIO()
    numbered_image(number).save(buffer, "PNG")
    return buffer.getvalue()


def prepare(*arguments) -> dict:
    options = ["--frames", "3", "--workers", "1", "--json"]
    done = CliRunner().invoke(app, ["data", "prepare", *map(str, arguments), *options])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture
def shards(clips, tmp_path) -> Path:
    folder = tmp_path / "shards"
    contents = [path.read_bytes() for path in clips]
    write_tar(
        folder / "train-000000.tar",
        member("clip0.mp4", contents[0]),
        member("clip0.txt", b"a first clip\na second caption of it\n"),
        member("clip0.__key__", b"ignored"),
        member("sub/clip1.json", json.dumps({"caption": "in a folder", "fps": 10}).encode()),
        member("sub/clip1.mp4", contents[1]),
    )
    write_tar(
        folder / "val" / "000000.tar",
        member("clip0.mp4", contents[2]),
        member("clip0.json", json.dumps({"captions": ["held out", "twice"]}).encode()),
        member("picture.png", png(9)),
        member("picture.caption", "an émigré".encode()),
    )
    return folder


def test_shards_are_prepared_and_their_frames_are_those_of_the_videos(shards, clips, tmp_path):
    done = prepare("webdataset", "--annotations", shards, "--out", tmp_path / "out")
    assert done["counts"] == {"train": {"videos": 2, "captions": 3}, "val": {"videos": 2, "captions": 3}}
    assert done["failures"] == []
    manifest = read_dataset("webdataset", shards)
    assert [row.path for row in manifest.videos("train")] == [
        "train-000000.tar::clip0.mp4",
        "train-000000.tar::sub/clip1.mp4",
    ]
    assert manifest.captions("val") == ["held out", "twice", "an émigré"]
    cache = FrameCache(tmp_path / "out/frames")
    for video_id, clip in {
        "train-000000/clip0": 0,
        "train-000000/sub/clip1": 1,
        "val/000000/clip0": 2,
    }.items():
        expected = [read_number(image) for image in read_frames(clips[clip], 3)]
        assert [read_number(image) for image in cache.read(video_id, 3)] == expected
    assert read_number(cache.read("val/000000/picture", 1)[0]) == 9
    assert sorted(path.name for path in shards.rglob("*")) == ["000000.tar", "train-000000.tar", "val"]


def test_a_prepared_set_of_shards_is_checked_and_read_directly(shards, clips, tmp_path):
    prepare("webdataset", "--annotations", shards, "--out", tmp_path / "out")
    done = CliRunner().invoke(app, ["data", "check", str(tmp_path / "out"), "--workers", "1", "--json"])
    assert done.exit_code == 0, done.output
    source = str(shards / "train-000000.tar::clip0.mp4")
    assert source_exists(source)
    direct = [read_number(image) for image in read_frames(source, 3)]
    assert direct == [read_number(image) for image in read_frames(clips[0], 3)]
    with pytest.raises(VideoError, match=r"has no image, video or folder 'clip9\.mp4'"):
        read_frames(str(shards / "train-000000.tar::clip9.mp4"), 3)


@pytest.fixture
def remote(shards, seaweedfs, monkeypatch) -> str:
    """The same shards on S3."""
    for name, value in seaweedfs.environment.items():
        monkeypatch.setenv(name, value)
    address = f"s3://gare/{uuid.uuid4().hex}/shards"
    for shard in shards.rglob("*.tar"):
        seaweedfs.put(f"{address}/{shard.relative_to(shards)}", shard.read_bytes())
    return address


def test_shards_on_object_storage_are_prepared_as_those_of_a_folder(shards, remote, tmp_path):
    prepare("webdataset", "--annotations", shards, "--out", tmp_path / "here")
    done = prepare("webdataset", "--annotations", remote, "--out", tmp_path / "there")
    assert done["failures"] == []
    here, there = (Manifest.load(tmp_path / name / "manifest.csv") for name in ("here", "there"))
    assert there.rows == here.rows
    assert there.source(there.videos("train")[0]) == f"{remote}/train-000000.tar::clip0.mp4"
    caches = [FrameCache(tmp_path / name / "frames") for name in ("here", "there")]
    for video in here.all_videos():
        first, second = (cache.read(video.video_id, 3) for cache in caches)
        assert [image.tobytes() for image in first] == [image.tobytes() for image in second]
    one = read_dataset("webdataset", Path(f"{remote}/train-000000.tar"))
    assert one.source(one.videos("train")[0]) == f"{remote}/train-000000.tar::clip0.mp4"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_sample_of_shards_on_object_storage_is_seen_once_in_an_epoch(
    seaweedfs, remote, num_workers, tmp_path
):
    """By two training processes together, read from S3 directly, also by the processes that load ahead."""
    images = [[member(f"{n}.png", png(n)), member(f"{n}.txt", f"number {n}".encode())] for n in range(12)]
    written = write_tar(tmp_path / "images.tar", *(each for pair in images for each in pair))
    seaweedfs.put(f"{remote}/train-000001.tar", written.read_bytes())
    rows = read_dataset("webdataset", Path(f"{remote}/train-000001.tar")).rows
    addressed = [replace(row, path=f"{remote}/{row.path}") for row in rows]
    Manifest(Header("numbers"), tuple(addressed)).save(tmp_path / "manifest.csv")
    source = FrameSource.open(tmp_path / "manifest.csv", 1)
    for epoch in range(2):
        seen: list[str] = []
        for rank in range(2):
            loader = PairLoader(
                source,
                "train",
                image_size=32,
                batch_size=2,
                seed=0,
                num_workers=num_workers,
                rank=rank,
                world_size=2,
            )
            for text, video in loader.batches(epoch):
                assert video.mask_VF.all()
                seen += text.captions
        assert sorted(seen) == sorted(f"number {n}" for n in range(12))
    for n, video in enumerate(source.manifest.videos("train")):
        assert read_number(source.read(video)[0]) == n


def test_what_is_not_on_object_storage_is_said(remote):
    with pytest.raises(DataError, match=r"s3://.*/nothing has no tar"):
        read_dataset("webdataset", Path(f"{remote}/nothing"))
    assert not source_exists(f"{remote}/train-000009.tar::clip0.mp4")
    with pytest.raises(VideoError, match=r"train-000009\.tar cannot be read"):
        read_frames(f"{remote}/train-000009.tar::clip0.mp4", 3)


def test_two_equal_videos_in_two_splits_are_a_leak(clips, tmp_path):
    content = clips[0].read_bytes()
    for split in ("train", "test"):
        write_tar(tmp_path / f"w/{split}.tar", member("a.mp4", content), member("a.txt", split.encode()))
    prepare("webdataset", "--annotations", tmp_path / "w", "--out", tmp_path / "out")
    done = CliRunner().invoke(app, ["data", "check", str(tmp_path / "out"), "--workers", "1"])
    assert "a leak" in done.output


HOSTILE = {
    "leads out of the archive": [member("../../evil.mp4", b"x"), member("../../evil.txt", b"a caption")],
    "leads out": [member("/tmp/evil.mp4", b"x"), member("/tmp/evil.txt", b"a caption")],
    "is a link": [member("a.mp4", type=tarfile.SYMTYPE, linkname="/etc/passwd"), member("a.txt", b"words")],
    "is a link, or": [member("b.txt", type=tarfile.LNKTYPE, linkname="a.txt"), member("b.mp4", b"x")],
    "no plain file": [member("a.mp4", type=tarfile.FIFOTYPE), member("a.txt", b"words")],
    "is there twice": [member("a.mp4", b"x"), member("a.mp4", b"y"), member("a.txt", b"words")],
    "has two videos": [member("a.mp4", b"x"), member("a.png", png(1)), member("a.txt", b"words")],
    "too many for captions": [member("a.mp4", b"x"), member("a.txt", b"a" * (2**20 + 1))],
    "cannot be read": [member("a.mp4", b"x"), member("a.json", b"[" * 100_000)],
    "a caption is no text": [member("a.mp4", b"x"), member("a.json", b'{"caption": 3}')],
    "can't decode": [member("a.mp4", b"x"), member("a.txt", b"\xff\xfe\xff")],
    "has no captions": [member("a.mp4", b"x"), member("a.json", b"{}")],
    "has no video": [member("a.txt", b"words")],
}


@pytest.mark.parametrize("message", HOSTILE)
def test_hostile_and_broken_shards_are_refused_with_a_reason(message, tmp_path):
    write_tar(tmp_path / "shard.tar", *HOSTILE[message])
    with pytest.raises(DataError, match=message):
        read_dataset("webdataset", tmp_path)
    done = CliRunner().invoke(
        app, ["data", "prepare", "webdataset", "--annotations", str(tmp_path), "--out", str(tmp_path / "out")]
    )
    assert isinstance(done.exception, DataError)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path.parent.parent / "evil.mp4").exists()


def test_links_and_names_that_lead_out_are_never_read(clips, tmp_path):
    """Also where a manifest names them directly."""
    shard = write_tar(
        tmp_path / "shard.tar",
        member("link.mp4", type=tarfile.SYMTYPE, linkname=str(clips[0])),
        member("../out.mp4", clips[0].read_bytes()),
    )
    for name in ("link.mp4", "../out.mp4"):
        with pytest.raises(VideoError, match="has no image, video or folder"):
            read_frames(f"{shard}::{name}", 1)


def test_a_shard_that_claims_more_than_it_has(clips, tmp_path):
    shard = write_tar(
        tmp_path / "shard.tar", member("a.txt", b"words"), member("a.mp4", clips[0].read_bytes())
    )
    whole = shard.read_bytes()
    shard.write_bytes(whole[:4000])
    with pytest.raises(DataError, match="is not a plain tar archive"):
        read_dataset("webdataset", tmp_path)
    info = tarfile.TarInfo("a.mp4")
    info.size = 2**40  # a terabyte
    shard.write_bytes(info.tobuf() + bytes(1024))
    with pytest.raises(DataError, match="ends after the archive does"):
        read_dataset("webdataset", tmp_path)
    name = tarfile.TarInfo("././@LongLink")
    name.type, name.size = tarfile.GNUTYPE_LONGNAME, 2**32
    shard.write_bytes(name.tobuf(tarfile.GNU_FORMAT) + bytes(4096))
    with pytest.raises(DataError, match="a name of 4,294,967,296 bytes"):
        read_dataset("webdataset", tmp_path)
    shard.write_bytes(b"\x1f\x8b" + bytes(2000))
    with pytest.raises(DataError, match="compressed ones must be unpacked"):
        read_dataset("webdataset", tmp_path)


def test_a_damaged_video_in_a_shard_is_one_line(clips, tmp_path):
    write_tar(
        tmp_path / "w/shard.tar",
        member("a.mp4", clips[0].read_bytes()),
        member("a.txt", b"good"),
        member("b.mp4", b"not a video"),
        member("b.txt", b"bad"),
        member("c.mp4", b""),
        member("c.txt", b"empty"),
    )
    done = prepare("webdataset", "--annotations", tmp_path / "w", "--out", tmp_path / "out")
    assert {failure["video_id"]: failure["kind"] for failure in done["failures"]} == {
        "shard/b": "unreadable",
        "shard/c": "zero_length",
    }


def test_no_shards_and_a_useless_option(tmp_path):
    with pytest.raises(DataError, match="has no tar"):
        read_dataset("webdataset", tmp_path)
    with pytest.raises(DataError, match="leave --videos out"):
        read_dataset("webdataset", tmp_path, videos=tmp_path)


# --- Hugging Face datasets ----------------------------------------------------------------------------------


def video_dataset(clips, numbers):
    cells = [{"bytes": clips[n].read_bytes(), "path": str(clips[n])} for n in numbers]
    rows = {"video": cells, "caption": [f"clip number {n}" for n in numbers], "fps": [10] * len(numbers)}
    return datasets.Dataset.from_dict(rows).cast_column("video", datasets.Video())


def numbers_of(images) -> list[int]:
    return [read_number(image) for image in images]


@pytest.mark.parametrize("layout", ["arrow", "parquet"])
def test_a_video_column_is_prepared(layout, clips, tmp_path):
    both = datasets.DatasetDict(
        {
            "train": video_dataset(clips, [0, 1, 2]),
            "validation": video_dataset(clips, [3]),
        }
    )
    folder = tmp_path / "saved"
    if layout == "parquet":
        (folder / "data").mkdir(parents=True)
        for split, rows in both.items():
            rows.to_parquet(folder / f"data/{split}-00000-of-00001.parquet", batch_size=2)
    else:
        both.save_to_disk(str(folder))
    done = prepare("huggingface", "--annotations", folder, "--out", tmp_path / "out")
    assert done["counts"] == {"train": {"videos": 3, "captions": 3}, "val": {"videos": 1, "captions": 1}}
    assert done["failures"] == []
    manifest = read_dataset("huggingface", folder)
    assert manifest.captions("train") == [f"clip number {n}" for n in range(3)]
    assert manifest.videos("train")[1].path.endswith("::video/1.mp4")
    cache = FrameCache(tmp_path / "out/frames")
    for number, row in enumerate([*manifest.videos("train"), *manifest.videos("val")]):
        assert numbers_of(cache.read(row.video_id, 3)) == numbers_of(read_frames(clips[number], 3))
        assert numbers_of(read_frames(manifest.source(row), 3)) == numbers_of(read_frames(clips[number], 3))


def write_table(folder: Path, **columns) -> Path:
    """As others write Parquet: `datasets` itself would take the files into the table."""
    folder.mkdir(parents=True, exist_ok=True)
    cells = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    arrays = {name: pa.array(values, cells if name == "video" else None) for name, values in columns.items()}
    pq.write_table(pa.table(arrays), folder / "rows.parquet")
    return folder


def test_a_table_may_name_files_or_hold_some(clips, tmp_path):
    cells = [
        {"bytes": None, "path": str(clips[0])},
        {"bytes": None, "path": clips[1].name},
        {"bytes": clips[2].read_bytes(), "path": None},
    ]
    folder = write_table(tmp_path / "table", video=cells, text=["a", "b", "c"])
    manifest = read_dataset("huggingface", folder, videos=clips[0].parent)
    paths = [row.path for row in manifest.videos("train")]
    assert paths == [str(clips[0]), str(clips[1]), "rows.parquet::video/2.mp4"]
    for number, row in enumerate(manifest.videos("train")):
        assert numbers_of(read_frames(manifest.source(row), 3)) == numbers_of(read_frames(clips[number], 3))


def test_ids_and_lists_of_captions_and_pictures(tmp_path):
    cells = [{"bytes": png(n), "path": f"{n}.png"} for n in (5, 6)]
    rows = datasets.Dataset.from_dict(
        {
            "image": [*cells, cells[0]],
            "id": ["five", "six", "five"],
            "captions": [["a", "b"], ["c"], ["d"]],
        }
    ).cast_column("image", datasets.Image())
    rows.save_to_disk(str(tmp_path / "pictures"))
    done = prepare("huggingface", "--annotations", tmp_path / "pictures", "--out", tmp_path / "out")
    assert done["counts"] == {"train": {"videos": 2, "captions": 4}}
    cache = FrameCache(tmp_path / "out/frames")  # cells of a table are cached, pictures or not
    assert [read_number(cache.read(name, 1)[0]) for name in ("five", "six")] == [5, 6]
    assert read_dataset("huggingface", tmp_path / "pictures").captions("train") == ["a", "b", "d", "c"]


def test_a_dataset_is_read_prepared_and_trained_on_without_its_library(clips, tmp_path, monkeypatch):
    """And without torchcodec: so no code of theirs, or of the dataset, can run."""
    video_dataset(clips, [0, 1, 2, 3]).save_to_disk(str(tmp_path / "saved"))
    for name in ("datasets", "torchcodec"):
        monkeypatch.setitem(sys.modules, name, None)
    prepare("huggingface", "--annotations", tmp_path / "saved", "--out", tmp_path / "out", "--hold-out", 1)
    source = FrameSource.open(tmp_path / "out", num_frames=3)
    assert source.manifest.counts == {"train": Counts(3, 3), "val": Counts(1, 1)}
    config = RunConfig.load(recipe(tmp_path / "out", epochs=1, batch_size=2))
    best = train(config, tmp_path / "run", device=torch.device("cpu"))
    assert (best / "model.safetensors").is_file()


def test_datasets_that_do_not_fit_are_refused_with_what_to_do(clips, tmp_path):
    def refuse(rows, message):
        folder = tmp_path / message.split()[0].strip("'")
        rows.save_to_disk(str(folder))
        with pytest.raises(DataError, match=message):
            read_dataset("huggingface", folder)

    good = video_dataset(clips, [0, 1])
    refuse(good.remove_columns("video"), "no column of videos or pictures, only caption, fps")
    refuse(good.rename_column("caption", "words"), "has no column of captions, only")
    refuse(
        good.add_column("clip", [str(clips[0])] * 2).cast_column("clip", datasets.Video()), "2 Video columns"
    )
    refuse(good.remove_columns("caption").add_column("caption", ["x", " "]), "row 1: no caption")
    empty = write_table(tmp_path / "empty", video=[{"bytes": None, "path": None}], text=["a"])
    with pytest.raises(DataError, match="no video; take the row out"):
        read_dataset("huggingface", empty)
    with pytest.raises(DataError, match=r"has no \.arrow or \.parquet file"):
        read_dataset("huggingface", tmp_path / "nothing")


def test_a_damaged_table_is_refused(clips, tmp_path):
    video_dataset(clips, [0, 1]).save_to_disk(str(tmp_path / "saved"))
    table = next((tmp_path / "saved").glob("*.arrow"))
    content = table.read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"no table at all" * 99):
        table.write_bytes(damaged)
        with pytest.raises(DataError, match="is not a table that can be read"):
            read_dataset("huggingface", tmp_path / "saved")


def test_damage_inside_a_table_is_refused_too(clips, tmp_path):
    """Offsets that point out of the file, and a page of Parquet that was overwritten."""
    rows = pa.table({"video": [{"bytes": b"x" * 4096, "path": "a"}], "caption": ["a"]})
    (tmp_path / "arrow").mkdir()
    with (
        pa.OSFile(str(tmp_path / "arrow/data.arrow"), "wb") as file,
        pa.ipc.new_stream(file, rows.schema) as out,
    ):
        out.write_table(rows)
    path = tmp_path / "arrow/data.arrow"
    good = path.read_bytes()
    end = (4096).to_bytes(4, "little")
    path.write_bytes(good.replace(bytes(4) + end, bytes(4) + (2**30).to_bytes(4, "little")))
    assert path.read_bytes() != good
    with pytest.raises(DataError, match="is not a table that can be read"):
        read_dataset("huggingface", tmp_path / "arrow")
    folder = write_table(
        tmp_path / "parquet", video=[{"bytes": b"y" * 99, "path": None}], text=["words" * 99]
    )
    table = folder / "rows.parquet"
    content = table.read_bytes()
    table.write_bytes(content[:4] + b"\xff" * (len(content) // 3) + content[4 + len(content) // 3 :])
    with pytest.raises(DataError, match="is not a table that can be read"):
        read_dataset("huggingface", folder)
