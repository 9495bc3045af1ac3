"""Readers on the real annotation files, and on broken copies of them."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from pathlib import Path

import pytest

from gare.data.datasets import DATASETS, read_dataset
from gare.data.manifest import Counts
from gare.errors import ConfigError, DataError

REAL = [
    ("msrvtt-9k", "annotations/msrvtt", None, {"train": (9_000, 180_000), "test": (1_000, 1_000)}),
    ("msrvtt-7k", "annotations/msrvtt", None, {"train": (7_010, 140_200), "test": (1_000, 1_000)}),
    (
        "msrvtt-frames",
        "annotations/msrvtt",
        "data/msrvtt_frames",
        {"train": (3_851, 77_020), "val": (250, 5_000), "test": (476, 476)},
    ),
    (
        "msvd",
        "annotations/msvd",
        None,
        {"train": (1_200, 48_774), "val": (100, 4_290), "test": (670, 27_763)},
    ),
    (
        "didemo",
        "annotations/didemo",
        None,
        {"train": (8_362, 8_362), "val": (1_094, 1_094), "test": (1_037, 1_037)},
    ),
    ("activitynet", "annotations/activitynet", None, {"train": (10_009, 10_009), "test": (4_917, 4_917)}),
    (
        "flickr8k",
        "data/flickr8k",
        None,
        {"train": (6_341, 31_705), "val": (250, 1_250), "test": (1_000, 5_000)},
    ),
    ("coco", "data/coco_captions", None, {"train": (22_349, 75_625)}),
]


@pytest.mark.parametrize(("name", "annotations", "videos", "counts"), REAL, ids=[case[0] for case in REAL])
def test_real_annotations_give_the_published_counts(
    shared: Path, name: str, annotations: str, videos: str | None, counts: dict[str, tuple[int, int]]
) -> None:
    manifest = read_dataset(name, shared / annotations, videos=shared / videos if videos else None)
    assert manifest.counts == {split: Counts(*numbers) for split, numbers in counts.items()}
    manifest.check_counts()


def test_1ka_keeps_the_order_and_its_duplicates(shared: Path) -> None:
    manifest = read_dataset("msrvtt-9k", shared / "annotations/msrvtt")
    assert manifest.videos("test")[0].video_id == "video9770"
    assert manifest.captions("test")[1] == "a little girl does gymnastics"
    assert len(set(manifest.captions("test"))) == 995
    train = {video.video_id for video in manifest.videos("train")}
    assert not train & {video.video_id for video in manifest.videos("test")}


def test_every_form_of_the_msrvtt_captions_is_read(shared: Path, tmp_path: Path) -> None:
    source = shared / "annotations/msrvtt"
    sentences = []
    for part in ("train_val", "test"):
        with zipfile.ZipFile(source / f"{part}_videodatainfo.json.zip") as archive:
            sentences += json.loads(archive.read(f"{part}_videodatainfo.json"))["sentences"]
    for name in ("MSRVTT_train.9k.csv", "MSRVTT_JSFUSION_test.csv", "train9k_one_caption.csv"):
        shutil.copy(source / name, tmp_path)
    one = read_dataset("msrvtt-9k", tmp_path)
    assert one.counts["train"] == Counts(9_000, 9_000)
    one.check_counts()
    (tmp_path / "MSRVTT_data.json").write_text(json.dumps({"videos": [], "sentences": sentences}))
    together = read_dataset("msrvtt-9k", tmp_path)
    assert together.rows == read_dataset("msrvtt-9k", source).rows


def test_paragraphs_are_sentences_joined_by_one_space(shared: Path) -> None:
    activitynet = read_dataset("activitynet", shared / "annotations/activitynet")
    assert activitynet.captions("test")[0] == (
        "A weight lifting tutorial is given. The coach helps the guy in red with the proper body placement "
        "and lifting technique."
    )


# --- small files with one mistake each ------------------------------------------------------------------


@pytest.fixture
def msrvtt(tmp_path: Path) -> Path:
    captions = {"sentences": [{"video_id": f"video{n}", "caption": f"caption {n}"} for n in range(4)]}
    (tmp_path / "MSRVTT_data.json").write_text(json.dumps(captions))
    (tmp_path / "MSRVTT_train.9k.csv").write_text("video_id\nvideo0\nvideo1\n")
    (tmp_path / "MSRVTT_JSFUSION_test.csv").write_text(
        "key,vid_key,video_id,sentence\nret0,msr2,video2,a dog\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("MSRVTT_train.9k.csv", "id\nvideo0\n", "line 1: no column video_id, found id"),
        (
            "MSRVTT_train.9k.csv",
            "video_id\nvideo0\nvideo77\n",
            "line 3: video77 has no captions in MSRVTT_data",
        ),
        ("MSRVTT_train.9k.csv", "video_id\nvideo0\nvideo0\n", "line 3: video0 is already in line 2; delete"),
        ("MSRVTT_train.9k.csv", "video_id\nvideo2\n", "trains on 1 test videos, such as video2; remove"),
        ("MSRVTT_JSFUSION_test.csv", "video_id,sentence\nvideo2,\n", "line 2: empty sentence for video2"),
        (
            "MSRVTT_JSFUSION_test.csv",
            "video_id,sentence\nvideo2,a\nvideo2,b\n",
            "line 3: video2 is there twice",
        ),
        ("MSRVTT_JSFUSION_test.csv", "video_id,sentence\nvideo2,a, b\n", "line 2: 3 fields instead of 2"),
        ("MSRVTT_data.json", '{"sentences":\n [}', "line 2: this is not JSON"),
        ("MSRVTT_data.json", '{"sentences": [{"id": 1}]}', "is not an MSR-VTT annotation"),
        (
            "MSRVTT_data.json",
            '{"sentences": [{"video_id": "video0", "caption": " "}]}',
            "video0 has an empty caption",
        ),
    ],
)
def test_broken_msrvtt_files(msrvtt: Path, file: str, text: str, message: str) -> None:
    (msrvtt / file).write_text(text)
    with pytest.raises(DataError, match=message):
        read_dataset("msrvtt-9k", msrvtt)


def test_a_byte_order_mark_is_no_mistake(msrvtt: Path) -> None:
    list_path = msrvtt / "MSRVTT_train.9k.csv"
    list_path.write_bytes(b"\xef\xbb\xbf" + list_path.read_bytes().replace(b"\n", b"\r\n"))
    assert read_dataset("msrvtt-9k", msrvtt).counts["train"] == Counts(2, 2)


def test_incomplete_annotations_do_not_pass_for_the_dataset(msrvtt: Path) -> None:
    with pytest.raises(
        DataError, match="train: 2 videos, 2 captions instead of 9,000 videos, 180,000 captions"
    ):
        read_dataset("msrvtt-9k", msrvtt).check_counts()


def test_broken_msvd_files(tmp_path: Path) -> None:
    (tmp_path / "raw-captions.pkl").write_bytes(b"\x80\x04.")
    with pytest.raises(DataError, match=r"is a pickle.*Use captions_msvd.json"):
        read_dataset("msvd", tmp_path)
    (tmp_path / "captions_msvd.json").write_text('{"a": ["one"], "b": ["two"]}')
    for split, ids in {"train": "a\n", "val": "b\n", "test": "a\n\nc\n"}.items():
        (tmp_path / f"{split}_list.txt").write_text(ids)
    with pytest.raises(DataError, match=r"test_list.txt, line 3: c has no captions"):
        read_dataset("msvd", tmp_path)
    (tmp_path / "test_list.txt").write_text("a\n")
    with pytest.raises(DataError, match="'test', but line 1 has it in 'train'"):
        read_dataset("msvd", tmp_path)


def test_broken_paragraph_files(tmp_path: Path) -> None:
    (tmp_path / "train_paragraphs.csv").write_text("video,paragraph\na.avi,text\nb.avi,\n")
    with pytest.raises(DataError, match="line 3: empty paragraph for b"):
        read_dataset("didemo", tmp_path)
    (tmp_path / "train_paragraphs.csv").write_text("video,paragraph\na.avi,text\n")
    (tmp_path / "val_data.json").write_text('[{"video": "v.avi", "description": " "}]')
    with pytest.raises(DataError, match="entry 1: empty description for v"):
        read_dataset("didemo", tmp_path)
    (tmp_path / "train.json").write_text('{"v_1": {"sentences": []}}')
    with pytest.raises(DataError, match="1 videos without a sentence, such as v_1"):
        read_dataset("activitynet", tmp_path)


def test_files_are_found_whatever_their_suffix(tmp_path: Path) -> None:
    annotations, videos = tmp_path / "annotations", tmp_path / "videos"
    annotations.mkdir()
    (annotations / "train_paragraphs.csv").write_text(
        "video,paragraph\n" + "".join(f"{name}.avi,text {name}\n" for name in "abcd")
    )
    for split in ("val", "test"):
        entry = [{"video": f"{split}.mov", "description": "text"}]
        (annotations / f"{split}_data.json").write_text(json.dumps(entry))
    (videos / "deep/c").mkdir(parents=True)
    for name in ("a.avi", "b.avi.mp4", "deep/c/00.jpg", "val.mp4"):
        (videos / name).touch()
    manifest = read_dataset("didemo", annotations, videos=videos)
    assert [video.path for video in manifest.videos("train")] == ["a.avi", "b.avi.mp4", "deep/c", "d.avi"]
    assert [video.path for video in manifest.videos("val")] == ["val.mp4"]
    assert manifest.source(manifest.videos("val")[0]) == str(videos / "val.mp4")
    with pytest.raises(DataError, match="is not a folder; give the folder that holds the videos"):
        read_dataset("didemo", annotations, videos=tmp_path / "none")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file,text\na.mp4,x\n", "line 1: no column video, caption, found file, text"),
        ("video,caption\na.mp4,\n", "line 2: empty caption for a.mp4"),
        ("video,caption\n,a dog\n", "line 2: empty video"),
        ("video,caption\na.mp4,x\na.mp4,x\n", "line 3: the same video and caption as line 2"),
        (
            "video,caption\na.mp4,one, two\n",
            "line 2: 3 fields instead of 2; put a text with commas in quotes",
        ),
        ("video,caption,split\na.mp4,x,dev\n", "line 2: split 'dev' is not one of train, val, test"),
        ("video,caption\n", "has no captions; write one line per caption"),
    ],
)
def test_mistakes_in_your_own_csv(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "captions.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_dataset("csv", path)


def test_your_own_csv(tmp_path: Path) -> None:
    path = tmp_path / "captions.csv"
    path.write_text('\ufeffcaption,video\na dog,a.mp4\n"one, two",b.mp4\na puppy,a.mp4\n', encoding="utf-8")
    manifest = read_dataset("csv", path)
    assert manifest.counts == {"train": Counts(2, 3)}
    assert manifest.source(manifest.videos("train")[0]) == str(tmp_path / "a.mp4")
    with pytest.raises(DataError, match="is a folder; give the CSV file"):
        read_dataset("csv", tmp_path)


def test_the_documentation_names_every_dataset_and_its_counts() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs/data.md").read_text(encoding="utf-8")
    named = set(re.findall(r"gare data prepare ([\w-]+)", text))
    assert named | {"msrvtt"} == set(DATASETS)
    for _, _, _, counts in REAL:
        for videos, captions in counts.values():
            assert f"{videos:,}" in text
            assert f"{captions:,}" in text


def test_a_wrong_name_lists_the_right_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=", ".join(DATASETS)):
        read_dataset("msrvt", tmp_path)
    with pytest.raises(DataError, match="is not a folder"):
        read_dataset("msvd", tmp_path / "none")
