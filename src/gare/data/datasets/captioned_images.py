"""Captioned images in tar files, COCO and Flickr8k: an image is a one-frame video.

All of them have `captions.csv` with image, caption, and split or shard or both.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from gare.data.annotation_files import Problems, read_csv
from gare.data.datasets.captions_to_manifest import build, require
from gare.data.manifest import SPLITS, Counts, Manifest, Split


def read_coco(annotations: Path, *, videos: Path | None = None) -> Manifest:
    """COCO captions, all for training: `captions.csv` (image, shard, caption) beside the shards it names."""
    return read_captioned_images(
        "coco", annotations, videos=videos, expected={"train": Counts(22_349, 75_625)}
    )


def read_flickr8k(annotations: Path, *, videos: Path | None = None) -> Manifest:
    """Five captions an image: `captions.csv` (image, split, caption) beside `train.tar` and the others."""
    return read_captioned_images(
        "flickr8k",
        annotations,
        videos=videos,
        expected={
            "train": Counts(6_341, 31_705),
            "val": Counts(250, 1_250),
            "test": Counts(1_000, 5_000),
        },
    )


def read_captioned_images(
    name: str, annotations: Path, *, videos: Path | None, expected: Mapping[Split, Counts]
) -> Manifest:
    """Without a split column all images are for training; without a shard column, shards bear split names."""
    path = require(annotations, "captions.csv")
    problems = Problems(path)
    captions: dict[Split, dict[str, list[str]]] = {}
    paths: dict[str, str] = {}
    for line, row in read_csv(path, ["image", "caption"], ["split", "shard"]):
        split = next((split for split in SPLITS if split == row.get("split", "train")), None)
        if split is None:
            problems.add(line, f"split '{row['split']}' is not one of {', '.join(SPLITS)}")
            continue
        if not row["caption"]:
            problems.add(line, f"empty caption for {row['image']}; write one or delete the line")
        image_id = PurePosixPath(row["image"]).stem
        captions.setdefault(split, {}).setdefault(image_id, []).append(row["caption"])
        paths[image_id] = f"{row.get('shard', split + '.tar')}::{row['image']}"
    problems.raise_if_any()
    return build(
        name,
        "images as one-frame videos",
        captions,
        videos=videos or annotations,
        paths=paths,
        expected=expected,
        repeated_captions=True,
    )
