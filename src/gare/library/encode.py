"""Frames in, vectors out, in batches. Shapes: V videos, F frames, C = 3, H = W, D embedding."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch

from gare.data.transforms import normalise
from gare.library.extract import Stretch
from gare.library.stage1 import stage1_vectors
from gare.model import GARE

Owner = TypeVar("Owner")
_BATCH_SIZES = {"cpu": 1, "cuda": 32}  # on a CPU, what fits its caches is fastest
_PATIENCE_S = 2.0  # a batch that is not full waits no longer than this


@dataclass(frozen=True)
class Encoded:
    """One item with its vectors; its pixels are gone."""

    start: float
    end: float
    times: tuple[float, ...]
    thumbnail: bytes
    strip: bytes
    frames: bytes
    """float16, frames × dim, little-endian."""
    vector: np.ndarray


class EncodeQueue(Generic[Owner]):
    """Stretches of many files, encoded together as soon as there are enough of them."""

    def __init__(self, model: GARE) -> None:
        self._model = model
        self._size = _BATCH_SIZES.get(model.device.type, 1)
        self._waiting: list[tuple[Owner, Stretch]] = []
        self._since = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, owner: Owner, stretch: Stretch) -> None:
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting.append((owner, stretch))

    def drop(self, owner: Owner) -> None:
        self._waiting = [(other, stretch) for other, stretch in self._waiting if other is not owner]

    def run(self, *, is_idle: bool) -> Iterator[tuple[Owner, Encoded]]:
        """What is due: full batches; the rest when nothing else is to come or it has waited for long."""
        while self._waiting:
            is_due = len(self._waiting) >= self._size or is_idle
            if not is_due and time.monotonic() - self._since < _PATIENCE_S:
                return
            batch, self._waiting = self._waiting[: self._size], self._waiting[self._size :]
            self._since = time.monotonic()
            encoded = encode(self._model, [stretch for _, stretch in batch])
            yield from zip([owner for owner, _ in batch], encoded, strict=True)


@torch.no_grad()
def encode(model: GARE, stretches: Sequence[Stretch]) -> list[Encoded]:
    """Vectors of a batch; padding is masked, so batch mates change nothing."""
    longest = max(len(stretch.pixels) for stretch in stretches)
    pixels_VFHWC = np.zeros((len(stretches), longest, *stretches[0].pixels.shape[1:]), dtype=np.uint8)
    mask_VF = torch.zeros(len(stretches), longest, dtype=torch.bool)
    for row, stretch in enumerate(stretches):
        pixels_VFHWC[row, : len(stretch.pixels)] = stretch.pixels
        mask_VF[row, : len(stretch.pixels)] = True
    bytes_VFCHW = torch.from_numpy(pixels_VFHWC).to(model.device).permute(0, 1, 4, 2, 3)
    format_ = model.backbone.image_format
    video = model.video_features(normalise(bytes_VFCHW, format_.mean, format_.std), mask_VF.to(model.device))
    vectors_VE = stage1_vectors(model, video).float().cpu().numpy()
    frames_VFD = video.frames_VFD.to(torch.float16).cpu().numpy().astype("<f2", copy=False)
    return [
        Encoded(
            stretch.start,
            stretch.end,
            stretch.times,
            stretch.thumbnail,
            stretch.strip,
            frames_VFD[row, : len(stretch.pixels)].tobytes(),
            vectors_VE[row],
        )
        for row, stretch in enumerate(stretches)
    ]
