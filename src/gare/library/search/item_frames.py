"""Items as they are read to be scored: who they are, which part of which file, and their frames.

Shapes: V items, F frames, D embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from gare.library.filters import Filter
from gare.library.store import Store
from gare.library.store.read_deadline import checked
from gare.library.store.store_schema import is_dense, is_part
from gare.library.store.stored_frames import unpack_frames
from gare.model import GARE
from gare.types import VideoFeatures

if TYPE_CHECKING:
    import pyarrow as pa

SCORE_COLUMNS = ("id", "path", "start", "end", "frames_key", "times", "vectors")
"""What scoring reads of an item."""


def card_keys(rows: pa.Table | pa.RecordBatch) -> list[str]:
    """A name for the frames of each item, under which this machine keeps what it made of them.

    Args:
        rows: with `frames_key`, `start` and `end`.
    """
    columns = (rows.column(name).to_pylist() for name in ("frames_key", "start", "end"))
    return [
        f"{key}#{start:.3f}-{end:.3f}" if is_dense(key) else key
        for key, start, end in zip(*columns, strict=True)
    ]


def list_items(store: Store, where: Filter | None) -> tuple[list[str], list[str]]:
    """The ids of all items that pass the filter, and the name of each one's frames (`card_keys`)."""
    ids: list[str] = []
    keys: list[str] = []
    for batch in checked(store.scan(where=where, columns=["id", "frames_key", "start", "end"])):
        ids += batch.column("id").to_pylist()
        keys += card_keys(batch)
    return ids, keys


class Span(NamedTuple):
    """A part of a file, in seconds."""

    path: str
    start: float
    end: float
    is_dense: bool = False
    """It is a range of dense frames."""
    is_part: bool = False
    """Its file may have other items."""

    def overlaps(self, other: Span) -> bool:
        """Whether they share more than a point in time."""
        return self.path == other.path and self.start < other.end and other.start < self.end


@dataclass(frozen=True)
class ItemFrames:
    """Items with their frames, in the order of a table."""

    ids: list[str]
    spans: list[Span]
    video: VideoFeatures

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def of(cls, rows: pa.Table | pa.RecordBatch, model: GARE) -> ItemFrames:
        """From rows with `SCORE_COLUMNS`, each with its own frames alone; there is at least one."""
        columns = (rows.column(name).to_pylist() for name in ("path", "start", "end", "frames_key"))
        spans = [
            Span(path, start, end, is_dense(key), start > 0 or is_part(key))
            for path, start, end, key in zip(*columns, strict=True)
        ]
        video = unpack_frames(rows.column("vectors"), model.dim, model.device)
        return cls(rows.column("id").to_pylist(), spans, video)
