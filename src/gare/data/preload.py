"""Every frame of a split decoded once and kept as bytes on the device, where batches are cut out of them.

For image sets that fit: decoding them anew every epoch kept a GPU waiting half of the time.
Shapes: N frames, C = 3, H × W the canvas, V videos, F frames of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gare.data.colour_jitter import ColourJitter, draw_colour_jitter, jitter_colours
from gare.data.frame_sampling import Sampling, sample_indices
from gare.data.loader import Draw, FrameSource, VideoBatch
from gare.data.manifest import Split
from gare.data.transforms import LEAST_AREA, Augmentation, Crop, random_crop
from gare.errors import ConfigError, DataError
from gare.image_fit import CROP, ImageFit

LONGEST = 16 / 9
"""Wider pictures are cut at the sides, so that all fit one canvas."""
_MARGIN = 1.2
"""Pictures are kept up to this much larger than a model takes them: a crop of a part would be blown up."""
_ALL_FRAMES = 10_000


class Plan(NamedTuple):
    """Which frames a batch shows and what is done to each: all that is drawn, before any pixel is touched."""

    video_index: Tensor
    row_VF: Tensor
    mask_VF: Tensor
    crop_N5: Tensor
    jitter_V7: Tensor | None


@dataclass(frozen=True)
class Planner:
    """Draws plans from the sizes of frames alone, so that other processes can do it ahead of the device."""

    first_V: np.ndarray
    count_V: np.ndarray
    size_N2: np.ndarray
    num_frames: int
    sampling: Sampling
    augmentation: Augmentation
    draw_frames: bool
    size: int = 1
    fit: ImageFit = CROP

    def __post_init__(self) -> None:
        if self.fit.mode not in ("crop", "squash"):
            raise ConfigError(
                f"pictures cannot be fitted by {self.fit.mode} on the device; use "
                "data.frames = 'stream', or 'cached' without augmentation"
            )
        if self.augmentation == "randaugment":
            raise ConfigError(
                "data.frames = 'preload' has no randaugment; set augmentation to 'off', 'light' or 'strong'"
            )

    def plan(self, videos: Sequence[int], draws: Sequence[Draw]) -> Plan:
        """The frames and crops that the loader would draw."""
        row_VF = np.zeros((len(draws), self.num_frames), dtype=np.int64)
        mask_VF = np.zeros((len(draws), self.num_frames), dtype=bool)
        crops: list[Crop] = []
        jitters: list[ColourJitter] = []
        generator = torch.Generator()
        for place, (video, draw) in enumerate(zip(videos, draws, strict=True)):
            generator.manual_seed(draw.seed)
            offset = float(torch.rand((), generator=generator)) if self.draw_frames else 0.5
            chosen = sample_indices(int(self.count_V[video]), self.num_frames, self.sampling, offset=offset)
            row_VF[place, : len(chosen)] = chosen
            row_VF[place] += self.first_V[video]
            mask_VF[place, : len(chosen)] = True
            height, width = self.size_N2[self.first_V[video]].tolist()
            crop = Crop(0, 0, width, height)
            if self.augmentation in LEAST_AREA:
                crop = random_crop(width, height, LEAST_AREA[self.augmentation], generator)
            crops += [fitted_box(crop, self.size, self.fit)] * self.num_frames
            if self.augmentation == "strong":
                jitters.append(draw_colour_jitter(generator))
        return Plan(
            torch.tensor(videos),
            torch.from_numpy(row_VF),
            torch.from_numpy(mask_VF),
            torch.tensor(crops, dtype=torch.float32),
            torch.tensor(jitters) if jitters else None,
        )


class FramesOnDevice:
    """The frames of a split: `canvas_NHWC` holds each in its top left corner, `size_N2` its height and width.

    Args:
        size: of the pictures a model takes; larger frames are kept with a somewhat longer short side.
        fit: how a picture becomes such a square.
    """

    def __init__(
        self,
        source: FrameSource,
        split: Split,
        *,
        size: int,
        fit: ImageFit = CROP,
        device: torch.device,
        num_workers: int = 0,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._size, self._fit, self._source = size, fit, source
        loader: DataLoader[list[np.ndarray]] = DataLoader(
            _Videos(source, split, round(_MARGIN * (fit.edge or size))),
            batch_size=None,
            num_workers=num_workers,
            # As they are: made into tensors, each would hold a file descriptor of shared memory.
            collate_fn=_as_it_is,
        )
        frames: list[np.ndarray] = []
        counts: list[int] = []
        for done, video in enumerate(loader, start=1):
            frames += video
            counts.append(len(video))
            on_progress(done, len(loader))
        if not frames:
            raise DataError(f"the split '{split}' has no frames")
        height, width = (max(frame.shape[axis] for frame in frames) for axis in (0, 1))
        self.size_N2 = np.array([frame.shape[:2] for frame in frames])
        self.canvas_NHWC = torch.zeros(len(frames), height, width, 3, dtype=torch.uint8, device=device)
        for row, frame in enumerate(frames):
            target_HWC = self.canvas_NHWC[row, : frame.shape[0], : frame.shape[1]]
            target_HWC.copy_(torch.from_numpy(frame), non_blocking=True)
        self._count_V = np.array(counts)
        self._first_V = np.cumsum(self._count_V) - self._count_V

    def planner(self, augmentation: Augmentation, *, draw_frames: bool) -> Planner:
        """What draws the batches of these frames."""
        source = self._source
        return Planner(
            self._first_V,
            self._count_V,
            self.size_N2,
            source.num_frames,
            source.sampling,
            augmentation,
            draw_frames,
            self._size,
            self._fit,
        )

    def batch(self, plan: Plan, *, num_mixed: int = 0) -> VideoBatch:
        """What the loader would give for these draws, resampled by the device.

        Args:
            num_mixed: the first so many clips are blended with as many that follow them.
        """
        device = self.canvas_NHWC.device
        # Padding is cut only where it may be blended: a picture shown beside the later frames of a video.
        is_cut_VF = torch.ones_like(plan.mask_VF) if num_mixed else plan.mask_VF
        place_K = is_cut_VF.ravel().nonzero().squeeze(1)
        row_K = plan.row_VF.ravel()[place_K].to(device, non_blocking=True)
        pictures_KCHW = self.canvas_NHWC[row_K].permute(0, 3, 1, 2)
        cut_KCHW = cut_out(pictures_KCHW, plan.crop_N5[place_K], self._size)
        empty_NCHW = cut_KCHW.new_zeros(is_cut_VF.numel(), *cut_KCHW.shape[1:])
        pixels_NCHW = empty_NCHW.index_copy_(0, place_K.to(device, non_blocking=True), cut_KCHW)
        pixels_VFCHW = pixels_NCHW.unflatten(0, plan.mask_VF.shape)
        mask_VF = plan.mask_VF.to(device, non_blocking=True)
        if plan.jitter_V7 is not None:
            pixels_VFCHW = jitter_colours(pixels_VFCHW, plan.jitter_V7, mask_VF)
        if num_mixed:
            own, other = pixels_VFCHW[:num_mixed], pixels_VFCHW[num_mixed : 2 * num_mixed]
            pixels_VFCHW[:num_mixed] = ((own.short() + other) // 2).to(torch.uint8)
        pixels_VFCHW = pixels_VFCHW.masked_fill(~mask_VF[:, :, None, None, None], 0)
        return VideoBatch(pixels_VFCHW, mask_VF, plan.video_index.to(device, non_blocking=True))


def central_square(crop: Crop) -> Crop:
    """The largest square in the middle of a crop.

    >>> central_square(Crop(10, 0, 60, 40))
    Crop(left=20.0, top=0.0, width=40, height=40, flip=False)
    """
    side = min(crop.width, crop.height)
    left, top = crop.left + (crop.width - side) / 2, crop.top + (crop.height - side) / 2
    return Crop(left, top, side, side, crop.flip)


def fitted_box(crop: Crop, size: int, fit: ImageFit) -> Crop:
    """The part of a crop that the model sees: its middle, or all of it.

    >>> fitted_box(Crop(10, 0, 60, 40), 32, ImageFit("squash"))
    Crop(left=10.0, top=0.0, width=60.0, height=40.0, flip=False)
    """
    box = crop if fit.mode == "squash" else central_square(crop)
    share = size / (fit.edge or size)
    left, top = box.left + (1 - share) * box.width / 2, box.top + (1 - share) * box.height / 2
    return Crop(left, top, share * box.width, share * box.height, box.flip)


def cut_out(pictures_NCHW: Tensor, crop_N5: Tensor, size: int) -> Tensor:
    """Each picture's `Crop` at `size` × `size`, as bytes; bilinear."""
    height, width = pictures_NCHW.shape[-2:]
    crop_N5 = crop_N5.to(pictures_NCHW.device, non_blocking=True)
    left, top, box_width, box_height, flip = crop_N5.unbind(dim=1)
    sign = 1 - 2 * flip
    zero = torch.zeros_like(left)
    # From the square [−1, 1]² of the output to that of the picture.
    across = torch.stack([sign * box_width / width, zero, (2 * left + box_width) / width - 1], dim=1)
    down = torch.stack([zero, box_height / height, (2 * top + box_height) / height - 1], dim=1)
    grid = F.affine_grid(
        torch.stack([across, down], dim=1), [len(crop_N5), 3, size, size], align_corners=False
    )
    cut = F.grid_sample(
        pictures_NCHW.float(), grid, mode="bilinear", padding_mode="border", align_corners=False
    )
    return cut.round_().clamp_(0, 255).to(torch.uint8).contiguous(memory_format=torch.channels_last)


