"""Readers: the public annotation files of each dataset, and your own CSV, into one manifest.

One file a dataset, or a kind of them. A reader of your own is a function and a line:

    def read(annotations: Path, *, videos: Path | None = None) -> Manifest: ...

    DATASETS.register("my-set", read)

`gare data prepare my-set` then makes it ready to train and evaluate on. An installed package offers one by an
entry point in the group `gare.datasets`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Protocol

from gare.data.datasets import (
    activitynet,
    captioned_images,
    didemo,
    hub_dataset,
    msrvtt,
    msvd,
    own_csv,
    webdataset_shards,
)
from gare.data.manifest import Manifest
from gare.registry import Registry


class Reader(Protocol):
    """Reads the annotation files of a dataset."""

    def __call__(self, annotations: Path, *, videos: Path | None = None) -> Manifest:
        """Captions, videos and splits; what is wrong with a file is raised as DataError.

        Args:
            annotations: the folder of annotation files, or the one file there is.
            videos: the folder of videos, or of frames; without it, paths are the usual file names.
        """


DATASETS: Registry[Reader] = Registry(
    "dataset",
    {
        "msrvtt": msrvtt.read,  # with 9k, the usual training list
        "msrvtt-9k": partial(msrvtt.read, train_list="9k"),
        "msrvtt-7k": partial(msrvtt.read, train_list="7k"),
        "msrvtt-frames": msrvtt.read_frames,
        "msvd": msvd.read,
        "didemo": didemo.read,
        "activitynet": activitynet.read,
        "flickr8k": captioned_images.read_flickr8k,
        "coco": captioned_images.read_coco,
        "csv": own_csv.read,
        "huggingface": hub_dataset.read,
        "webdataset": webdataset_shards.read,
    },
)


def read_dataset(name: str, annotations: Path, *, videos: Path | None = None) -> Manifest:
    """The manifest of a dataset by its name in `DATASETS`; for `csv`, `annotations` is the file itself."""
    return DATASETS[name](annotations, videos=videos)
