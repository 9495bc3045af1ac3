"""Batches: complete, seeded, resumable, the same for any number of processes."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from PIL import Image

from clips import numbered_image, read_number
from gare.data.loader import FrameSource, PairLoader, PairSampler, load_gallery
from gare.data.manifest import Header, Manifest, Row
from gare.errors import DataError

NUM_VIDEOS = 10


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """Video n has n % 3 + 1 frames and two captions; frame f of it shows 100 n + f."""
    with tarfile.open(tmp_path / "all.tar", "w") as archive:
        for video in range(NUM_VIDEOS):
            for frame in range(video % 3 + 1):
                buffer = io.BytesIO()
                numbered_image(100 * video + frame).save(buffer, "PNG")
                member = tarfile.TarInfo(f"v{video}/{frame:02d}.png")
                member.size = buffer.tell()
                archive.addfile(member, io.BytesIO(buffer.getvalue()))
    rows = tuple(
        Row(f"v{video}", f"all.tar::v{video}/", f"{word} {video}", "train")
        for video in range(NUM_VIDEOS)
        for word in ("one", "two")
    )
    return Manifest(Header("numbers", root=str(tmp_path)), rows)


def make_loader(manifest: Manifest, **options: object) -> PairLoader:
    settings = {"image_size": 48, "batch_size": 4, "seed": 3, **options}
    return PairLoader(FrameSource(manifest, 4), "train", **settings)  # type: ignore[arg-type]


def flat(batches: object) -> list[tuple[list[str], bytes]]:
    return [(text.captions, video.pixels_VFCHW.numpy().tobytes()) for text, video in batches]  # type: ignore[attr-defined]


def test_frames_belong_to_their_captions(manifest: Manifest) -> None:
    for text, video in make_loader(manifest).batches(epoch=0):
        assert video.pixels_VFCHW.shape == (4, 4, 3, 48, 48)
        assert video.pixels_VFCHW.dtype == torch.uint8
        assert torch.equal(text.video_index, video.video_index)
        for caption, index, mask_F in zip(text.captions, text.video_index, video.mask_VF, strict=True):
            assert caption.endswith(f" {index}")
            assert mask_F.tolist() == [position < index % 3 + 1 for position in range(4)]
        assert not video.pixels_VFCHW[~video.mask_VF].any()


def test_an_epoch_shows_every_caption_once(manifest: Manifest) -> None:
    shown = [caption for text, _ in make_loader(manifest).batches(0) for caption in text.captions]
    assert sorted(shown) == sorted(manifest.captions("train"))
    other = [caption for text, _ in make_loader(manifest).batches(1) for caption in text.captions]
    assert shown != other


def test_one_per_video_shows_every_video_once_with_changing_captions(manifest: Manifest) -> None:
    loader = make_loader(manifest, batch_size=5, caption_choice="one_per_video")
    words = set()
    for epoch in range(6):
        pairs = [
            (int(i), c)
            for t, _ in loader.batches(epoch)
            for i, c in zip(t.video_index, t.captions, strict=True)
        ]
        assert sorted(index for index, _ in pairs) == list(range(NUM_VIDEOS))
        words |= {caption for index, caption in pairs if index == 0}
    assert words == {"one 0", "two 0"}


def test_resume_continues_the_same_order_and_augmentation(manifest: Manifest) -> None:
    whole = flat(make_loader(manifest, augmentation="randaugment").batches(2))
    assert flat(make_loader(manifest, augmentation="randaugment").batches(2, start=3)) == whole[3:]
    with_workers = make_loader(manifest, augmentation="randaugment", num_workers=2)
    next(with_workers.batches(7))  # given up after one batch
    assert flat(with_workers.batches(2)) == whole


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_share_the_batch_of_one_process(manifest: Manifest, world_size: int) -> None:
    alone = make_loader(manifest, augmentation="light").batches(1)
    ranks = [
        make_loader(manifest, augmentation="light", rank=rank, world_size=world_size).batches(1)
        for rank in range(world_size)
    ]
    for (text, video), *parts in zip(alone, *ranks, strict=True):
        assert text.captions == [caption for part, _ in parts for caption in part.captions]
        assert torch.equal(video.pixels_VFCHW, torch.cat([part.pixels_VFCHW for _, part in parts]))


def test_the_gallery_is_in_order(manifest: Manifest) -> None:
    batches = list(load_gallery(FrameSource(manifest, 4), "train", image_size=48, batch_size=4))
    assert torch.cat([batch.video_index for batch in batches]).tolist() == list(range(NUM_VIDEOS))
    assert [len(batch) for batch in batches] == [4, 4, 2]
    gallery = FrameSource(manifest, 4)
    first = [gallery.read(video)[0] for video in manifest.videos("train")]
    assert [read_number(image) for image in first] == [100 * n for n in range(NUM_VIDEOS)]
    assert isinstance(first[0], Image.Image)


def test_impossible_wishes_are_refused(manifest: Manifest) -> None:
    with pytest.raises(DataError, match=r"batch of 64 needs more than the 20 training pairs.* 20 or less"):
        make_loader(manifest, batch_size=64)
    with pytest.raises(ValueError, match="not a multiple of 3 processes"):
        PairSampler([0, 1, 2, 3], batch_size=4, seed=0, world_size=3)
    with pytest.raises(ValueError, match="all, one_per_video"):
        PairSampler([0, 1], batch_size=2, seed=0, caption_choice="some")  # type: ignore[arg-type]


def test_missing_videos_are_refused_or_counted(manifest: Manifest, tmp_path: Path) -> None:
    rows = (*manifest.rows, Row("v99", "all.tar::v99/", "a ghost", "train"))
    Manifest(manifest.header, rows).save(tmp_path / "manifest.csv")
    with pytest.raises(DataError, match="1 of 11 videos have no frames, such as v99"):
        FrameSource.open(tmp_path, 4)
    source = FrameSource.open(tmp_path, 4, allow_missing=True)
    assert source.missing == ("v99",)
    assert len(source.manifest.videos("train")) == NUM_VIDEOS


class RecordingSource(FrameSource):
    """Notes which part of a video was asked for."""

    offsets: ClassVar[list[float]] = []

    def read(self, video: Row, *, offset: float = 0.5) -> list[Image.Image]:
        self.offsets.append(offset)
        return super().read(video, offset=offset)


def test_drawn_frames_vary_and_come_back_with_the_seed(manifest: Manifest) -> None:
    source = RecordingSource(manifest, 1, "uniform")
    third = manifest.videos("train")[2]  # it has three frames
    drawn = [read_number(source.read(third, offset=offset)[0]) for offset in (0.1, 0.5, 0.9)]
    assert drawn == [200, 201, 202]

    loader = PairLoader(source, "train", image_size=48, batch_size=10, seed=3, draw_frames=True)
    runs = []
    for epoch in (0, 1, 0):
        source.offsets.clear()
        list(loader.batches(epoch))
        runs.append(list(source.offsets))
    assert len(set(runs[0])) == len(runs[0]) == 20
    assert runs[0] == runs[2] != runs[1]
