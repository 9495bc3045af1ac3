"""Every frame of a split decoded once and kept as bytes on the device, where batches are cut out of them.

For image sets that fit: decoding them anew every epoch kept a GPU waiting half of the time.
Shapes: N frames, C = 3, H × W the canvas, V videos, F frames of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gare.data.loader import Draw, FrameSource, VideoBatch
from gare.data.manifest import Split
from gare.data.recolour import Recolouring, draw_recolouring, recolour
from gare.data.sampling import sample_indices
from gare.data.transforms import LEAST_AREA, Augmentation, Crop, random_crop
from gare.errors import ConfigError, DataError

LONGEST = 16 / 9
"""Wider pictures are cut at the sides, so that all fit one canvas."""
_ALL_FRAMES = 10_000


class FramesOnDevice:
    """The frames of a split: `canvas_NCHW` holds each in its top left corner, `size_N2` its height and width.

    Args:
        size: of the pictures a model takes; frames are kept with this short side.
    """

    def __init__(
        self,
        source: FrameSource,
        split: Split,
        *,
        size: int,
        device: torch.device,
        num_workers: int = 0,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._size, self._source = size, source
        loader: DataLoader[list[np.ndarray]] = DataLoader(
            _Videos(source, split, size),
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
        self.canvas_NCHW = torch.zeros(len(frames), 3, height, width, dtype=torch.uint8, device=device)
        for row, frame in enumerate(frames):
            target = self.canvas_NCHW[row, :, : frame.shape[0], : frame.shape[1]]
            target.copy_(torch.from_numpy(frame).permute(2, 0, 1), non_blocking=True)
        self._count_V = np.array(counts)
        self._first_V = np.cumsum(self._count_V) - self._count_V

    def batch(
        self, videos: Sequence[int], draws: Sequence[Draw], augmentation: Augmentation, *, draw_frames: bool
    ) -> VideoBatch:
        """What the loader would give for these draws: the same frames and crops, resampled by the device."""
        if augmentation == "randaugment":
            raise ConfigError(
                "data.preload does not know randaugment: use augmentation 'off', 'light' or 'strong'"
            )
        num_frames, device = self._source.num_frames, self.canvas_NCHW.device
        row_VF = np.zeros((len(draws), num_frames), dtype=np.int64)
        mask_VF = np.zeros((len(draws), num_frames), dtype=bool)
        crops: list[Crop] = []
        recolourings: list[Recolouring] = []
        generator = torch.Generator()
        for place, (video, draw) in enumerate(zip(videos, draws, strict=True)):
            generator.manual_seed(draw.seed)
            offset = float(torch.rand((), generator=generator)) if draw_frames else 0.5
            chosen = sample_indices(
                int(self._count_V[video]), num_frames, self._source.sampling, offset=offset
            )
            row_VF[place, : len(chosen)] = chosen
            row_VF[place] += self._first_V[video]
            mask_VF[place, : len(chosen)] = True
            height, width = self.size_N2[self._first_V[video]].tolist()
            crop = Crop(0, 0, width, height)
            if augmentation in LEAST_AREA:
                crop = random_crop(width, height, LEAST_AREA[augmentation], generator)
            crops += [central_square(crop)] * num_frames
            if augmentation == "strong":
                recolourings.append(draw_recolouring(generator))
        row_N = torch.from_numpy(row_VF.ravel()).to(device, non_blocking=True)
        pixels_VFCHW = cut_out(self.canvas_NCHW[row_N], crops, self._size).unflatten(0, mask_VF.shape)
        if recolourings:
            pixels_VFCHW = recolour(pixels_VFCHW, recolourings)
        is_frame_VF = torch.from_numpy(mask_VF).to(device, non_blocking=True)
        pixels_VFCHW = pixels_VFCHW.masked_fill(~is_frame_VF[:, :, None, None, None], 0)
        return VideoBatch(pixels_VFCHW, is_frame_VF, torch.tensor(videos, device=device))


def central_square(crop: Crop) -> Crop:
    """
    >>> central_square(Crop(10, 0, 60, 40))
    Crop(left=20.0, top=0.0, width=40, height=40, flip=False)
    """
    side = min(crop.width, crop.height)
    left, top = crop.left + (crop.width - side) / 2, crop.top + (crop.height - side) / 2
    return Crop(left, top, side, side, crop.flip)


def cut_out(pictures_NCHW: Tensor, crops: Sequence[Crop], size: int) -> Tensor:
    """Each picture's crop at `size` × `size`, as bytes; bilinear."""
    height, width = pictures_NCHW.shape[-2:]
    boxes = torch.tensor([(c.left, c.top, c.width, c.height, -1.0 if c.flip else 1.0) for c in crops])
    left, top, box_width, box_height, sign = boxes.to(pictures_NCHW.device).unbind(dim=1)
    zero = torch.zeros_like(left)
    # From the square [−1, 1]² of the output to that of the picture.
    across = torch.stack([sign * box_width / width, zero, (2 * left + box_width) / width - 1], dim=1)
    down = torch.stack([zero, box_height / height, (2 * top + box_height) / height - 1], dim=1)
    grid = F.affine_grid(torch.stack([across, down], dim=1), [len(crops), 3, size, size], align_corners=False)
    cut = F.grid_sample(
        pictures_NCHW.float(), grid, mode="bilinear", padding_mode="border", align_corners=False
    )
    return cut.round_().clamp_(0, 255).to(torch.uint8).contiguous(memory_format=torch.channels_last)


class _Videos(Dataset[list[np.ndarray]]):
    """All frames of each video, scaled to the short side and cut where they are very wide or high."""

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
    scale = short_side / min(image.size)
    longest = round(LONGEST * short_side)
    width, height = (min(longest, max(short_side, round(side * scale))) for side in image.size)
    x, y = (image.width - width / scale) / 2, (image.height - height / scale) / 2
    box = (max(0.0, x), max(0.0, y), min(image.width, image.width - x), min(image.height, image.height - y))
    return (
        image
        if image.size == (width, height)
        else image.resize((width, height), Image.Resampling.BICUBIC, box)
    )
