"""MSVD: about forty captions per video, each of them a query."""

from __future__ import annotations

from pathlib import Path

from gare.data.annotation_files import read_json, read_list
from gare.data.datasets.captions_to_manifest import Captions, build, find, pick, require
from gare.data.manifest import SPLITS, Counts, Manifest, Split
from gare.errors import DataError

CAPTIONS_FILE = "captions_msvd.json"


def read(annotations: Path, *, videos: Path | None = None) -> Manifest:
    """Train, val and test splits with all captions."""
    if not find(annotations, CAPTIONS_FILE) and find(annotations, "raw-captions.pkl"):
        raise DataError(
            f"{annotations / 'raw-captions.pkl'} is a pickle, and opening a pickle can run any program. "
            f'Use {CAPTIONS_FILE}: {{"video id": ["caption", …], …}}'
        )
    path = require(annotations, CAPTIONS_FILE)
    captions = read_json(path)
    if not isinstance(captions, dict) or not all(isinstance(texts, list) for texts in captions.values()):
        raise DataError(f'{path} must be {{"video id": ["caption", …], …}}')
    splits: dict[Split, Captions] = {}
    for split in SPLITS:
        list_path = require(annotations, f"{split}_list.txt")
        splits[split] = pick(read_list(list_path), captions, list_path, path.name)
    return build(
        "msvd",
        "all captions, each a query",
        splits,
        videos=videos,
        suffix=".avi",
        expected={"train": Counts(1_200, 48_774), "val": Counts(100, 4_290), "test": Counts(670, 27_763)},
        repeated_captions=True,
    )
