"""What a report is about: a model with the features of a split, a baseline, and the files of training.

Everything is encoded once and kept in the report's folder. One caption a video, its first, so that text i
belongs to video i. Shapes: T texts, V videos, F frames, D embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gare.analysis.numbers import fingerprint
from gare.analysis.pairs import PairGeometry, PairVectors, pair_geometry, split_products
from gare.atomic import replacing
from gare.data.loader import FrameSource
from gare.data.manifest import Row, Split
from gare.evaluate.evaluation_results import hash_queries
from gare.evaluate.frozen_features import FrozenFeatures
from gare.evaluate.model_evaluation import encode_gallery, weights_hash
from gare.model import GARE
from gare.types import TextFeatures, VideoFeatures, block_slices

Progress = Callable[[str, int, int], None]
VIDEOS_AT_ONCE = 256
BATCH_SIZE = 128
"""Pairs a batch for probes of the loss: the paper's."""


@dataclass(frozen=True)
class Gallery:
    """The videos of a split with the first caption of each."""

    source: FrameSource
    split: Split
    videos: list[Row]
    captions: list[str]

    @classmethod
    def open(cls, source: FrameSource, split: Split) -> Gallery:
        """The gallery of a split."""
        videos = source.manifest.videos(split)
        first: dict[int, str] = {}
        pairs = zip(source.manifest.video_index(split), source.manifest.captions(split), strict=True)
        for video, caption in pairs:
            first.setdefault(video, caption)
        return cls(source, split, videos, [first[index] for index in range(len(videos))])

    @cached_property
    def fingerprint(self) -> str:
        """Changes when a video, a caption or the choice of frames does."""
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
    """Depends on weights, config and gallery."""

    @property
    def temperature(self) -> float:
        """The temperature of the model's contrastive loss."""
        return 1 / float(self.model.logit_scale.detach())

    @cached_property
    def geometry(self) -> PairGeometry:
        """Lengths, distances and angles of every pair, in float64."""
        return pair_geometry(
            split_products(self.model, self.text.to(torch.float64), self.video.to(torch.float64))
        )

    @cached_property
    def video_mean_VD(self) -> Tensor:
        """The mean of each video's real frames."""
        return self.video.mean()

    def batch(self, rows: Tensor) -> tuple[TextFeatures, VideoFeatures]:
        """Some pairs, in float64."""
        text = TextFeatures(self.text.text_TD[rows], self.text.words_TWD[rows], self.text.mask_TW[rows])
        video = VideoFeatures(self.video.frames_VFD[rows], self.video.mask_VF[rows])
        return text.to(torch.float64), video.to(torch.float64)


@dataclass(frozen=True)
class View:
    """The pairs as one model scores them, with its increments or without."""

    label: str
    subject: Subject
    with_increments: bool

    def batches(self, *, batch_size: int = BATCH_SIZE, seed: int = 0) -> Iterator[PairVectors]:
        """Random batches of the gallery, each pair in one of them; a smaller rest is left out."""
        size = len(self.subject.text)
        batch_size = min(batch_size, size)
        order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
        for start in range(0, size - batch_size + 1, batch_size):
            rows = order[start : start + batch_size].sort().values
            vectors = self.subject.model.interaction.pair_vectors(*self.subject.batch(rows))
            if not self.with_increments:
                vectors = replace(vectors, increment_TVD=torch.zeros_like(vectors.increment_TVD))
            yield vectors

    @property
    def cosine_TV(self) -> Tensor:
        """The score of every pair in this view."""
        geometry = self.subject.geometry
        return geometry.cosine if self.with_increments else geometry.plain_cosine


@dataclass(frozen=True)
class Study:
    """Everything a probe may read."""

    gallery: Gallery
    subject: Subject
    baseline: Subject | None = None
    run: Path | None = None
    """Folder of a training run with `--probe`."""
    ablations: tuple[Path, ...] = ()
    """Folders of `gare ablate`."""
    thumbnails: Path = Path("thumbnails")
    """Where pictures of videos are kept."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def has_increments(self) -> bool:
        """Whether the model under study has increments."""
        return self.subject.model.interaction.has_increments

    @property
    def model_view(self) -> View:
        """The model with its increments."""
        return View("GARE" if self.has_increments else "model", self.subject, self.has_increments)

    @property
    def baseline_view(self) -> View | None:
        """The baseline; without one, the model with its increments taken away."""
        if self.baseline is not None:
            return View("baseline", self.baseline, self.baseline.model.interaction.has_increments)
        return View("GARE without increments", self.subject, False) if self.has_increments else None

    @property
    def views(self) -> dict[str, View]:
        """Both views by role: "baseline", if there is one, and "model"."""
        found = {"model": self.model_view}
        return found if self.baseline_view is None else {"baseline": self.baseline_view, **found}


def open_study(
    model: GARE,
    gallery: Gallery,
    folder: Path,
    *,
    baseline: GARE | None = None,
    run: Path | None = None,
    ablations: Sequence[Path] = (),
    num_workers: int = 0,
    on_progress: Progress | None = None,
) -> Study:
    """Encode the gallery with the model and the baseline, or read what an earlier call kept in the folder."""
    device, cache = model.device, folder / "cache"
    subject = encode_subject("model", model, gallery, cache, num_workers=num_workers, on_progress=on_progress)
    other = None
    if baseline is not None:
        other = encode_subject(
            "baseline", baseline, gallery, cache, num_workers=num_workers, on_progress=on_progress
        )
    return Study(gallery, subject, other, run, tuple(ablations), folder / "thumbnails", device)


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
        with replacing(path) as part:
            save_file(features, part)
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
    """Features of the image tower are kept by its weights: a baseline with the same tower encodes nothing."""
    source, split = gallery.source, gallery.split
    if not model.interaction.masks_padding:
        return encode_gallery(model, source, split, num_workers=num_workers, on_progress=report)
    model.requires_grad_(False)
    images = FrozenFeatures(model, source, folder, num_workers=num_workers, on_progress=report)
    features_VFE, mask_VF = images.of(split)
    return VideoFeatures.cat(
        [
            model.video_features_from_cache(features_VFE[rows], mask_VF[rows])
            for rows in block_slices(len(mask_VF), VIDEOS_AT_ONCE)
        ]
    )


def _read(path: Path) -> dict[str, Tensor] | None:
    try:
        return load_file(path)
    except (FileNotFoundError, SafetensorError):
        return None
