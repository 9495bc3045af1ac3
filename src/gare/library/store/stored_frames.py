"""Frame vectors as a store keeps them (bytes of float16), as a model takes them, and whether they are intact.

Shapes: V videos, F frames, D embedding. Apart from the store, which does without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gare.library.store.row_checksums import expected_sum, vectors_sum
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


# --- whether they are intact --------------------------------------------------------------------------------


def intact_rows(frames_keys: Sequence[str], vectors: pa.ChunkedArray | pa.Array) -> list[bool]:
    """Whether the vectors of each row are those that were written under its key."""
    if not len(frames_keys):
        return []
    data, ends = _buffers(vectors)
    if (ends % 8).any() or (np.diff(ends) == 0).any():
        sums = [vectors_sum(value) for value in vectors.to_pylist()]
    else:
        words = np.frombuffer(data, dtype="<u8", count=int(ends[-1]) // 8)
        sums = np.add.reduceat(words, ends[:-1] // 8).tolist()
    return [expected_sum(key) in (None, found) for key, found in zip(frames_keys, sums, strict=True)]
