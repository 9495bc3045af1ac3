"""Vectors of gare-mini's frozen towers for `mini_shots.py`, in pieces, and the tasks made of them.

Shapes: N items, X frames of all items, T texts, D embedding.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from decisive_data import (
    NUM_FRAMES,
    PICTURE_SETS,
    SHOTS,
    VIDEO_SET,
    Items,
    Task,
    Vectors,
    make_task,
    order_of,
    save_part,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from gare import GARE
from gare.atomic import replacing
from gare.data.loader import FrameSource
from gare.data.manifest import Manifest, Row, find_manifest
from gare.errors import DataError
from gare.evaluate.model_evaluation import encode_gallery
from gare.types import VideoFeatures, block_slices

SETS = (*PICTURE_SETS, VIDEO_SET)
PIECE_ITEMS = {"flickr8k": 1_000, "coco": 1_000, VIDEO_SET: 300}
"""Training items of a piece: "train-0" is the first so many of the draw."""
MOST_CAPTIONS = {"flickr8k": 2, "coco": 2, VIDEO_SET: 4}
"""Captions of a training item that are encoded."""
TEXTS_AT_A_TIME = 256


def open_piece(data: Path, out: Path, name: str, piece: str) -> FrameSource | None:
    """The frames and captions of a piece of a set: "val", "test" or "train-0", "train-1", …"""
    path = out / "pieces" / name / f"{piece}.csv"
    if not path.is_file():
        split, _, number = piece.partition("-")
        manifest = Manifest.load(find_manifest(data / name))
        ids = sorted({row.video_id for row in manifest.rows if row.split == split}, key=order_of)
        if number:
            ids = ids[int(number) * PIECE_ITEMS[name] :][: PIECE_ITEMS[name]]
        rows = _few_captions(manifest, set(ids), MOST_CAPTIONS[name] if number else None)
        if not rows:
            return None  # COCO has no val
        path.parent.mkdir(parents=True, exist_ok=True)
        save_part(manifest, path, rows, "mini_shots.md")
    return FrameSource.open(path, NUM_FRAMES)


def _few_captions(manifest: Manifest, ids: set[str], most: int | None) -> list[Row]:
    seen: Counter[str] = Counter()
    rows = []
    for row in manifest.rows:
        seen[row.video_id] += 1
        if row.video_id in ids and (most is None or seen[row.video_id] <= most):
            rows.append(row)
    return rows


def encode(
    what: str, pieces: Sequence[str], data: Path, out: Path, model_name: str, sets: Sequence[str] = SETS
) -> None:
    """Frame or text vectors of pieces, a file each; what is there is not made again."""
    model = GARE.from_pretrained(model_name).eval()
    for piece in pieces:
        for name in sets:
            path = out / f"{what}-{name}-{piece}.safetensors"
            source = None if path.is_file() else open_piece(data, out, name, piece)
            if source is not None:
                tensors = (_frames if what == "frames" else _texts)(model, source, path.stem)
                with replacing(path) as part:
                    save_file(tensors, part)


def _frames(model: GARE, source: FrameSource, title: str) -> dict[str, Tensor]:
    (split,) = source.manifest.splits
    video = encode_gallery(model, source, split, batch_size=8, on_progress=Progress(title))
    return {"frames_XD": video.frames_VFD[video.mask_VF], "num_frames_N": video.mask_VF.sum(dim=1)}


def _texts(model: GARE, source: FrameSource, title: str) -> dict[str, Tensor]:
    """Sorted by item. Captions of like length are encoded together: less padding."""
    (split,) = source.manifest.splits
    captions, owner = source.manifest.captions(split), torch.tensor(source.manifest.video_index(split))
    order = sorted(range(len(captions)), key=lambda row: len(captions[row]))
    text_TD, progress = torch.empty(len(captions), model.encoder.dim), Progress(title)
    for part in block_slices(len(order), TEXTS_AT_A_TIME):
        text_TD[order[part]] = model.encode_text([captions[row] for row in order[part]]).text_TD
        progress(min(part.stop, len(order)), len(order))
    num_texts_N = owner.bincount(minlength=len(source.manifest.videos(split)))
    return {"text_TD": text_TD[owner.argsort(stable=True)], "num_texts_N": num_texts_N}


def load_items(out: Path, sets: Sequence[str], pieces: Sequence[str]) -> Items:
    """The items of those of these pieces that are encoded, in a drawn order."""
    parts: dict[str, list[Tensor]] = {}
    for name in sets:
        for piece in pieces:
            files = [out / f"{what}-{name}-{piece}.safetensors" for what in ("frames", "texts")]
            for path in files if all(path.is_file() for path in files) else ():
                for key, tensor in load_file(path).items():
                    parts.setdefault(key, []).append(tensor)
    if not parts:
        raise DataError(f"{out} has no vectors of {', '.join(sets)} {', '.join(pieces)}; encode them first")
    tensors = {key: torch.cat(each) for key, each in parts.items()}
    return Vectors(**tensors, is_test_N=torch.zeros(len(tensors["num_texts_N"]))).items(test=False)


def load_tasks(out: Path, split: str, pieces: Sequence[str]) -> dict[str, Task]:
    """Training items of pieces (any, where none is given), with the galleries of a split."""
    pictures, videos = load_items(out, PICTURE_SETS[:1], [split]), load_items(out, [VIDEO_SET], [split])
    both = Items(
        VideoFeatures.cat([pictures.video, videos.video]),
        torch.cat([pictures.text_TD, videos.text_TD]),
        torch.cat([pictures.num_texts_N, videos.num_texts_N]),
    )
    seen = load_items(out, PICTURE_SETS, pieces) if pieces else pictures
    seen_videos = load_items(out, [VIDEO_SET], pieces) if pieces else videos
    tasks = {name: make_task(name, shots, seen, pictures) for name, shots in SHOTS.items()}
    return {
        **tasks,
        "B": make_task("B", 1, seen_videos, videos),
        "all": make_task("all", 1, seen_videos, both),
    }


class Progress:
    """A line every half minute: how far, and how long still."""

    def __init__(self, title: str) -> None:
        self.title, self.begin, self.told = title, time.monotonic(), time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self.told > 30 or done == total:
            left = (now - self.begin) / done * (total - done)
            print(f"{self.title}: {done} of {total}, {left:.0f} s left", flush=True)
            self.told = now
