"""Frame vectors as a store keeps them, and as a model takes them. Shapes: V videos, F frames, D embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from gare.scoring.pooling import mean_weights, weighted_mean
from gare.types import VideoFeatures

if TYPE_CHECKING:
    import pyarrow as pa


def unpack_frames(vectors: pa.ChunkedArray | pa.Array, dim: int, device: torch.device) -> VideoFeatures:
    """The `vectors` column as features, in float32; shorter items are padded."""
    import pyarrow as pa

    array = vectors.combine_chunks() if isinstance(vectors, pa.ChunkedArray) else vectors
    # One look at the whole column: 256 items one by one would take as long as scoring them.
    _, offsets, data = array.buffers()
    ends = np.frombuffer(offsets, dtype=np.int64)[array.offset : array.offset + len(array) + 1]
    numbers = np.frombuffer(data, dtype="<f2")[ends[0] // 2 : ends[-1] // 2].reshape(-1, dim)
    counts = np.diff(ends) // (2 * dim)
    mask_VF = np.arange(counts.max()) < counts[:, None]
    frames_VFD = np.zeros((*mask_VF.shape, dim), dtype=np.float16)
    frames_VFD[mask_VF] = numbers
    return VideoFeatures(
        torch.from_numpy(frames_VFD).to(device).float(), torch.from_numpy(mask_VF).to(device)
    )


def mean_frames(video: VideoFeatures) -> torch.Tensor:
    """The mean of each video's real frames, [V, D]."""
    weights_VF = mean_weights(video.mask_VF, mask_frames=True, dtype=video.frames_VFD.dtype)
    return weighted_mean(video.frames_VFD, weights_VF)
