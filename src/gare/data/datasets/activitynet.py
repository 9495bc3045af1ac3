"""ActivityNet Captions as paragraph retrieval; the test set of the literature is `val_1`."""

from __future__ import annotations

from pathlib import Path

from gare.data.annotation_files import read_json
from gare.data.datasets.captions_to_manifest import build, join_sentences, require
from gare.data.manifest import Counts, Manifest
from gare.errors import DataError


def read(annotations: Path, *, videos: Path | None = None) -> Manifest:
    """Train and test splits, one paragraph for each video."""
    return build(
        "activitynet",
        "paragraphs, val_1 as test",
        {
            "train": _read(require(annotations, "train.json")),
            "test": _read(require(annotations, "val_1.json")),
        },
        videos=videos,
        expected={"train": Counts(10_009, 10_009), "test": Counts(4_917, 4_917)},
    )


def _read(path: Path) -> dict[str, list[str]]:
    try:
        paragraphs = {
            video_id: join_sentences(entry["sentences"]) for video_id, entry in read_json(path).items()
        }
    except (KeyError, TypeError, AttributeError):
        raise DataError(f'{path} must be {{"video id": {{"sentences": ["…", …]}}, …}}') from None
    empty = [video_id for video_id, paragraph in paragraphs.items() if not paragraph]
    if empty:
        raise DataError(
            f"{path}: {len(empty)} videos without a sentence, such as {empty[0]}; delete the entries"
        )
    return {video_id: [paragraph] for video_id, paragraph in paragraphs.items()}
