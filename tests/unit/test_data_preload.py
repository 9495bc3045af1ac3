"""Frames kept on the device against the loader that decodes them every time."""

from __future__ import annotations

import tarfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gare.data.loader import Draw, FrameSource, PairLoader, PairSampler
from gare.data.manifest import Header, Manifest, Row
from gare.data.preload import FramesOnDevice, cut_out
from gare.data.transforms import Crop

SIZE = 32
SHAPES = [(32, 32), (48, 32), (32, 40), (56, 32), (32, 56)]  # width, height: the short side is the model's


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Smooth pictures, because the two resample differently; video n has n % 3 + 1 frames."""
    path = tmp_path_factory.mktemp("frames") / "all.tar"
    rng = np.random.default_rng(0)
    with tarfile.open(path, "w") as archive:
        for video, shape in enumerate(SHAPES):
            for frame in range(video % 3 + 1):
                small = Image.fromarray(rng.integers(0, 255, (3, 3, 3), dtype=np.uint8))
                buffer = BytesIO()
                small.resize(shape, Image.Resampling.BICUBIC).save(buffer, "PNG")
                member = tarfile.TarInfo(f"v{video}/{frame:02d}.png")
                member.size = buffer.tell()
                archive.addfile(member, BytesIO(buffer.getvalue()))
    rows = tuple(Row(f"v{n}", f"all.tar::v{n}/", f"video {n}", "train") for n in range(len(SHAPES)))
    return Manifest(Header("smooth", root=str(path.parent)), rows)


@pytest.mark.parametrize("augmentation", ["off", "light", "strong"])
@pytest.mark.parametrize(("num_frames", "draw_frames"), [(1, True), (4, False)])
def test_batches_are_those_of_the_loader(manifest, augmentation, num_frames, draw_frames):
    source = FrameSource(manifest, num_frames, "uniform")
    index = manifest.video_index("train")
    options = {"batch_size": len(index), "seed": 5}
    loader = PairLoader(
        source, "train", image_size=SIZE, augmentation=augmentation, draw_frames=draw_frames, **options
    )
    frames = FramesOnDevice(source, "train", size=SIZE, device=torch.device("cpu"))
    planner = frames.planner(augmentation, draw_frames=draw_frames)
    sampler = PairSampler(index, **options)
    for epoch in range(3):
        sampler.start_at(epoch)
        (draws,) = sampler
        ((_, expected),) = loader.batches(epoch)
        batch = frames.batch(planner.plan([index[d.row] for d in draws], draws))
        assert torch.equal(batch.mask_VF, expected.mask_VF)
        assert torch.equal(batch.video_index, expected.video_index)
        assert batch.pixels_VFCHW.dtype == torch.uint8
        difference = (batch.pixels_VFCHW.int() - expected.pixels_VFCHW.int()).abs().float()
        assert difference.mean() < {"off": 0.6, "light": 2.5, "strong": 3.5}[augmentation]


def test_mixed_clips_are_halfway_between_two(manifest):
    source = FrameSource(manifest, 2, "uniform")
    frames = FramesOnDevice(source, "train", size=SIZE, device=torch.device("cpu"))
    plan = frames.planner("off", draw_frames=False).plan(range(5), [Draw(n, n) for n in range(5)])
    plain, mixed = frames.batch(plan), frames.batch(plan, num_mixed=2)
    assert torch.equal(mixed.mask_VF, plain.mask_VF)
    assert torch.equal(mixed.pixels_VFCHW[2:], plain.pixels_VFCHW[2:])
    pixels = plain.pixels_VFCHW.int()
    # Clip 1 has two frames, both blended with clip 3's only one; clip 0 has one, blended with the first of 2.
    assert torch.equal(mixed.pixels_VFCHW[0, 0].int(), (pixels[0, 0] + pixels[2, 0]) // 2)
    for frame in range(2):
        assert torch.equal(mixed.pixels_VFCHW[1, frame].int(), (pixels[1, frame] + pixels[3, 0]) // 2)


def test_a_crop_is_cut_where_it_should_be():
    picture = torch.arange(100).reshape(1, 1, 10, 10).expand(1, 3, 10, 10).to(torch.uint8)
    cut = cut_out(picture, torch.tensor([Crop(2.0, 4, 4, 4)]), 4)
    assert torch.equal(cut[0, 0], picture[0, 0, 4:8, 2:6])
    mirrored = cut_out(picture, torch.tensor([Crop(2.0, 4, 4, 4, flip=True)]), 4)
    assert torch.equal(mirrored[0, 0], picture[0, 0, 4:8, 2:6].flip(1))


def test_very_wide_pictures_are_cut_at_the_sides(tmp_path: Path):
    Image.new("RGB", (600, SIZE)).save(tmp_path / "wide.png")
    rows = (Row("wide", "wide.png", "a caption", "train"),)
    source = FrameSource(Manifest(Header("one", root=str(tmp_path)), rows), 1, "uniform")
    frames = FramesOnDevice(source, "train", size=SIZE, device=torch.device("cpu"))
    assert frames.canvas_NHWC.shape == (1, SIZE, round(SIZE * 16 / 9), 3)


def test_large_pictures_are_kept_a_little_larger_than_the_model_takes_them(tmp_path: Path):
    Image.new("RGB", (10 * SIZE, 10 * SIZE)).save(tmp_path / "large.png")
    rows = (Row("large", "large.png", "a caption", "train"),)
    source = FrameSource(Manifest(Header("one", root=str(tmp_path)), rows), 1, "uniform")
    frames = FramesOnDevice(source, "train", size=SIZE, device=torch.device("cpu"))
    assert frames.canvas_NHWC.shape == (1, round(1.2 * SIZE), round(1.2 * SIZE), 3)
