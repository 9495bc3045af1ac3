"""Reads the data of items (frame vectors, times, pictures, stage-1 vectors); compares it with checksums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gare.library.check.check_report import Finding
from gare.library.search.stage1 import stage1_vectors
from gare.library.store import Store, fetch_readable
from gare.library.store.row_checksums import (
    CHECKSUM_COLUMN,
    damaged_frame_columns,
    damaged_item_columns,
    vector_bytes,
)
from gare.library.store.store_schema import frame_schema, item_schema
from gare.library.store.stored_frames import own_frames, unpack_frames

if TYPE_CHECKING:
    import pyarrow as pa

    from gare.model import GARE

ROWS_AT_ONCE = 512
_MOST_DIFFERENCE = 0.02
"""Stage-1 vectors are made of frame vectors before they are rounded to float16: they differ by .001."""


@dataclass
class DataDamage:
    """What was found in the data of items."""

    columns: dict[str, set[str]] = field(default_factory=dict)
    """By id: "row", "vector", "vectors", "times", "thumbnail", "strip"; or "all" where it cannot be read."""
    findings: list[Finding] = field(default_factory=list)

    def add(self, item: str, path: str, columns: Sequence[str], why: str = "") -> None:
        """Note damaged columns of an item."""
        self.columns.setdefault(item, set()).update(columns)
        what = ", ".join(_NAMES[name] for name in columns)
        kind = _kind_of(columns)
        message = f"item {item} of {path}: {what} {why or 'not as written'}"
        self.findings.append(Finding(kind, message, path, item))


_NAMES = {
    "row": "its row",
    "vector": "its stage-1 vector",
    "vectors": "frame vectors",
    "times": "times",
    "thumbnail": "thumbnail",
    "strip": "strip",
    "all": "its data",
    "wrong": "its stage-1 vector",
}


def _kind_of(columns: Sequence[str]) -> str:
    if "all" in columns:
        return "unreadable"
    if "row" in columns:
        return "damaged_item"
    if "wrong" in columns:
        return "wrong_vector"
    return "damaged_vector" if list(columns) == ["vector"] else "damaged_frames"


def read_items(
    store: Store, ids: Sequence[str], paths: Callable[[str], str], model: GARE | None, damage: DataDamage
) -> None:
    """Read everything of these items, some at a time, and note what is not as it was written.

    Args:
        paths: the file of an item, for messages.
        model: compare stage-1 vectors with what it makes of the frames.
    """
    columns = [*item_schema(store.stamp.stage1_dim).names, CHECKSUM_COLUMN]
    columns = list(dict.fromkeys([*columns, *frame_schema().names]))
    table, lost = fetch_readable(store, ids, columns)
    for item, why in lost.items():
        damage.add(item, paths(item), ["all"], f"cannot be read: {why}")
    _compare_checksums(store, table, damage)
    if model is not None and len(table):
        _compare_with_model(table, model, damage)


def _compare_checksums(store: Store, table: pa.Table, damage: DataDamage) -> None:
    rows = table.drop_columns(["vector"]).to_pylist()
    for row, vector in zip(rows, vector_bytes(table["vector"]), strict=True):
        columns = damaged_item_columns(row, vector)
        columns += damaged_frame_columns(row["frames_key"], row)
        columns += [name for name in _misshapen(row, store.stamp.dim) if name not in columns]
        if not np.isfinite(np.frombuffer(vector, "<f4")).all() and "vector" not in columns:
            columns.append("vector")
        if columns:
            damage.add(row["id"], row["path"], columns)


def _misshapen(row: dict[str, Any], dim: int) -> list[str]:
    """What cannot be right, whatever the checksums say."""
    size = len(row["vectors"])
    if not size or size % (2 * dim):
        return ["vectors"]
    return ["times"] if len(row["times"]) != size // (2 * dim) else []


@torch.no_grad()
def _compare_with_model(table: pa.Table, model: GARE, damage: DataDamage) -> None:
    ids = table["id"].to_pylist()
    good = [item not in damage.columns for item in ids]
    table = table.filter(good)
    if not len(table):
        return
    expected = stage1_of(table, model)
    found = np.stack(table["vector"].to_pylist()).astype(np.float32)
    error = np.linalg.norm(found - expected, axis=1) / np.maximum(np.linalg.norm(expected, axis=1), 1e-6)
    for row in np.nonzero(~(error < _MOST_DIFFERENCE))[0].tolist():
        item, path = table["id"][row].as_py(), table["path"][row].as_py()
        damage.add(item, path, ["wrong"], f"is not what the model makes of its frames ({error[row]:.0%} off)")


def stage1_of(table: pa.Table, model: GARE) -> np.ndarray:
    """The stage-1 vectors that the model makes of the `vectors` of these rows."""
    own = own_frames(table, model.config.num_frames)
    video = unpack_frames(own["vectors"], model.dim, model.device)
    vectors: np.ndarray = stage1_vectors(model, video).float().cpu().numpy()
    return vectors
