"""A part of MSR-VTT as stored frames: `frames.csv` (video_id, split, shard, num_frames) beside its tar files.

Its results are not comparable with published 1k-A numbers: the test split is 476 of the 1,000 videos.
"""

from __future__ import annotations

from pathlib import Path

from gare.data.datasets.building import Captions, build, pick, require
from gare.data.datasets.msrvtt import read_captions, read_test
from gare.data.manifest import SPLITS, Counts, Manifest, Split
from gare.data.tables import Problems, read_csv
from gare.errors import DataError


def read(annotations: Path, *, videos: Path | None = None) -> Manifest:
    """Twenty captions for each video of train and val, the single 1k-A caption for test."""
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
