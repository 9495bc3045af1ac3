"""The data of the decisive experiment: two halves, vectors of the second, tasks made of them.

The towers learn from one half of the pictures. psi learns from vectors of the other half, which the towers
never saw, and is tested on a part of that half which psi never saw. Ids alone decide who goes where.

Shapes: N items (pictures or videos), F frames, T texts, D embedding, V test videos, S shots.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor

from gare import GARE
from gare.atomic import replacing
from gare.data.frame_images import list_images
from gare.data.loader import FrameSource
from gare.data.manifest import Manifest, Row, find_manifest
from gare.errors import DataError
from gare.evaluate.model_evaluation import encode_gallery
from gare.types import TextFeatures, VideoFeatures, block_slices

PICTURE_SETS = ("flickr8k", "coco")
VIDEO_SET = "msrvtt_frames"
FEWEST_FRAMES = 4
"""Videos with fewer frames are the towers' half, the others psi's."""
NUM_FRAMES = 12
"""Every video of every task has room for so many: all programs have one shape, and are compiled once."""
TEST_PICTURES, TEST_VIDEOS = 2_000, 500
BANK_TEXTS = 2_000
SHOTS = {"A1": 1, "A2": 2, "A4": 4}
"""Tasks of pseudo-videos, and how many pictures a pseudo-video has. Task B is MSR-VTT's own videos."""
MOST_BYTES = 15_000_000
TEXTS_AT_A_TIME = 4_096


# --- two halves --------------------------------------------------------------------------------------------


def order_of(video_id: str) -> str:
    """Where an item stands in the draw: fixed by its id."""
    return hashlib.sha256(f"decisive/{video_id}".encode()).hexdigest()


def write_halves(data: Path, *, most: int | None = None) -> None:
    """Write towers.csv (train, val) and psi.csv (train, test) beside each manifest; `most` items of each."""
    pictures = {name: Manifest.load(find_manifest(data / name)) for name in PICTURE_SETS}
    videos = Manifest.load(find_manifest(data / VIDEO_SET))
    towers, psi = {}, {}
    for name, manifest in pictures.items():
        ids = sorted((row.video_id for row in manifest.videos("train")), key=order_of)
        towers[name], psi[name] = set(ids[0::2][:most]), set(ids[1::2][:most])
    rows = sorted(videos.videos("train"), key=lambda row: order_of(row.video_id))
    is_long = {row.video_id: len(list_images(videos.source(row))) >= FEWEST_FRAMES for row in rows}
    towers[VIDEO_SET] = set([row.video_id for row in rows if not is_long[row.video_id]][:most])
    psi[VIDEO_SET] = set([row.video_id for row in rows if is_long[row.video_id]][:most])
    held_out = _first(set().union(*(psi[name] for name in PICTURE_SETS)), TEST_PICTURES)
    held_out |= _first(psi[VIDEO_SET], TEST_VIDEOS)
    for name, manifest in {**pictures, VIDEO_SET: videos}.items():
        _save(manifest, data / name / "towers.csv", towers[name], set(), keep_val=name == VIDEO_SET)
        _save(manifest, data / name / "psi.csv", psi[name], held_out, keep_val=False)


