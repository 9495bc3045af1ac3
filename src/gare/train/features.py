"""What a frozen image tower sees in every frame, computed once and kept beside the manifest.

Shapes: V videos, F frames, E image features.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from gare.data.features import FeatureCache
from gare.data.loader import FrameSource, load_gallery
from gare.data.manifest import Split
from gare.data.transforms import normalise
from gare.errors import ConfigError
from gare.model import GARE

IMAGE_TOWERS = ("vision.", "patches.")

VIDEOS_PER_FILE = 256


class FrozenFeatures:
    """Features of a split on demand; what is in the folder is not computed again, in this run or another."""

    def __init__(
        self,
        model: GARE,
        source: FrameSource,
        folder: Path,
        *,
        num_workers: int = 0,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        tower = {n: p for n, p in model.backbone.state_dict().items() if n.startswith(IMAGE_TOWERS)}
        if any(p.requires_grad for n, p in model.backbone.named_parameters() if n.startswith(IMAGE_TOWERS)):
            raise ConfigError(
                "data.cache_features needs a frozen image tower (backbone.freeze_image = true): "
                "what is computed once cannot learn"
            )
        digest = hashlib.sha256(
            f"{source.num_frames} {source.sampling} {model.backbone.image_format}".encode()
        )
        for name, parameter in sorted(tower.items()):
            digest.update(name.encode() + parameter.detach().float().cpu().numpy().tobytes())
        self._cache = FeatureCache(folder, digest.hexdigest()[:16])
        self._model, self._source, self._num_workers = model, source, num_workers
        self._on_progress = on_progress
        self._loaded: dict[str, tuple[Tensor, Tensor]] = {}

    def of(self, split: Split) -> tuple[Tensor, Tensor]:
        """Features [V, F, E] and mask [V, F] of a split's gallery, on the model's device."""
        if split not in self._loaded:
            ids = [row.video_id for row in self._source.manifest.videos(split)]
            if self._cache.missing(ids):
                self._compute(split, ids)
            kept = self._cache.get(ids)
            num_frames = self._source.num_frames
            features_VFE = torch.zeros(len(ids), num_frames, kept[0].shape[1])
            mask_VF = torch.zeros(len(ids), num_frames, dtype=torch.bool)
            for index, features_FE in enumerate(kept):
                features_VFE[index, : len(features_FE)] = features_FE
                mask_VF[index, : len(features_FE)] = True
            self._loaded[split] = features_VFE.to(self._model.device), mask_VF.to(self._model.device)
        return self._loaded[split]

    @torch.no_grad()
    def _compute(self, split: Split, ids: list[str]) -> None:
        format_ = self._model.backbone.image_format
        done = 0
        gallery = load_gallery(
            self._source,
            split,
            image_size=format_.size,
            # On a CPU a small batch stays in its caches: 12 images a video, 10 MB of activations an image.
            batch_size=64 if self._model.device.type == "cuda" else 4,
            num_workers=self._num_workers,
        )
        computed: dict[str, Tensor] = {}
        for batch in gallery:
            mask_VF = batch.mask_VF
            pixels_NCHW = batch.pixels_VFCHW[mask_VF].to(self._model.device)
            features_NE = self._model.backbone.image_features(
                normalise(pixels_NCHW, format_.mean, format_.std)
            )
            per_video = features_NE.float().cpu().split(mask_VF.sum(dim=1).tolist())
            computed.update(zip(ids[done : done + len(batch)], per_video, strict=True))
            done += len(batch)
            if len(computed) >= VIDEOS_PER_FILE or done == len(ids):
                self._cache.put(computed)
                computed = {}
            if self._on_progress:
                self._on_progress(done, len(ids))
