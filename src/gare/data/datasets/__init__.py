"""Readers: the public annotation files of each dataset, and your own CSV, into one manifest."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from gare.data.datasets import activitynet, coco, didemo, flickr8k, msrvtt, msrvtt_frames, msvd, own_csv
from gare.data.manifest import Manifest
from gare.errors import DataError

READERS: dict[str, Callable[..., Manifest]] = {
    "msrvtt": msrvtt.read,  # with 9k, the usual training list
    "msrvtt-9k": partial(msrvtt.read, train_list="9k"),
    "msrvtt-7k": partial(msrvtt.read, train_list="7k"),
    "msrvtt-frames": msrvtt_frames.read,
    "msvd": msvd.read,
    "didemo": didemo.read,
    "activitynet": activitynet.read,
    "flickr8k": flickr8k.read,
    "coco": coco.read,
    "csv": own_csv.read,
}


def read_dataset(name: str, annotations: Path, *, videos: Path | None = None) -> Manifest:
    """The manifest of a dataset by name.

    Args:
        name: a key of `READERS`.
        annotations: the folder of annotation files; for `csv`, the file itself.
        videos: the folder of videos, or of frames; without it, paths are the usual file names.
    """
    if name not in READERS:
        raise DataError(f"there is no dataset '{name}'; choose one of {', '.join(READERS)}")
    return READERS[name](annotations, videos=videos)
