"""Captioned images in tar files: `captions.csv` with image, caption, and split or shard or both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from gare.data.datasets.building import build, require
from gare.data.manifest import SPLITS, Counts, Manifest, Split
from gare.data.tables import Problems, read_csv


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