class _Videos(Dataset[list[np.ndarray]]):
    """All frames of each video, scaled down to the short side and cut where they are very wide or high."""

    def __init__(self, source: FrameSource, split: Split, short_side: int) -> None:
        self._source, self._videos, self._short_side = source, source.manifest.videos(split), short_side

    def __len__(self) -> int:
        return len(self._videos)

    def __getitem__(self, index: int) -> list[np.ndarray]:
        frames = self._source.read(self._videos[index], num_frames=_ALL_FRAMES)
        return [np.array(_fit(frame, self._short_side)) for frame in frames]


def _as_it_is(video: list[np.ndarray]) -> list[np.ndarray]:
    return video


def _fit(image: Image.Image, short_side: int) -> Image.Image:
    image = image.convert("RGB")
    scale = min(1.0, short_side / min(image.size))
    short_side = round(min(image.size) * scale)
    longest = round(LONGEST * short_side)
    width, height = (min(longest, max(short_side, round(side * scale))) for side in image.size)
    x, y = (image.width - width / scale) / 2, (image.height - height / scale) / 2
    box = (max(0.0, x), max(0.0, y), min(image.width, image.width - x), min(image.height, image.height - y))
    return (
        image
        if image.size == (width, height)
        else image.resize((width, height), Image.Resampling.BICUBIC, box)
    )
