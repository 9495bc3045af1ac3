"""A model and everything it sees of a split: encoded once, kept in the report's folder.

One caption a video, its first, so that text i belongs to video i.
Shapes: T texts, V videos, F frames, D embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from gare.analysis.pairs import PairGeometry, pair_geometry, split_products
from gare.analysis.store import fingerprint
from gare.data.loader import FrameSource
from gare.data.manifest import Row, Split
from gare.evaluate.report import hash_queries
from gare.evaluate.run import weights_hash
from gare.evaluate.similarity import concatenate, encode_gallery
from gare.model import GARE
from gare.train.features import FrozenFeatures
from gare.types import TextFeatures, VideoFeatures, block_slices

Progress = Callable[[str, int, int], None]
VIDEOS_AT_ONCE = 256


@dataclass(frozen=True)
class Gallery:
    """The videos of a split with the first caption of each."""

    source: FrameSource
    split: Split
    videos: list[Row]
    captions: list[str]

    @classmethod
    def open(cls, source: FrameSource, split: Split) -> Gallery:
        videos = source.manifest.videos(split)
        first: dict[int, str] = {}
        pairs = zip(source.manifest.video_index(split), source.manifest.captions(split), strict=True)
        for video, caption in pairs:
            first.setdefault(video, caption)
        return cls(source, split, videos, [first[index] for index in range(len(videos))])

    @cached_property
    def fingerprint(self) -> str:
        ids = [video.video_id for video in self.videos]
        queries = hash_queries(self.captions, ids)
        return fingerprint(queries, self.split, self.source.num_frames, self.source.sampling)


@dataclass(frozen=True)
class Subject:
    """A model with the features of the gallery, in float32 on the CPU."""

    name: str
    model: GARE
    text: TextFeatures
    video: VideoFeatures
    fingerprint: str
    """Of weights, config and gallery."""

    @property
    def temperature(self) -> float:
        return 1 / float(self.model.logit_scale.detach())

    @cached_property
    def geometry(self) -> PairGeometry:
        """Of every pair, in float64."""
        return pair_geometry(
            split_products(self.model, self.text.to(torch.float64), self.video.to(torch.float64))
        )

    def batch(self, rows: torch.Tensor) -> tuple[TextFeatures, VideoFeatures]:
        """Some pairs, in float64."""
        text = TextFeatures(self.text.text_TD[rows], self.text.words_TWD[rows], self.text.mask_TW[rows])
        video = VideoFeatures(self.video.frames_VFD[rows], self.video.mask_VF[rows])
        return text.to(torch.float64), video.to(torch.float64)


@torch.no_grad()
def encode_subject(
    name: str,
    model: GARE,
    gallery: Gallery,
    cache: Path,
    *,
    num_workers: int = 0,
    on_progress: Progress | None = None,
) -> Subject:
    """Encode texts and videos, or read what an earlier call kept."""
    model.eval()
    mark = fingerprint(weights_hash(model), model.config.fingerprint, gallery.fingerprint)
    path = cache / f"{mark}.safetensors"
    features = _read(path)
    if features is None:

        def report(done: int, total: int) -> None:
            if on_progress is not None:
                on_progress(f"encoding with the {name}", done, total)

        video = _encode_videos(model, gallery, cache / "images", num_workers, report)
        text = model.encode_text(gallery.captions)
        features = {
            "text_TD": text.text_TD.float(),
            "words_TWD": text.words_TWD.float(),
            "mask_TW": text.mask_TW,
            "frames_VFD": video.frames_VFD.float(),
            "mask_VF": video.mask_VF,
        }
        features = {key: tensor.cpu().contiguous() for key, tensor in features.items()}
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        save_file(features, unfinished)
        unfinished.replace(path)
    return Subject(
        name,
        model.cpu(),
        TextFeatures(features["text_TD"], features["words_TWD"], features["mask_TW"]),
        VideoFeatures(features["frames_VFD"], features["mask_VF"]),
        mark,
    )


def _encode_videos(
    model: GARE, gallery: Gallery, folder: Path, num_workers: int, report: Callable[[int, int], None]
) -> VideoFeatures:
    """What the image tower sees is kept by its weights: a baseline with the same tower encodes nothing."""
    source, split = gallery.source, gallery.split
    if not model.config.interaction.mask_frames:  # then what padding holds matters
        return encode_gallery(model, source, split, num_workers=num_workers, on_progress=report)
    model.requires_grad_(False)
    images = FrozenFeatures(model, source, folder, num_workers=num_workers, on_progress=report)
    features_VFE, mask_VF = images.of(split)
    return concatenate(
        [
            model.video_features_from_cache(features_VFE[rows], mask_VF[rows])
            for rows in block_slices(len(mask_VF), VIDEOS_AT_ONCE)
        ]
    )


def _read(path: Path) -> dict[str, torch.Tensor] | None:
    try:
        return load_file(path)
    except (FileNotFoundError, SafetensorError):
        return None