def _first(ids: set[str], number: int) -> set[str]:
    """The test items: the last of the draw, at most a third of them all."""
    return set(sorted(ids, key=order_of)[-min(number, max(1, len(ids) // 3)) :])


def _save(manifest: Manifest, path: Path, kept: set[str], held_out: set[str], *, keep_val: bool) -> None:
    def split_of(row: Row) -> Row:
        return replace(row, split="test") if row.video_id in held_out else row

    rows = tuple(
        split_of(row)
        for row in manifest.rows
        if (row.split == "train" and row.video_id in kept) or (keep_val and row.split == "val")
    )
    save_part(manifest, path, rows, "decisive.md")


def save_part(manifest: Manifest, path: Path, rows: Sequence[Row], protocol: str) -> None:
    """Some rows of a manifest as one of its own, elsewhere, which names the protocol that chose them."""
    part = Manifest(replace(manifest.header, expected={}), tuple(rows))
    root = os.path.relpath(part.header.root, path.parent)
    whole = f"{manifest.header.protocol}; {path.stem} of experiments/{protocol}".lstrip("; ")
    header = replace(part.header, expected=part.counts, root=root, protocol=whole)
    replace(part, header=header).save(path)


# --- vectors -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Vectors:
    """Frame and text vectors of one kind of item, in half precision."""

    frames_XD: Tensor
    """The frames of all items, one after the other."""
    num_frames_N: Tensor
    text_TD: Tensor
    """Sorted by item."""
    num_texts_N: Tensor
    is_test_N: Tensor

    def items(self, *, test: bool) -> Items:
        """The training or the test items, padded."""
        chosen_N = self.is_test_N.bool() == test
        clips = self.frames_XD.float().split(self.num_frames_N.tolist())
        texts = self.text_TD.float().split(self.num_texts_N.tolist())
        shuffled_N = torch.randperm(len(chosen_N), generator=torch.Generator().manual_seed(0))
        rows_N = shuffled_N[chosen_N[shuffled_N]]  # a pseudo-video of the test has pictures of both sets
        rows = rows_N.tolist()
        return Items(
            VideoFeatures.stack([clips[row] for row in rows]),
            torch.cat([texts[row] for row in rows]),
            self.num_texts_N[rows_N].long(),
        )


@dataclass(frozen=True)
class Items:
    """Pictures (one frame) or videos with their texts, on one device."""

    video: VideoFeatures
    text_TD: Tensor
    num_texts_N: Tensor

    def __len__(self) -> int:
        return len(self.video)

    @property
    def first_text_N(self) -> Tensor:
        """The position of each item's first text."""
        return self.num_texts_N.cumsum(0) - self.num_texts_N

    @property
    def item_of_text(self) -> Tensor:
        return torch.arange(len(self), device=self.num_texts_N.device).repeat_interleave(self.num_texts_N)

    def to(self, device: torch.device) -> Items:
        return Items(self.video.to(device), self.text_TD.to(device), self.num_texts_N.to(device))


def encode_half(model: GARE, data: Path, *, num_workers: int = 0) -> dict[str, Vectors]:
    """Vectors of psi's half: all pictures together, and the videos."""
    pictures = [_encode_set(model, data / name / "psi.csv", 1, num_workers) for name in PICTURE_SETS]
    return {
        "pictures": Vectors(*(torch.cat(parts) for parts in zip(*map(_fields, pictures), strict=True))),
        "videos": _encode_set(model, data / VIDEO_SET / "psi.csv", NUM_FRAMES, num_workers),
    }


def _encode_set(model: GARE, path: Path, num_frames: int, num_workers: int) -> Vectors:
    source = FrameSource.open(path, num_frames)
    parts = [_encode_split(model, source, split, num_workers) for split in source.manifest.splits]
    return Vectors(*(torch.cat(each) for each in zip(*map(_fields, parts), strict=True)))


def _encode_split(model: GARE, source: FrameSource, split: str, num_workers: int) -> Vectors:
    manifest = source.manifest
    video = encode_gallery(model, source, split, num_workers=num_workers).to("cpu")  # type: ignore[arg-type]
    captions, owner = manifest.captions(split), torch.tensor(manifest.video_index(split))  # type: ignore[arg-type]
    order = owner.argsort(stable=True)
    sorted_captions = [captions[position] for position in order.tolist()]
    text_TD = torch.cat(
        [
            model.encode_text(sorted_captions[part]).text_TD.half().cpu()
            for part in block_slices(len(captions), TEXTS_AT_A_TIME)
        ]
    )
    return Vectors(
        video.frames_VFD[video.mask_VF].half(),
        video.mask_VF.sum(dim=1).int(),
        text_TD,
        owner.bincount(minlength=len(video)).int(),
        torch.full((len(video),), split == "test", dtype=torch.uint8),
    )


def _fields(vectors: Vectors) -> tuple[Tensor, ...]:
    return tuple(vars(vectors).values())


def save_vectors(folder: Path, vectors: dict[str, Vectors]) -> list[Path]:
    """Files of at most 15 MB, of which a borrowed machine gives eight back in a call."""
    content = save(
        {f"{name}.{key}": value for name, part in vectors.items() for key, value in vars(part).items()}
    )
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, part in enumerate(block_slices(len(content), MOST_BYTES), start=1):
        paths.append(folder / f"vectors-{number:02}")
        with replacing(paths[-1]) as target:
            target.write_bytes(content[part])
    return paths


def load_vectors(folder: Path) -> dict[str, Vectors]:
    """What `save_vectors` wrote."""
    paths = sorted(folder.glob("vectors-[0-9][0-9]"))
    if not paths:
        raise DataError(f"{folder} has no vectors; make them with 'decisive.py all'")
    try:
        tensors = load(b"".join(path.read_bytes() for path in paths))
        return {
            name: Vectors(**{key: tensors[f"{name}.{key}"] for key in Vectors.__dataclass_fields__})
            for name in ("pictures", "videos")
        }
    except Exception as error:  # safetensors has an error of its own, and a part may be missing
        raise DataError(f"{folder}: the vectors cannot be read ({error}); fetch all parts again") from None


def random_vectors(*, dim: int, pictures: int, videos: int, seed: int = 0) -> dict[str, Vectors]:
    """Vectors with something to learn, without pictures: for tests and for timing."""
    generator = torch.Generator().manual_seed(seed)

    def draw(number: int, frames: Sequence[int], texts: int) -> Vectors:
        num_frames_N = torch.tensor([frames[i % len(frames)] for i in range(number)])
        frames_XD = torch.randn(int(num_frames_N.sum()), dim, generator=generator)
        about = (num_frames_N.cumsum(0) - num_frames_N).repeat_interleave(texts)
        text_TD = frames_XD[about] + 0.7 * torch.randn(number * texts, dim, generator=generator) + 0.3
        return Vectors(
            frames_XD.half(),
            num_frames_N.int(),
            text_TD.half(),
            torch.full((number,), texts, dtype=torch.int32),
            (torch.arange(number) % 3 == 0).to(torch.uint8),
        )

    return {"pictures": draw(pictures, (1,), 2), "videos": draw(videos, (4, 6), 3)}


# --- tasks -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """Videos to train on and to test with. A training video is `shots` items drawn anew for every step."""

    name: str
    shots: int
    train: Items
    test: Items
    """Whole test videos with all their texts."""
    bank: TextFeatures
    """Texts of training items, for QB-Norm."""

    def batches(self, seed: int, *, steps: int, batch_size: int) -> tuple[Tensor, Tensor]:
        """Items [steps, B, S] and texts [steps, B]: the text describes the first item of its video.

        No item is in a batch twice, so no text describes a shot of another video. The same for every row.
        """
        generator = torch.Generator().manual_seed(1_000 + seed)
        share = batch_size * self.shots
        if share > len(self.train):
            raise DataError(
                f"task {self.name}: a batch of {batch_size} needs {share} items, there are {len(self.train)}"
            )
        at_once = len(self.train) // share
        drawn = [
            torch.randperm(len(self.train), generator=generator)[: at_once * share]
            for _ in range(-(-steps // at_once))
        ]
        item_NBS = torch.cat(drawn).view(-1, batch_size, self.shots)[:steps]
        choice_NB = torch.rand(steps, batch_size, generator=generator)
        target_NB, counts = item_NBS[..., 0], self.train.num_texts_N.cpu()
        within_NB = (choice_NB * counts[target_NB]).long()
        return item_NBS, self.train.first_text_N.cpu()[target_NB] + within_NB

    def to(self, device: torch.device) -> Task:
        return replace(
            self, train=self.train.to(device), test=self.test.to(device), bank=self.bank.to(device)
        )


def make_tasks(vectors: dict[str, Vectors]) -> dict[str, Task]:
    """A1, A2, A4 from pictures, B from videos."""
    pictures = vectors["pictures"].items(test=False), vectors["pictures"].items(test=True)
    videos = vectors["videos"].items(test=False), vectors["videos"].items(test=True)
    tasks = {name: make_task(name, shots, *pictures) for name, shots in SHOTS.items()}
    return {**tasks, "B": make_task("B", 1, *videos)}


def make_task(name: str, shots: int, train: Items, test: Items) -> Task:
    """Pseudo-videos of so many items; those of the test are fixed."""
    generator = torch.Generator().manual_seed(0)
    bank_B = torch.randperm(len(train.text_TD), generator=generator)[:BANK_TEXTS]
    bank = TextFeatures.from_vectors(train.text_TD[bank_B])
    return Task(name, shots, train, join_items(test, shots), bank)


def join_items(items: Items, shots: int) -> Items:
    """Pseudo-videos of `shots` items each, in the order of the items, with the texts of all of them."""
    number = len(items) // shots
    kept = number * shots
    frames_VFD = items.video.frames_VFD[:kept].unflatten(0, (number, shots)).flatten(1, 2)
    mask_VF = items.video.mask_VF[:kept].unflatten(0, (number, shots)).flatten(1, 2)
    num_texts_V = items.num_texts_N[:kept].view(number, shots).sum(dim=1)
    video = VideoFeatures(frames_VFD, mask_VF).pad(NUM_FRAMES)
    return Items(video.without_padding(), items.text_TD[: int(num_texts_V.sum())], num_texts_V)
