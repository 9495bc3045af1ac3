"""Frame vectors as a store keeps them, and as a model takes them. Shapes: V videos, F frames, D embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from gare.types import VideoFeatures

if TYPE_CHECKING:
    import pyarrow as pa


def unpack_frames(vectors: pa.ChunkedArray, dim: int, device: torch.device) -> VideoFeatures:
    """The `vectors` column as features, in float32; shorter items are padded."""
    rows = [np.frombuffer(value.as_buffer(), dtype="<f2").reshape(-1, dim) for value in vectors]
    counts = torch.tensor([len(row) for row in rows])
    frames_VFD = np.zeros((len(rows), int(counts.max()), dim), dtype=np.float16)
    for place, row in zip(frames_VFD, rows, strict=True):
        place[: len(row)] = row
    mask_VF = torch.arange(frames_VFD.shape[1]) < counts[:, None]
    return VideoFeatures(torch.from_numpy(frames_VFD).to(device).float(), mask_VF.to(device))
