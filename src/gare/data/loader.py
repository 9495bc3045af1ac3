"""Batches of captions and frames. Shapes: T texts, V videos, F frames, C = 3 channels, H = W = size.

What a batch holds depends on seed, epoch and position alone: not on the number of worker processes or of
training processes, nor on whether the run was interrupted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from gare.data.colour_jitter import draw_colour_jitter, jitter_colours
from gare.data.frame_cache import FrameCache
from gare.data.frame_sampling import Sampling
from gare.data.manifest import FRAMES_FOLDER, Manifest, Row, Split, find_manifest
from gare.data.transforms import Augmentation, augment, to_bytes
from gare.data.video import SHORT_SIDE, read_frames, source_exists
from gare.errors import DataError
from gare.image_fit import CROP, ImageFit

CaptionChoice = Literal["all", "one_per_video"]
"""`all`: an epoch shows every caption once. `one_per_video`: every video once, with a caption drawn anew."""


@dataclass(frozen=True)
class TextBatch:
    """Captions, and for each the position of its video in the split's gallery."""

    captions: list[str]
    video_index: Tensor

    def __len__(self) -> int:
        return len(self.captions)


@dataclass(frozen=True)
class VideoBatch:
    """Frames as bytes, for `GARE.encode_frames`; `mask_VF` is true where a frame is real."""

    pixels_VFCHW: Tensor
    mask_VF: Tensor
    video_index: Tensor

    def __len__(self) -> int:
        return self.pixels_VFCHW.shape[0]

    def to(self, device: torch.device | str) -> VideoBatch:
        """The batch on another device; from pinned memory without waiting."""
        tensors = (self.pixels_VFCHW, self.mask_VF, self.video_index)
        return VideoBatch(*(tensor.to(device, non_blocking=True) for tensor in tensors))

    def pin_memory(self) -> VideoBatch:
        """The batch in memory that a GPU can copy from by itself."""
        return VideoBatch(
            self.pixels_VFCHW.pin_memory(), self.mask_VF.pin_memory(), self.video_index.pin_memory()
        )


@dataclass(frozen=True)
class FrameSource:
    """Where the frames of a manifest's videos come from: a cache that has them, else the video itself."""

    manifest: Manifest
    num_frames: int
    sampling: Sampling = "grid"
    caches: Sequence[FrameCache] = ()
    missing: tuple[str, ...] = ()
    """Videos that were left out because they have no frames; report their number with every result."""
    short_side: int | None = SHORT_SIDE
    """Larger frames are scaled down to this while decoding; None leaves them as they are."""

    @classmethod
    def open(
        cls, path: Path, num_frames: int, sampling: Sampling = "grid", *, allow_missing: bool = False
    ) -> FrameSource:
        """What `gare data prepare` made: its folder, or the manifest in it.

        Raises:
            DataError: a video has no frames, or rows are gone; `allow_missing` leaves such videos out.
        """
        path = find_manifest(path)
        manifest = Manifest.load(path, allow_missing=allow_missing)
        folder = path.parent / FRAMES_FOLDER
        caches = [FrameCache(folder)] if folder.is_dir() else []
        for cache in caches:
            _check_settings(cache, num_frames, sampling)
        videos = manifest.all_videos()
        if caches:
            absent = [video.video_id for video in videos if video.video_id not in caches[0]]
        else:
            absent = [video.video_id for video in videos if not source_exists(manifest.source(video))]
        if absent and not allow_missing:
            raise DataError(
                f"{len(absent)} of {len(videos)} videos have no frames, such as {', '.join(absent[:3])}. "
                f"See what is wrong ('gare data check {path}'), mend them and prepare again, or "
                "leave them out with --allow-missing (gare train: --set data.allow_missing=true)."
            )
        return cls(manifest.without(absent), num_frames, sampling, caches, tuple(absent))

    def read(
        self,
        video: Row,
        *,
        num_frames: int | None = None,
        offset: float = 0.5,
    ) -> list[Image.Image]:
        """The frames of one video, from the cache if it has them."""
        num_frames = num_frames or self.num_frames
        for cache in self.caches:
            if video.video_id in cache:
                return cache.read(video.video_id, num_frames, self.sampling, offset=offset)
        source = self.manifest.source(video)
        return read_frames(
            source,
            num_frames,
            self.sampling,
            start=video.start,
            end=video.end,
            short_side=self.short_side,
            offset=offset,
        )


