"""Frame vectors as a store keeps them (bytes of float16), which of them are an item's, and how a model takes
them; whether they are intact.

Shapes: V items, F frames, D embedding, N frames of all items. Apart from the store, which does without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gare.data.frame_sampling import sample_indices
from gare.library.store.row_checksums import damaged_frame_columns, expected_sum, vectors_sum
from gare.library.store.store_schema import is_dense
from gare.types import VideoFeatures

if TYPE_CHECKING:
    import pyarrow as pa


def pack_frames(video: VideoFeatures) -> list[bytes]:
    """The real frames of each video as the `vectors` column keeps them: float16, little-endian."""
    frames_VFD = video.frames_VFD.to(torch.float16).cpu().numpy().astype("<f2", copy=False)
    mask_VF = video.mask_VF.cpu().numpy()
    return [frames_FD[mask_F].tobytes() for frames_FD, mask_F in zip(frames_VFD, mask_VF, strict=True)]


def unpack_frames(vectors: pa.ChunkedArray | pa.Array, dim: int, device: torch.device) -> VideoFeatures:
    """The `vectors` column as features, in float32; shorter items are padded."""
    # The whole column at once: 256 items one by one would take as long as scoring them.
    data, ends = _buffers(vectors)
    numbers = np.frombuffer(data, dtype="<f2")[ends[0] // 2 : ends[-1] // 2].reshape(-1, dim)
    counts = np.diff(ends) // (2 * dim)
    mask_VF = np.arange(counts.max()) < counts[:, None]
    if mask_VF.all():
        frames_VFD = numbers.reshape(*mask_VF.shape, dim).astype(np.float16)  # a copy, that may be written to
    else:
        frames_VFD = np.zeros((*mask_VF.shape, dim), dtype=np.float16)
        frames_VFD[mask_VF] = numbers
    return VideoFeatures(
        torch.from_numpy(frames_VFD).to(device).float(), torch.from_numpy(mask_VF).to(device)
    )


def _buffers(vectors: pa.ChunkedArray | pa.Array) -> tuple[Any, np.ndarray]:
    """The bytes of a column, and where each value begins; the last number is where they end."""
    import pyarrow as pa

    array = vectors.combine_chunks() if isinstance(vectors, pa.ChunkedArray) else vectors
    _, offsets, data = array.buffers()
    return data, np.frombuffer(offsets, dtype=np.int64)[array.offset : array.offset + len(array) + 1]


# --- which frames are an item's -----------------------------------------------------------------------------


def own_frames(rows: pa.Table | pa.RecordBatch, num_frames: int) -> pa.Table | pa.RecordBatch:
    """The same rows, each with the `times` and `vectors` of its own frames alone.

    An item that is a range of dense frames has those from its start to before its end, thinned evenly to the
    number that the model takes; any other item has all of its row.

    Args:
        rows: with `frames_key`, `times`, `start` and `end`; `vectors` or not.
    """
    dense_V = np.array([is_dense(key) for key in rows.column("frames_key").to_pylist()], dtype=bool)
    if not dense_V.any():
        return rows
    times_N, ends = _flat_times(rows.column("times"))
    counts_V = np.diff(ends)
    own = _own_indices(rows, dense_V, times_N, ends[:-1], counts_V, num_frames)
    sizes_V = np.fromiter(map(len, own), np.int64, len(own))
    chosen_N = np.concatenate(own)
    rows = _replaced(rows, "times", _lists(times_N[chosen_N], sizes_V))
    if "vectors" in rows.schema.names:
        data, byte_ends = _buffers(rows.column("vectors"))
        one = int(np.diff(byte_ends).sum() // counts_V.sum())  # bytes of a frame
        numbers_N = np.frombuffer(data, np.uint8)[byte_ends[0] : byte_ends[-1]].reshape(-1, one)
        rows = _replaced(rows, "vectors", _binaries(numbers_N[chosen_N], sizes_V * one))
    return rows


def _own_indices(
    rows: pa.Table | pa.RecordBatch,
    dense_V: np.ndarray,
    times_N: np.ndarray,
    firsts_V: np.ndarray,
    counts_V: np.ndarray,
    num_frames: int,
) -> list[np.ndarray]:
    """For each item which of all frames are its own."""
    # Times are kept in float32, and a range begins and ends with one of them.
    start_V, end_V = (np.array(rows.column(name).to_pylist(), np.float32) for name in ("start", "end"))
    owner_N = np.repeat(np.arange(len(counts_V)), counts_V)
    before_V = np.bincount(owner_N[times_N < start_V[owner_N]], minlength=len(counts_V))
    inside_V = np.bincount(owner_N[times_N < end_V[owner_N]], minlength=len(counts_V)) - before_V
    before_V = np.where(dense_V, np.minimum(before_V, counts_V - 1), 0)
    inside_V = np.where(dense_V, np.maximum(inside_V, 1), counts_V)
    first_V = firsts_V + before_V
    most_V = np.where(dense_V, num_frames, counts_V)
    return [
        first + _thinned(int(count), int(most))
        for first, count, most in zip(first_V, inside_V, most_V, strict=True)
    ]


@lru_cache(maxsize=1024)
def _thinned(count: int, num_frames: int) -> np.ndarray:
    return np.array(sample_indices(count, num_frames), dtype=np.int64)


def _flat_times(column: pa.ChunkedArray | pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """All times of a column, and where those of each row begin; the last number is where they end."""
    import pyarrow as pa

    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    ends = array.offsets.to_numpy()
    return array.values.to_numpy()[ends[0] : ends[-1]], ends - ends[0]


def _replaced(rows: pa.Table | pa.RecordBatch, name: str, values: pa.Array) -> pa.Table | pa.RecordBatch:
    number = rows.schema.get_field_index(name)
    return rows.set_column(number, rows.schema.field(number), values)


def _lists(values_N: np.ndarray, sizes_V: np.ndarray) -> pa.Array:
    import pyarrow as pa

    ends = np.concatenate([[0], np.cumsum(sizes_V)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(values_N, pa.float32()))


def _binaries(values_N: np.ndarray, sizes_V: np.ndarray) -> pa.Array:
    import pyarrow as pa

    ends = np.concatenate([[0], np.cumsum(sizes_V)]).astype(np.int64)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(np.ascontiguousarray(values_N))]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(sizes_V), buffers)


# --- whether they are intact --------------------------------------------------------------------------------


def intact_rows(rows: pa.Table | pa.RecordBatch) -> list[bool]:
    """Whether the vectors of each row are those that were written under its key, and its range is of them.

    Args:
        rows: with `frames_key`, `vectors`, `times`, `start` and `end`.
    """
    if not rows.num_rows:
        return []
    keys, vectors = rows.column("frames_key").to_pylist(), rows.column("vectors")
    data, ends = _buffers(vectors)
    if (ends % 8).any() or (np.diff(ends) == 0).any():
        sums = [vectors_sum(value) for value in vectors.to_pylist()]
    else:
        words = np.frombuffer(data, dtype="<u8", count=int(ends[-1]) // 8)
        sums = np.add.reduceat(words, ends[:-1] // 8).tolist()
    good = [expected_sum(key) in (None, found) for key, found in zip(keys, sums, strict=True)]
    if not any(map(is_dense, keys)):
        return good
    columns = (rows.column(name).to_pylist() for name in ("times", "start", "end"))
    return [
        is_good and (not is_dense(key) or _is_range(key, *range_))
        for is_good, key, *range_ in zip(good, keys, *columns, strict=True)
    ]


def _is_range(frames_key: str, times: Sequence[float], start: float, end: float) -> bool:
    """Whether an item is a range of these dense frames. A damaged start would give it a wrong score."""
    if damaged_frame_columns(frames_key, {"times": times}):
        return False
    begins = start <= times[0] or start in times
    return begins and start < end and (end > times[-1] or end in times)
