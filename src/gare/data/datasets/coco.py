"""COCO captions, all for training: an image is a one-frame video."""

from __future__ import annotations

from pathlib import Path

from gare.data.datasets.images import read_captioned_images
from gare.data.manifest import Counts, Manifest


def read(annotations: Path, *, videos: Path | None = None) -> Manifest:
    """`captions.csv` (image, shard, caption) beside the shards it names."""
    return read_captioned_images(
        "coco", annotations, videos=videos, expected={"train": Counts(22_349, 75_625)}
    )
