"""Columns of pictures and videos of a `datasets.Dataset`, as what a model encodes.

Videos are never decoded by `datasets` (it needs torchcodec): a cell is taken as its bytes or its path, and
gare's own decoder reads it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gare.errors import DataError
from gare.model.plain_encoding import as_clip


def undecoded(rows: Any, column: str) -> Any:
    """The same rows with a `Video` column as bytes and paths."""
    import datasets

    if column not in rows.column_names:
        raise DataError(f"there is no column '{column}', only {', '.join(rows.column_names)}")
    kept = rows.select_columns([column])
    if isinstance(kept.features[column], datasets.Video):
        return kept.cast_column(column, datasets.Video(decode=False))
    return kept


@contextmanager
def videos_of_cells(cells: Sequence[Any], column: str) -> Iterator[list[Any]]:
    """Cells as `GARE.frame_features` takes videos: paths, or lists of pictures.

    Bytes lie in files while the block lasts.
    """
    with TemporaryDirectory(prefix="gare-") as folder:
        yield [_video_of(cell, Path(folder) / str(number), column) for number, cell in enumerate(cells)]


def _video_of(cell: Any, place: Path, column: str) -> Any:
    if cell is None:
        raise DataError(f"the column '{column}' has an empty cell; take its row out")
    if isinstance(cell, dict) and {"path", "bytes"} <= cell.keys():
        if cell["bytes"] is None:
            return cell["path"]
        place.write_bytes(cell["bytes"])
        return os.fspath(place)
    return as_clip(cell)
