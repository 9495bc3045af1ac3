"""Features of a frozen image tower for every frame, computed once and kept beside the manifest.

Shapes: V videos, F frames, E image features.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from gare.data.feature_cache import FeatureCache
from gare.data.loader import Draw, FrameSource, VideoBatch, load_gallery, mix_seeds
from gare.data.manifest import Split
from gare.data.preload import FramesOnDevice
from gare.data.transforms import Augmentation
from gare.errors import ConfigError
from gare.model import GARE

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
        encoder = model.encoder
        if not encoder.is_image_tower_frozen:
            raise ConfigError(
                "data.frames = 'cached' needs a frozen image tower (encoder.freeze_image = true): "
                "what is computed once cannot learn"
            )
        frames = f"{source.num_frames} {source.sampling} {encoder.image_format}"
        digest = hashlib.sha256(f"{frames} {encoder.image_tower_digest()}".encode())
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
            self._loaded[split] = self._together(self._cache.get(ids))
        return self._loaded[split]

    def for_training(self, augmentation: Augmentation, num_views: int) -> tuple[Tensor, Tensor]:
        """Features [V × views, F, E] and mask of the training videos, every augmented view of each."""
        if augmentation == "off":
            return self.of("train")
        names = [row.video_id for row in self._source.manifest.videos("train")]
        ids = [f"{name} {augmentation} {view}" for name in names for view in range(num_views)]
        if self._cache.missing(ids):
            self._compute_views(augmentation, num_views, ids)
        return self._together(self._cache.get(ids))

    def _together(self, kept: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        num_frames, device = self._source.num_frames, self._model.device
        features_VFE = self._padding_of_tower(kept[0].shape[1]).repeat(len(kept), num_frames, 1)
        mask_VF = torch.zeros(len(kept), num_frames, dtype=torch.bool)
        for index, features_FE in enumerate(kept):
            features_VFE[index, : len(features_FE)] = features_FE
            mask_VF[index, : len(features_FE)] = True
        return features_VFE.to(device), mask_VF.to(device)

    @torch.no_grad()
    def _padding_of_tower(self, width: int) -> Tensor:
        """Features [E] of a padded frame: where padding takes part, those of a picture that is zero."""
        if self._model.interaction.masks_padding:
            return torch.zeros(width)
        encoder = self._model.encoder
        size = encoder.image_format.size
        empty_1CHW = torch.zeros(1, 3, size, size, device=self._model.device, dtype=encoder.dtype)
        return encoder.image_features(empty_1CHW)[0].float().cpu()

    def _compute_views(self, augmentation: Augmentation, num_views: int, ids: list[str]) -> None:
        """The views that are not there yet, from frames that are decoded once."""
        frames = FramesOnDevice(
            self._source,
            "train",
            size=self._model.encoder.image_format.size,
            fit=self._model.encoder.image_format.fit,
            device=self._model.device,
            num_workers=self._num_workers,
        )
        planner = frames.planner(augmentation, draw_frames=False)
        missing = set(self._cache.missing(ids))
        places = [place for place, id_ in enumerate(ids) if id_ in missing]
        for start in range(0, len(places), VIDEOS_PER_FILE):
            part = places[start : start + VIDEOS_PER_FILE]
            draws = [Draw(place, mix_seeds(*divmod(place, num_views))) for place in part]
            batch = frames.batch(planner.plan([place // num_views for place in part], draws))
            self._cache.put(dict(zip([ids[place] for place in part], self._encode(batch), strict=True)))
            if self._on_progress:
                self._on_progress(start + len(part), len(places))

    def _compute(self, split: Split, ids: list[str]) -> None:
        done = 0
        gallery = load_gallery(
            self._source,
            split,
            image_size=self._model.encoder.image_format.size,
            fit=self._model.encoder.image_format.fit,
            batch_size=64 if self._model.device.type == "cuda" else 4,
            num_workers=self._num_workers,
        )
        computed: dict[str, Tensor] = {}
        for batch in gallery:
            computed.update(zip(ids[done : done + len(batch)], self._encode(batch), strict=True))
            done += len(batch)
            if len(computed) >= VIDEOS_PER_FILE or done == len(ids):
                self._cache.put(computed)
                computed = {}
            if self._on_progress:
                self._on_progress(done, len(ids))

    @torch.no_grad()
    def _encode(self, batch: VideoBatch) -> Sequence[Tensor]:
        """Features [F, E] of each video's real frames."""
        encoder = self._model.encoder
        bytes_NCHW = batch.pixels_VFCHW[batch.mask_VF].to(self._model.device)
        was_training = encoder.training
        encoder.eval()  # a tower that leaves blocks out while training must show all of itself here
        features_NE = torch.cat([encoder.encode_frames(part) for part in bytes_NCHW.split(512)])
        encoder.train(was_training)
        per_video: Sequence[Tensor] = features_NE.float().cpu().split(batch.mask_VF.sum(dim=1).tolist())
        return per_video
