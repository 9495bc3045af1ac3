"""How frames arrive in training: decoded again and again, from the device's memory, or as cached features.

A class each, and one protocol; `FRAMES` lists them by the name a recipe uses (`data.frames`). The settings of
each are in `run_config.py`. Shapes: T texts, V videos, F frames, E image features.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from gare.data.loader import Draw, FrameSource, PairLoader, PairSampler, VideoBatch
from gare.data.manifest import Split, find_manifest, join
from gare.data.preload import FramesOnDevice, Plan, Planner
from gare.evaluate.frozen_features import FrozenFeatures
from gare.model import GARE
from gare.train.distributed import Processes
from gare.train.gradient_step import PairBatch
from gare.train.run_config import CachedConfig, DataConfig, PreloadConfig, RunConfig, StreamConfig
from gare.types import VideoFeatures

_PLANNING = 4
"""Processes that draw batches ahead of a device: one alone was slower than an H200."""

OnProgress = Callable[[int, int], None]
"""Called with the videos prepared so far and their number."""


class TrainingFrames(Protocol):
    """The pairs of a run, batch by batch."""

    def __init__(
        self,
        model: GARE,
        source: FrameSource,
        config: RunConfig,
        processes: Processes,
        on_progress: OnProgress,
    ) -> None: ...

    def __len__(self) -> int:
        """Batches in an epoch."""

    def batches(self, epoch: int, start: int = 0) -> Iterator[PairBatch]:
        """The batches of an epoch from a position on; every position always holds the same pairs."""

    def videos(self, split: Split) -> VideoFeatures | None:
        """The videos of a split as the model sees them now; None if they are yet to be decoded."""


class StreamedFrames:
    """Frames are decoded, augmented and encoded anew every time."""

    def __init__(
        self,
        model: GARE,
        source: FrameSource,
        config: RunConfig,
        processes: Processes,
        on_progress: OnProgress,
    ) -> None:
        chosen = config.data.frames
        assert isinstance(chosen, StreamConfig)
        self._model, self._device = model, processes.device
        self._loader = PairLoader(
            source,
            "train",
            image_size=model.encoder.image_format.size,
            fit=model.encoder.image_format.fit,
            batch_size=config.batch_size,
            seed=config.seed,
            augmentation=chosen.augmentation,
            caption_choice=config.data.caption_choice,
            draw_frames=chosen.draw_frames,
            num_workers=config.data.num_workers,
            rank=processes.rank,
            world_size=processes.world_size,
        )

    def __len__(self) -> int:
        return len(self._loader)

    def batches(self, epoch: int, start: int = 0) -> Iterator[PairBatch]:
        for text, clips in self._loader.batches(epoch, start):
            num_real = int(clips.mask_VF.sum())  # here, because asking a GPU waits for it
            yield _pair_up(self._model, text.captions, clips.to(self._device), num_real)

    def videos(self, split: Split) -> None:
        return None


class PreloadedFrames:
    """Frames lie decoded on the device; a step cuts its crops out of them."""

    def __init__(
        self,
        model: GARE,
        source: FrameSource,
        config: RunConfig,
        processes: Processes,
        on_progress: OnProgress,
    ) -> None:
        chosen = config.data.frames
        assert isinstance(chosen, PreloadConfig)
        self._model = model
        self._frames = FramesOnDevice(
            source,
            "train",
            size=model.encoder.image_format.size,
            fit=model.encoder.image_format.fit,
            device=processes.device,
            num_workers=config.data.num_workers,
            on_progress=on_progress,
        )
        video_index = source.manifest.video_index("train")
        self._sampler = _make_sampler(video_index, config, processes)
        self._num_mixed = int(chosen.mixed_share * config.batch_size / processes.world_size)
        planner = self._frames.planner(chosen.augmentation, draw_frames=chosen.draw_frames)
        num_planning = min(config.data.num_workers, _PLANNING)
        captions = source.manifest.captions("train")
        self._plans: DataLoader[tuple[list[str], Plan]] = DataLoader(
            _Plans(planner, captions, video_index, chosen.word_dropout, chosen.word_swaps),
            sampler=self._sampler,
            batch_size=None,
            num_workers=num_planning,
            persistent_workers=num_planning > 0,
            collate_fn=_as_it_is,  # type: ignore[arg-type]
        )

    def __len__(self) -> int:
        return len(self._sampler)

    def batches(self, epoch: int, start: int = 0) -> Iterator[PairBatch]:
        self._sampler.start_at(epoch, start)
        return _one_ahead(self._make(captions, plan) for captions, plan in self._plans)

    def videos(self, split: Split) -> None:
        return None

    def _make(self, captions: list[str], plan: Plan) -> PairBatch:
        partners = captions[self._num_mixed : 2 * self._num_mixed]
        mixed = [f"{own} {other}" for own, other in zip(captions, partners, strict=False)]
        video = self._frames.batch(plan, num_mixed=self._num_mixed)
        captions = mixed + captions[self._num_mixed :]
        return _pair_up(self._model, captions, video, int(plan.mask_VF.sum()))


class CachedFrames:
    """The frozen image tower has encoded every frame already; a step only looks its features up."""

    def __init__(
        self,
        model: GARE,
        source: FrameSource,
        config: RunConfig,
        processes: Processes,
        on_progress: OnProgress,
    ) -> None:
        chosen = config.data.frames
        assert isinstance(chosen, CachedConfig)
        self._device, self._model = processes.device, model
        self._features = _open_features(model, source, config.data, on_progress)
        self._features_VFE, self._mask_VF = self._features.for_training(chosen.augmentation, chosen.views)
        self._num_views = chosen.views
        self._captions = source.manifest.captions("train")
        self._video_index = torch.tensor(source.manifest.video_index("train"))
        self._sampler = _make_sampler(self._video_index.tolist(), config, processes)

    def __len__(self) -> int:
        return len(self._sampler)

    def batches(self, epoch: int, start: int = 0) -> Iterator[PairBatch]:
        self._sampler.start_at(epoch, start)
        for draws in self._sampler:
            rows = [draw.row for draw in draws]
            video_index = self._video_index[rows].to(self._device)
            view = torch.tensor([draw.seed % self._num_views for draw in draws], device=self._device)
            seen = self._num_views * video_index + view
            captions = [self._captions[row] for row in rows]
            video = VideoBatch(self._features_VFE[seen], self._mask_VF[seen], video_index)
            yield _pair_up(self._model, captions, video)

    def videos(self, split: Split) -> VideoFeatures:
        with torch.no_grad():
            return self._model.video_features_from_cache(*self._features.of(split))


FRAMES: dict[str, type[TrainingFrames]] = {
    "stream": StreamedFrames,
    "preload": PreloadedFrames,
    "cached": CachedFrames,
}


def open_frames(
    model: GARE, source: FrameSource, config: RunConfig, processes: Processes, on_progress: OnProgress
) -> TrainingFrames:
    """Prepare the frames of a run as its recipe wants them."""
    return FRAMES[config.data.frames.name](model, source, config, processes, on_progress)


def open_source(data: DataConfig) -> FrameSource:
    """The videos of a recipe: of one dataset, or of several to train on and one to choose by."""
    first, *others = (
        FrameSource.open(Path(place), data.num_frames, data.sampling, allow_missing=data.allow_missing)
        for place in (data.manifest, *data.also_train)
    )
    if not others:
        return first
    manifests = [first.manifest, *(other.manifest.select("train") for other in others)]
    return replace(
        first,
        manifest=join(first.manifest.header.name, manifests),
        caches=[cache for each in (first, *others) for cache in each.caches],
        missing=tuple(video for each in (first, *others) for video in each.missing),
    )


def cached_videos(model: GARE, source: FrameSource, data: DataConfig, split: Split) -> VideoFeatures | None:
    """The videos of a split from the feature cache of a recipe that keeps one; None for any other recipe."""
    if not isinstance(data.frames, CachedConfig):
        return None
    with torch.no_grad():
        return model.video_features_from_cache(*_open_features(model, source, data).of(split))


def _open_features(
    model: GARE, source: FrameSource, data: DataConfig, on_progress: OnProgress | None = None
) -> FrozenFeatures:
    folder = find_manifest(Path(data.manifest)).parent / "features"
    return FrozenFeatures(model, source, folder, num_workers=data.num_workers, on_progress=on_progress)


def _make_sampler(video_index: Sequence[int], config: RunConfig, processes: Processes) -> PairSampler:
    return PairSampler(
        video_index,
        batch_size=config.batch_size,
        seed=config.seed,
        caption_choice=config.data.caption_choice,
        rank=processes.rank,
        world_size=processes.world_size,
    )


def _pair_up(
    model: GARE, captions: Sequence[str], video: VideoBatch, num_real: int | None = None
) -> PairBatch:
    """Captions beside the frames, or features of frames, of their videos, on the device where those are."""
    device = video.pixels_VFCHW.device
    token_ids_TW, mask_TW = (
        tokens.to(device, non_blocking=True) for tokens in model.encoder.tokenize(captions)
    )
    return PairBatch(token_ids_TW, mask_TW, video.pixels_VFCHW, video.mask_VF, video.video_index, num_real)


def _one_ahead(batches: Iterator[PairBatch]) -> Iterator[PairBatch]:
    """The next batch is made while the device is busy with this one."""
    with ThreadPoolExecutor(1) as maker:
        following = maker.submit(next, batches, None)
        while (batch := following.result()) is not None:
            following = maker.submit(next, batches, None)
            yield batch


class _Plans(Dataset[tuple[list[str], Plan]]):
    """The captions of a batch as they are to be read, and what is done to its pictures."""

    def __init__(
        self,
        planner: Planner,
        captions: Sequence[str],
        video_index: Sequence[int],
        word_dropout: float,
        word_swaps: float,
    ) -> None:
        self._planner, self._captions, self._video_index = planner, captions, video_index
        self._word_dropout, self._word_swaps = word_dropout, word_swaps

    def __getitem__(self, draws: Sequence[Draw]) -> tuple[list[str], Plan]:
        captions = [drop_words(self._captions[draw.row], self._word_dropout, draw.seed) for draw in draws]
        captions = [
            swap_words(caption, self._word_swaps, draw.seed)
            for caption, draw in zip(captions, draws, strict=True)
        ]
        return captions, self._planner.plan([self._video_index[draw.row] for draw in draws], draws)


def drop_words(caption: str, share: float, seed: int) -> str:
    """The caption without the words that chance leaves out; at least one stays.

    >>> drop_words("a brown dog catches a frisbee", 0.5, seed=3)
    'brown catches a'
    """
    if not share:
        return caption
    chance = random.Random(seed)
    words = caption.split()
    kept = [word for word in words if chance.random() >= share]
    return " ".join(kept or words[:1])


def swap_words(caption: str, share: float, seed: int) -> str:
    """The caption with neighbouring words in each other's place where chance says so; no word moves twice.

    >>> swap_words("a brown dog catches a frisbee", 0.5, seed=3)
    'brown a catches dog a frisbee'
    """
    if not share:
        return caption
    chance = random.Random(f"swap {seed}")  # other numbers than those that drop words
    words, place = caption.split(), 0
    while place < len(words) - 1:
        if chance.random() < share:
            words[place], words[place + 1] = words[place + 1], words[place]
            place += 1
        place += 1
    return " ".join(words)


def _as_it_is(planned: tuple[list[str], Plan]) -> tuple[list[str], Plan]:
    """A batch of plans is one plan already."""
    return planned