def _check_settings(cache: FrameCache, num_frames: int, sampling: Sampling) -> None:
    made = cache.settings
    if made.num_frames < num_frames or made.sampling != sampling:
        raise DataError(
            f"{cache.folder} holds {made.num_frames} frames a video, sampling '{made.sampling}'; asked for "
            f"{num_frames}, '{sampling}'. Prepare with --frames {num_frames} --sampling {sampling}"
        )


class Draw(NamedTuple):
    """One training pair: which caption, and the seed of its augmentation."""

    row: int
    seed: int


class PairSampler(Sampler[list[Draw]]):
    """The pairs of every batch of an epoch, for one of several training processes.

    Args:
        video_index: for every caption, the position of its video.
        batch_size: of the global batch, of which rank r takes the r-th of `world_size` equal parts.
        seed: with epoch and position, decides everything.
    """

    def __init__(
        self,
        video_index: Sequence[int],
        *,
        batch_size: int,
        seed: int,
        caption_choice: CaptionChoice = "all",
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if batch_size % world_size or not 0 <= rank < world_size:
            raise ValueError(
                f"batch_size {batch_size} is not a multiple of {world_size} processes (rank {rank})"
            )
        if caption_choice not in ("all", "one_per_video"):
            raise ValueError(f"caption_choice '{caption_choice}' is not one of all, one_per_video")
        self._captions_of: dict[int, list[int]] = {}
        for row, video in enumerate(video_index):
            self._captions_of.setdefault(video, []).append(row)
        self._one_per_video = caption_choice == "one_per_video"
        self._num_pairs = len(self._captions_of) if self._one_per_video else len(video_index)
        self._batch_size, self._seed, self._rank, self._world_size = batch_size, seed, rank, world_size
        self._epoch, self._position = 0, 0
        if self._num_pairs < batch_size:
            raise DataError(
                f"a batch of {batch_size} needs more than the {self._num_pairs} training pairs there are; "
                f"set it to {self._num_pairs} or less, as in --set batch_size={self._num_pairs}"
            )

    def __len__(self) -> int:
        """Batches in an epoch; the pairs left over at its end wait for another epoch's order."""
        return self._num_pairs // self._batch_size

    def start_at(self, epoch: int, position: int = 0) -> None:
        """The next iteration begins with this batch of this epoch."""
        self._epoch, self._position = epoch, position

    def __iter__(self) -> Iterator[list[Draw]]:
        order = self._order()
        share = self._batch_size // self._world_size
        for batch in range(self._position, len(self)):
            first = batch * self._batch_size + self._rank * share
            yield [Draw(order[n], mix_seeds(self._seed, self._epoch, n)) for n in range(first, first + share)]

    def _order(self) -> list[int]:
        generator = torch.Generator().manual_seed(mix_seeds(self._seed, self._epoch))
        shuffled: list[int] = torch.randperm(self._num_pairs, generator=generator).tolist()
        if not self._one_per_video:
            return shuffled
        choices = torch.rand(self._num_pairs, generator=generator).tolist()
        captions = list(self._captions_of.values())
        return [captions[video][int(choices[video] * len(captions[video]))] for video in shuffled]


class PairLoader:
    """Training batches of one split.

    Examples:
        loader = PairLoader(source, "train", image_size=224, batch_size=128, seed=0, num_workers=8)
        for text, video in loader.batches(epoch=3, start=120): ...
    """

    def __init__(
        self,
        source: FrameSource,
        split: Split,
        *,
        image_size: int,
        fit: ImageFit = CROP,
        batch_size: int,
        seed: int,
        augmentation: Augmentation = "off",
        caption_choice: CaptionChoice = "all",
        draw_frames: bool = False,
        num_workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._sampler = PairSampler(
            source.manifest.video_index(split),
            batch_size=batch_size,
            seed=seed,
            caption_choice=caption_choice,
            rank=rank,
            world_size=world_size,
        )
        self._loader: DataLoader[tuple[TextBatch, VideoBatch]] = DataLoader(
            _Pairs(_for(source, fit), split, image_size, fit, augmentation, draw_frames),  # type: ignore[arg-type]
            batch_sampler=self._sampler,
            collate_fn=_Collate(source.num_frames),
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )

    def __len__(self) -> int:
        return len(self._sampler)

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[TextBatch, VideoBatch]]:
        """The batches of an epoch from position `start` on; every position always holds the same pairs."""
        self._sampler.start_at(epoch, start)
        return iter(self._loader)


def load_gallery(
    source: FrameSource,
    split: Split,
    *,
    image_size: int,
    fit: ImageFit = CROP,
    batch_size: int,
    num_workers: int = 0,
) -> Iterable[VideoBatch]:
    """Every video of the split once, in the order of `manifest.videos(split)`."""
    return DataLoader(
        _Gallery(_for(source, fit), split, image_size, fit),
        batch_size=batch_size,
        collate_fn=_Collate(source.num_frames).videos,
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
    )


def _for(source: FrameSource, fit: ImageFit) -> FrameSource:
    """Training and evaluation see frames of one size whatever the tower takes, unless it wants them whole."""
    return replace(source, short_side=None) if fit.as_processor else source


class _Sample(NamedTuple):
    caption: str
    video_index: int
    bytes_FCHW: Tensor


class _Gallery(Dataset[_Sample]):
    def __init__(self, source: FrameSource, split: Split, image_size: int, fit: ImageFit) -> None:
        self._source, self._size, self._fit = source, image_size, fit
        self._videos = source.manifest.videos(split)

    def __len__(self) -> int:
        return len(self._videos)

    def __getitem__(self, index: int) -> _Sample:
        frames = self._source.read(self._videos[index])
        return _Sample("", index, to_bytes(frames, self._size, self._fit))


class _Pairs(Dataset[_Sample]):
    def __init__(
        self,
        source: FrameSource,
        split: Split,
        image_size: int,
        fit: ImageFit,
        augmentation: Augmentation,
        draw_frames: bool,
    ) -> None:
        self._source, self._size, self._fit, self._augmentation = source, image_size, fit, augmentation
        self._draw_frames = draw_frames
        self._videos = source.manifest.videos(split)
        self._captions = source.manifest.captions(split)
        self._video_index = source.manifest.video_index(split)

    def __len__(self) -> int:
        return len(self._captions)

    def __getitem__(self, draw: Draw) -> _Sample:
        index = self._video_index[draw.row]
        generator = torch.Generator().manual_seed(draw.seed)
        offset = float(torch.rand((), generator=generator)) if self._draw_frames else 0.5
        frames = self._source.read(self._videos[index], offset=offset)
        images = augment(frames, self._augmentation, generator=generator)
        pixels_FCHW = to_bytes(images, self._size, self._fit)
        if self._augmentation == "strong":
            pixels_FCHW = jitter_colours(pixels_FCHW[None], torch.tensor([draw_colour_jitter(generator)]))[0]
        return _Sample(self._captions[draw.row], index, pixels_FCHW)


@dataclass(frozen=True)
class _Collate:
    """Pads every clip to the same number of frames, so that shapes stay fixed from batch to batch."""

    num_frames: int

    def __call__(self, samples: Sequence[_Sample]) -> tuple[TextBatch, VideoBatch]:
        video = self.videos(samples)
        return TextBatch([sample.caption for sample in samples], video.video_index), video

    def videos(self, samples: Sequence[_Sample]) -> VideoBatch:
        channels, height, width = samples[0].bytes_FCHW.shape[1:]
        # Channels last in memory, as the frames come: plain copies, and what convolutions prefer. By numpy,
        # because torch spreads small copies over threads that then wait for each other.
        shape = (len(samples), self.num_frames, height, width, channels)
        pixels_VFHWC = np.zeros(shape, dtype=np.uint8)
        mask_VF = torch.zeros(len(samples), self.num_frames, dtype=torch.bool)
        for index, sample in enumerate(samples):
            count = len(sample.bytes_FCHW)
            pixels_VFHWC[index, :count] = sample.bytes_FCHW.permute(0, 2, 3, 1).numpy()
            mask_VF[index, :count] = True
        video_index = torch.tensor([sample.video_index for sample in samples])
        return VideoBatch(torch.from_numpy(pixels_VFHWC).permute(0, 1, 4, 2, 3), mask_VF, video_index)


def mix_seeds(*numbers: int) -> int:
    """A 63-bit seed from several numbers; nearby inputs give unrelated seeds."""
    digest = hashlib.blake2b("/".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
