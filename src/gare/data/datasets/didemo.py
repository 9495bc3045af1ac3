"""DiDeMo as paragraph retrieval: all descriptions of a video, joined in the order of the file."""

from __future__ import annotations

from pathlib import Path

from gare.data.annotation_files import Problems, read_csv, read_json
from gare.data.datasets.captions_to_manifest import Captions, build, find, join_sentences, require
from gare.data.manifest import Counts, Manifest, Split
from gare.errors import DataError


def read(annotations: Path, *, videos: Path | None = None) -> Manifest:
    """Official `{train,val,test}_data.json`; for train also `train_paragraphs.csv`, already joined.

    Published results use 1,065 / 1,004 of the 1,094 / 1,037 val / test videos: those that could be had.
    """
    official_train = find(annotations, "train_data.json")
    splits: dict[Split, Captions] = {
        "train": _read_official(official_train)
        if official_train
        else _read_joined(require(annotations, "train_paragraphs.csv", "train_data.json")),
        "val": _read_official(require(annotations, "val_data.json")),
        "test": _read_official(require(annotations, "test_data.json")),
    }
    expected: dict[Split, Counts] = {"val": Counts(1_094, 1_094), "test": Counts(1_037, 1_037)}
    if not official_train:
        expected = {"train": Counts(8_362, 8_362), **expected}
    return build("didemo", "paragraphs", splits, videos=videos, expected=expected)


def _read_official(path: Path) -> dict[str, list[str]]:
    sentences: dict[str, list[str]] = {}
    try:
        for number, row in enumerate(read_json(path), start=1):
            if not row["description"].strip():
                raise DataError(
                    f"{path}, entry {number}: empty description for {row['video']}; delete the entry"
                )
            sentences.setdefault(row["video"], []).append(row["description"])
    except (KeyError, TypeError, AttributeError):
        raise DataError(f'{path} must be [{{"video": …, "description": …}}, …]') from None
    return {video_id: [join_sentences(parts)] for video_id, parts in sentences.items()}


def _read_joined(path: Path) -> dict[str, list[str]]:
    problems = Problems(path)
    paragraphs: dict[str, list[str]] = {}
    for line, row in read_csv(path, ["video", "paragraph"]):
        if row["video"] in paragraphs:
            problems.add(line, f"{row['video']} is there twice; join its paragraphs into one line")
        if not row["paragraph"]:
            problems.add(line, f"empty paragraph for {row['video']}; write one or delete the line")
        paragraphs[row["video"]] = [row["paragraph"]]
    problems.raise_if_any()
    return paragraphs
