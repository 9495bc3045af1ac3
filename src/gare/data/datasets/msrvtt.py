"""MSR-VTT: train on 9,000 or 7,010 videos, test on the 1,000 pairs of 1k-A (JSFUSION); a part as frames."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from gare.data.annotation_files import Problems, read_csv, read_json
from gare.data.datasets.captions_to_manifest import Captions, build, find, pick, require
from gare.data.manifest import SPLITS, Counts, Manifest, Split
from gare.errors import DataError

TEST_FILE = "MSRVTT_JSFUSION_test.csv"
_ONE_CAPTION_FILE = "train9k_one_caption.csv"
_NUM_TRAIN = {"9k": 9_000, "7k": 7_010}


def read(
    annotations: Path, *, videos: Path | None = None, train_list: Literal["9k", "7k"] = "9k"
) -> Manifest:
    """Train and test splits; this protocol has no `val`, so hold one out, or select on test and say so.

    Training captions: all twenty from `MSRVTT_data.json` or the two official files (plain or zipped) where
    they are present, else the one of `train9k_one_caption.csv`.
    """
    captions, where = read_captions(annotations)
    list_path = require(annotations, f"MSRVTT_train.{train_list}.csv")
    listed = ((line, row["video_id"]) for line, row in read_csv(list_path, ["video_id"]))
    train = pick(listed, captions, list_path, where)
    test = read_test(annotations)
    leaked = train.keys() & test.keys()
    if leaked:
        raise DataError(
            f"{list_path} trains on {len(leaked)} test videos, such as {min(leaked)}; remove them"
        )
    per_video = 1 if where == _ONE_CAPTION_FILE else 20
    num_train = _NUM_TRAIN[train_list]
    return build(
        f"msrvtt-{train_list}",
        f"1k-A test, {per_video} caption{'s' * (per_video > 1)} per training video",
        {"train": train, "test": test},
        videos=videos,
        expected={"train": Counts(num_train, num_train * per_video), "test": Counts(1_000, 1_000)},
        repeated_captions=True,
    )


def read_frames(annotations: Path, *, videos: Path | None = None) -> Manifest:
    """A part of MSR-VTT as stored frames: `frames.csv` (video_id, split, shard, num_frames) beside its tars.

    Twenty captions for each video of train and val, the single 1k-A caption for test. Results are not
    comparable with published 1k-A numbers: the test split is 476 of the 1,000 videos.
    """
    if videos is None:
        raise DataError("msrvtt-frames needs the folder with frames.csv and its tar files: --videos FOLDER")
    listing = require(videos, "frames.csv")
    problems = Problems(listing)
    listed: dict[str, list[tuple[int, str]]] = {split: [] for split in SPLITS}
    paths: dict[str, str] = {}
    for line, row in read_csv(listing, ["video_id", "split", "shard"]):
        if row["split"] not in listed:
            problems.add(line, f"split '{row['split']}' is not one of {', '.join(SPLITS)}")
            continue
        listed[row["split"]].append((line, row["video_id"]))
        paths[row["video_id"]] = f"{row['shard']}::{row['video_id']}/"
    problems.raise_if_any()
    captions, where = read_captions(annotations)
    test = read_test(annotations)
    splits: dict[Split, Captions] = {
        split: pick(listed[split], test if split == "test" else captions, listing, where)
        for split in SPLITS
        if listed[split]
    }
    return build(
        "msrvtt-frames",
        "MSR-VTT frames, 476-video subset of 1k-A",
        splits,
        videos=videos,
        paths=paths,
        expected={"train": Counts(3_851, 77_020), "val": Counts(250, 5_000), "test": Counts(476, 476)},
        repeated_captions=True,
    )


def read_captions(annotations: Path) -> tuple[Captions, str]:
    """Captions of every video by id, and the name of the file they are from."""
    together = find(annotations, "MSRVTT_data.json", "MSRVTT_data.json.zip")
    official = [
        path
        for part in ("train_val", "test")
        if (path := find(annotations, f"{part}_videodatainfo.json", f"{part}_videodatainfo.json.zip"))
    ]
    paths = [together] if together else official
    if not paths:
        path = require(annotations, _ONE_CAPTION_FILE, "MSRVTT_data.json", "train_val_videodatainfo.json.zip")
        return _read_pairs(path), path.name
    captions: dict[str, list[str]] = {}
    for path in paths:
        try:
            for sentence in read_json(path)["sentences"]:
                captions.setdefault(sentence["video_id"], []).append(sentence["caption"].strip())
        except (KeyError, TypeError, AttributeError):
            raise DataError(
                f"{path} is not an MSR-VTT annotation; expected "
                '{"sentences": [{"video_id": …, "caption": …}, …]}'
            ) from None
    return captions, " and ".join(path.name for path in paths)


def read_test(annotations: Path) -> dict[str, list[str]]:
    """The one caption of each 1k-A test video, in the order of the file."""
    return _read_pairs(require(annotations, TEST_FILE))


def _read_pairs(path: Path) -> dict[str, list[str]]:
    """A CSV with one caption per video."""
    problems = Problems(path)
    captions: dict[str, list[str]] = {}
    for line, row in read_csv(path, ["video_id", "sentence"]):
        if row["video_id"] in captions:
            problems.add(line, f"{row['video_id']} is there twice; delete one of the two lines")
        if not row["sentence"]:
            problems.add(line, f"empty sentence for {row['video_id']}; write it or get the original file")
        captions[row["video_id"]] = [row["sentence"]]
    problems.raise_if_any()
    return captions
