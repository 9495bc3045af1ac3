"""Batches for the loop: pixels from the loader, or features of a frozen image tower computed once.

Shapes: T texts, V videos, F frames, E image features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from gare.data.loader import Draw, FrameSource, PairLoader, PairSampler, VideoBatch
from gare.data.preload import FramesOnDevice, Plan, Planner
from gare.model import GARE
from gare.train.config import RunConfig
from gare.train.distributed import Processes
from gare.train.features import FrozenFeatures
from gare.train.step import PairBatch

_PLANNING = 4
"""Processes that draw batches ahead of a device: one alone was slower than an H200."""


class Batches(Protocol):
    """Pairs of an epoch from a position on; every position always holds the same pairs."""

    def __len__(self) -> int: ...

    def batches(self, epoch: int, start: int = 0) -> Iterator[PairBatch]: ...


class PixelBatches:
    """Frames are decoded, augmented and encoded anew every time."""

    def __init__(self, model: GARE, source: FrameSource, config: RunConfig, processes: Processes) -> None:
        self._model, self._device = model, processes.device
        self._loader = PairLoader(
            source,
            "train",
            image_size=model.backbone.image_format.size,
            batch_size=config.batch_size,
            seed=config.seed,
            augmentation=config.data.augmentation,
            caption_choice=config.data.caption_choice,
            draw_frames=config.data.draw_frames,
            num_workers=config.data.num_workers,
            rank=processes.rank,
            world_size=processes.world_size,
        )

    def __len__(self) -> int:
        return len(self._loader)

    def batches(self, epoch: int, start: int = 0) -> Iterator[PairBatch]:
        for text, video in self._loader.batches(epoch, start):
            yield _pair_up(self._model, text.captions, video.to(self._device))


class PreloadedBatches:
    """Frames lie decoded on the device; a step cuts its crops out of them."""

    def __init__(
        self,
        model: GARE,
        source: FrameSource,
        config: RunConfig,
        processes: Processes,
        on_progress: Callable[[int, int], None],
    ) -> None:
        self._model = model
        self._frames = FramesOnDevice(
            source,
            "train",
            size=model.backbone.image_format.size,
            device=processes.device,
            num_workers=config.data.num_workers,
            on_progress=on_progress,
        )
        self._captions, self._video_index = (
            source.manifest.captions("train"),
            source.manifest.video_index("train"),
        )
        self._sampler = make_sampler(self._video_index, config, processes)
        self._num_mixed = int(config.data.mixed_share * config.batch_size / processes.world_size)
        planner = self._frames.planner(config.data.augmentation, draw_frames=config.data.draw_frames)
        num_planning = min(config.data.num_workers, _PLANNING)
        self._plans: DataLoader[tuple[list[int], Plan]] = DataLoader(
            _Plans(planner, self._video_index),
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
        return _one_ahead(self._make(rows, plan) for rows, plan in self._plans)

    def _make(self, rows: Sequence[int], plan: Plan) -> PairBatch:
        captions = [self._captions[row] for row in rows]
        partners = captions[self._num_mixed : 2 * self._num_mixed]
        mixed = [f"{own} {other}" for own, other in zip(captions, partners, strict=False)]
        video = self._frames.batch(plan, num_mixed=self._num_mixed)
        return _pair_up(self._model, mixed + captions[self._num_mixed :], video)


class _Plans(Dataset[tuple[list[int], Plan]]):
    def __init__(self, planner: Planner, video_index: Sequence[int]) -> None:
        self._planner, self._video_index = planner, video_index

    def __getitem__(self, draws: Sequence[Draw]) -> tuple[list[int], Plan]:
        rows = [draw.row for draw in draws]
        return rows, self._planner.plan([self._video_index[row] for row in rows], draws)


def _as_it_is(planned: tuple[list[int], Plan]) -> tuple[list[int], Plan]:
    return planned


def _pair_up(model: GARE, captions: Sequence[str], video: VideoBatch) -> PairBatch:
    """Captions beside the pixels of their videos, on the device where those are."""
    token_ids_TW, mask_TW = model.backbone.tokenize(captions)
    device = video.pixels_VFCHW.device
    return PairBatch(
        token_ids_TW.to(device, non_blocking=True),
        mask_TW.to(device, non_blocking=True),
        video.pixels_VFCHW,
        video.mask_VF,
        video.video_index,
    )


def _one_ahead(batches: Iterator[PairBatch]) -> Iterator[PairBatch]:
    """The next batch is made while the device is busy with this one."""
    with ThreadPoolExecutor(1) as maker:
        following = maker.submit(next, batches, None)
        while (batch := following.result()) is not None:
            following = maker.submit(next, batches, None)
            yield batch


class FeatureBatches:
    """The image tower has seen every frame already; a step only looks its features up."""

    def __init__(
        self,
        model: GARE,
        source: FrameSource,
        config: RunConfig,
        processes: Processes,
        features: FrozenFeatures,
    ) -> None:
        self._device, self._model = processes.device, model
        self._features_VFE, self._mask_VF = features.for_training(config.data.augmentation, config.data.views)
        self._num_views = config.data.views
        self._captions = source.manifest.captions("train")
        self._video_index = torch.tensor(source.manifest.video_index("train"))
        self._sampler = make_sampler(self._video_index.tolist(), config, processes)

    def __len__(self) -> int:
        return len(self._sampler)

    def batches(self, epoch: int, start: int = 0) -> Iterator[PairBatch]:
        self._sampler.start_at(epoch, start)
        for draws in self._sampler:
            rows = [draw.row for draw in draws]
            video_index = self._video_index[rows].to(self._device)
            view = torch.tensor([draw.seed % self._num_views for draw in draws], device=self._device)
            seen = self._num_views * video_index + view
            token_ids_TW, mask_TW = self._model.backbone.tokenize([self._captions[row] for row in rows])
            yield PairBatch(
                token_ids_TW.to(self._device),
                mask_TW.to(self._device),
                self._features_VFE[seen],
                self._mask_VF[seen],
                video_index,
            )


def make_sampler(video_index: Sequence[int], config: RunConfig, processes: Processes) -> PairSampler:
    return PairSampler(
        video_index,
        batch_size=config.batch_size,
        seed=config.seed,
        caption_choice=config.data.caption_choice,
        rank=processes.rank,
        world_size=processes.world_size,
    )
