"""Flickr8k: an image with five captions is a one-frame video with five captions."""

from __future__ import annotations

from pathlib import Path

from gare.data.datasets.images import read_captioned_images
from gare.data.manifest import Counts, Manifest


def read(annotations: Path, *, videos: Path | None = None) -> Manifest:
    """`captions.csv` (image, split, caption) beside `train.tar`, `val.tar` and `test.tar`."""
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
