"""A Hugging Face dataset with a `Video` or `Image` column: what `save_to_disk` wrote, or Parquet files.

Read with pyarrow alone: neither `datasets` nor torchcodec is needed, and no code of the dataset runs. Videos
stay where they are, in the table or in the files that it names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from gare.data.containers import VIDEO_SUFFIXES
from gare.data.datasets.captions_to_manifest import build
from gare.data.datasets.split_names import split_of_name
from gare.data.manifest import Counts, Manifest, Split
from gare.data.packed_members import (
    IMAGE_SUFFIXES,
    SEPARATOR,
    TABLE_SUFFIXES,
    MediaTable,
    cell_member,
)
from gare.errors import DataError, VideoError

CAPTION_COLUMNS = ("caption", "captions", "text", "texts", "sentence", "sentences")
ID_COLUMNS = ("video_id", "image_id", "id")
_MEDIA = {"Video": (".mp4", VIDEO_SUFFIXES), "Image": (".png", IMAGE_SUFFIXES)}
_SHOWN = 5


def read(annotations: Path, *, videos: Path | None = None) -> Manifest:
    """Every row is a video with one caption, or a list of them.

    Args:
        annotations: the folder that `save_to_disk` wrote, a folder of Parquet files, or one such file.
        videos: the folder that paths in the table start from, if it holds paths; default: that of the table.
    """
    root = annotations if annotations.is_dir() else annotations.parent
    found: dict[Split, dict[str, list[str]]] = {}
    paths: dict[str, str] = {}
    problems: list[str] = []
    for file in _tables(annotations):
        place = file.relative_to(root)
        split = split_of_name(place) or "train"
        try:
            rows = list(_rows(file, place, videos or root, problems))
        except VideoError as error:
            raise DataError(str(error)) from None
        for video_id, path, captions in rows:
            paths.setdefault(video_id, path)  # a video may have a row for each caption
            found.setdefault(split, {}).setdefault(video_id, []).extend(captions)
    if problems:
        more = [f"… and {len(problems) - _SHOWN} more like these"] if len(problems) > _SHOWN else []
        raise DataError("\n".join(problems[:_SHOWN] + more))
    counted = {
        split: Counts(len(by_video), sum(map(len, by_video.values()))) for split, by_video in found.items()
    }
    return build(
        annotations.stem, "a Hugging Face dataset", found, videos=root, paths=paths, expected=counted
    )


def _tables(annotations: Path) -> list[Path]:
    """The files of a dataset: every table below the folder, but for what `datasets` keeps for itself."""
    if annotations.is_file() and annotations.suffix in TABLE_SUFFIXES:
        return [annotations]
    files = sorted(
        path
        for path in annotations.rglob("*")
        if path.suffix in TABLE_SUFFIXES and path.is_file() and not path.name.startswith("cache-")
    )
    if not files:
        raise DataError(
            f"{annotations} has no .arrow or .parquet file; give the folder that save_to_disk wrote, or one "
            "of Parquet files"
        )
    return files


def _rows(file: Path, place: Path, root: Path, problems: list[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Id, source and captions of each row; what is wrong with a row is noted."""
    table = MediaTable(str(file))
    column, kind = _media_column(table, file)
    captions = table.values(_caption_column(table, file))
    id_column = next((name for name in ID_COLUMNS if name in table.columns), None)
    ids = table.values(id_column) if id_column else [None] * table.num_rows
    for row, (path, has_bytes) in enumerate(table.contents(column)):
        texts, where = _texts(captions[row]), f"{file}, row {row}"
        if not texts:
            problems.append(f"{where}: no caption; write one or take the row out")
        elif not path and not has_bytes:
            problems.append(f"{where}: no {kind.lower()}; take the row out")
        else:
            video_id = str(ids[row]) if ids[row] is not None else f"{place.with_suffix('').as_posix()}/{row}"
            cell = cell_member(column, row, _suffix(path or "", kind))
            source = (
                f"{place.as_posix()}{SEPARATOR}{cell}" if has_bytes else str((root / (path or "")).resolve())
            )
            yield video_id, source, texts


def _suffix(path: str, kind: str) -> str:
    """The ending of a cell's name, which says what it is."""
    usual, endings = _MEDIA[kind]
    suffix = PurePosixPath(path).suffix.lower()
    return suffix if suffix in endings else usual


def _media_column(table: MediaTable, file: Path) -> tuple[str, str]:
    """The column of videos, or of pictures if there is none, and which of the two it is."""
    kinds = _declared_kinds(table)
    for kind in _MEDIA:
        columns = [name for name in table.columns if kinds.get(name) == kind]
        if len(columns) == 1:
            return columns[0], kind
        if columns:
            raise DataError(f"{file} has {len(columns)} {kind} columns, {', '.join(columns)}; keep one")
    raise DataError(
        f"{file} has no column of videos or pictures, only {', '.join(table.columns)}; make it one: "
        "dataset.cast_column('video', datasets.Video())"
    )


def _declared_kinds(table: MediaTable) -> dict[str, str]:
    """What `datasets` notes of each column, or what columns named video and image must be."""
    noted = (table.schema.metadata or {}).get(b"huggingface", b"{}")
    try:
        features = json.loads(noted)["info"]["features"]
        return {
            name: value["_type"] for name, value in features.items() if isinstance(value.get("_type"), str)
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return {name: name.capitalize() for name in ("video", "image") if name in table.columns}


def _caption_column(table: MediaTable, file: Path) -> str:
    column = next((name for name in CAPTION_COLUMNS if name in table.columns), None)
    if column is None:
        raise DataError(
            f"{file} has no column of captions, only {', '.join(table.columns)}; name it "
            f"{CAPTION_COLUMNS[0]}: dataset.rename_column('…', '{CAPTION_COLUMNS[0]}')"
        )
    return column


def _texts(given: Any) -> list[str]:
    """The captions of a cell: a string, or a list of strings."""
    listed = given if isinstance(given, list) else [given]
    return [text.strip() for text in listed if isinstance(text, str) and text.strip()]
