"""Which ranges of dense frames should be items? Scenes planted in films, and short clips, for several rules.

    python experiments/moment_rule.py ../shared --films 20

Films are put together from vectors, a frame a second: of MSR-VTT frames (ten scenes of val among 2,400 frames
of train, three captions a scene), and of the 22 clips, each once, in several orders. A scene is found if the
best frame of the best range lies in it. Short clips: a file has the score of its best range. The score is
GARE's from the frames of the range (`segment`), the cosine of its best frame, or the mean of both.
`experiments/LOG.md` has the numbers. Shapes: F frames, D embedding, T texts.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import random
import tarfile
import zipfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from gare import GARE
from gare.data.frame_sampling import sample_indices
from gare.data.video import read_frames
from gare.types import TextFeatures, VideoFeatures

Ranges = list[tuple[int, int]]
_LONGEST_CLIP = 64
_FEW = 12


class Rule(NamedTuple):
    """Which ranges a block has."""

    cut: float | None = None
    """Cosine of neighbouring frames below which a shot ends; None: no shots."""
    window: int = 0
    is_within: bool = True
    """Windows stay within shots."""
    has_block: bool = False


RULES = {
    "whole blocks": Rule(has_block=True),
    "windows of 2": Rule(window=2, is_within=False),
    "windows of 4": Rule(window=4, is_within=False),
    "windows of 8": Rule(window=8, is_within=False),
    "shots 0.75": Rule(0.75),
    "shots 0.65": Rule(0.65),
    "blocks, shots 0.75, windows of 8 anywhere": Rule(0.75, 8, is_within=False, has_block=True),
    "blocks, shots 0.75, windows of 8 within": Rule(0.75, 8, has_block=True),
    "blocks, shots 0.65, windows of 8 within": Rule(0.65, 8, has_block=True),
    "blocks, shots 0.65, windows of 4 within": Rule(0.65, 4, has_block=True),
}


class Film(NamedTuple):
    """Frames, and which part of them each text describes."""

    frames_FD: Tensor
    text: TextFeatures
    scenes: Ranges


def block_ranges(frames_FD: Tensor) -> Ranges:
    """Blocks as indexing makes them: they end where neighbouring frames differ most, after 24 to 39."""
    cosine = _neighbour_cosines(frames_FD)
    blocks, first = [], 0
    while len(frames_FD) - first > 40:
        last = min(range(first + 24, first + 40), key=lambda place: cosine[place - 1])
        blocks.append((first, last))
        first = last
    return [*blocks, (first, len(frames_FD))]


def ranges_of(frames_FD: Tensor, rule: Rule) -> Ranges:
    """The ranges of a block."""
    count = len(frames_FD)
    cosine = _neighbour_cosines(frames_FD)
    shots = [(0, count)]
    if rule.cut is not None:
        shots = list(pairwise([0, *(n + 1 for n, value in enumerate(cosine) if value < rule.cut), count]))
    found = dict.fromkeys(shots if rule.cut is not None else [])
    if rule.has_block:
        found[0, count] = None
    for first, last in (shots if rule.is_within else [(0, count)]) if rule.window else []:
        starts = range(first, last - rule.window + 1, max(1, rule.window // 2))
        ends = [last - rule.window] if last - first >= rule.window else []
        found |= dict.fromkeys((start, start + rule.window) for start in [*starts, *ends])
    return list(found) or [(0, count)]


def _neighbour_cosines(frames_FD: Tensor) -> list[float]:
    unit_FD = F.normalize(frames_FD, dim=-1)
    cosines: list[float] = (unit_FD[1:] * unit_FD[:-1]).sum(dim=-1).tolist()
    return cosines


@torch.no_grad()
def score(model: GARE, text: TextFeatures, clips: Sequence[Tensor]) -> Tensor:
    """GARE's score of every text and clip, [T, clips]."""
    thin = [clip[sample_indices(len(clip), model.config.num_frames)] for clip in clips]
    parts = [thin[first : first + 1024] for first in range(0, len(thin), 1024)]
    return torch.cat([model.score(text, VideoFeatures.stack(part)) for part in parts], dim=1)


def search_films(model: GARE, films: Sequence[Film], rule: Rule) -> tuple[dict[str, float], float]:
    """The share of scenes that come first, by what a range is ranked by; and ranges a frame."""
    found, total, num_ranges, num_frames = {"segment": 0, "best frame": 0, "both": 0}, 0, 0, 0
    for film in films:
        x_FD = film.frames_FD
        ranges = [
            (start + first, start + last)
            for start, end in block_ranges(x_FD)
            for first, last in ranges_of(x_FD[start:end], rule)
        ]
        segment_TN = score(model, film.text, [x_FD[first:last] for first, last in ranges])
        cosine_TF = F.normalize(film.text.text_TD, dim=-1) @ F.normalize(x_FD, dim=-1).mT
        best_TN = torch.stack([cosine_TF[:, first:last].amax(dim=1) for first, last in ranges], dim=1)
        ranked = {"segment": segment_TN, "best frame": best_TN, "both": segment_TN + best_TN}
        for name, scores_TN in ranked.items():
            for number, (start, end) in enumerate(film.scenes):
                first, last = ranges[int(scores_TN[number].argmax())]
                found[name] += start <= first + int(cosine_TF[number, first:last].argmax()) < end
        total += len(film.scenes)
        num_ranges, num_frames = num_ranges + len(ranges), num_frames + len(x_FD)
    return {name: count / total for name, count in found.items()}, num_ranges / num_frames


def search_clips(
    model: GARE, clips: Sequence[Tensor], text: TextFeatures, own: Sequence[int], rule: Rule
) -> float:
    """The share of texts whose clip comes first, a clip having the score of its best range."""
    parts = [(n, part) for n, clip in enumerate(clips) for part in _clip_ranges(clip, rule)]
    scores_TN = score(model, text, [clips[n][first:last] for n, (first, last) in parts])
    owner_N = torch.tensor([n for n, _ in parts])
    best_T = owner_N[scores_TN.argmax(dim=1)]
    return float((best_T == torch.tensor(own)).float().mean())


def _clip_ranges(clip_FD: Tensor, rule: Rule) -> Ranges:
    if len(clip_FD) <= _FEW:
        return [(0, len(clip_FD))]
    return list(dict.fromkeys([(0, len(clip_FD)), *ranges_of(clip_FD, rule)]))


# --- data ---------------------------------------------------------------------------------------------------


def encode(model: GARE, images: Sequence[Image.Image]) -> Tensor:
    """The vectors of pictures, [F, D]."""
    return model.encode_video([list(images)], num_frames=max(len(images), 1)).frames_VFD[0]


def read_clips(model: GARE, folder: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A frame a second of every clip, and captions."""
    with (folder / "captions.csv").open(newline="") as file:
        captions = {row["video"]: row["caption"] for row in csv.DictReader(file)}
    paths = sorted(path for path in folder.iterdir() if path.suffix != ".csv")
    return {path.name: encode(model, read_frames(path, _LONGEST_CLIP)) for path in paths}, captions


def read_msrvtt(model: GARE, folder: Path, archive: str, most: int) -> dict[str, Tensor]:
    """The frames of some videos of an archive."""
    pictures: dict[str, list[tuple[str, Image.Image]]] = {}
    with tarfile.open(folder / archive) as tar:
        for member in tar:
            if member.isfile() and (data := tar.extractfile(member)):
                image = Image.open(io.BytesIO(data.read())).convert("RGB")
                pictures.setdefault(member.name.split("/")[0], []).append((member.name, image))
    names = random.Random(0).sample(sorted(pictures), min(most, len(pictures)))
    return {name: encode(model, [image for _, image in sorted(pictures[name])]) for name in names}


def read_captions(folder: Path) -> dict[str, list[str]]:
    captions: dict[str, list[str]] = {}
    for name in ("train_val_videodatainfo", "test_videodatainfo"):
        with zipfile.ZipFile(folder / f"{name}.json.zip") as archive:
            member = next(one for one in archive.namelist() if one.endswith(f"{name}.json"))
            for sentence in json.loads(archive.read(member))["sentences"]:
                captions.setdefault(sentence["video_id"], []).append(sentence["caption"])
    return captions


def join(order: Sequence[str], vectors: dict[str, Tensor]) -> tuple[Tensor, dict[str, tuple[int, int]]]:
    ends = torch.tensor([0, *(len(vectors[name]) for name in order)]).cumsum(0).tolist()
    return torch.cat([vectors[name] for name in order]), dict(zip(order, pairwise(ends), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("shared", type=Path)
    parser.add_argument("--films", type=int, default=20)
    parser.add_argument("--model", default="gare-mini")
    chosen = parser.parse_args()
    model, draw = GARE.from_pretrained(chosen.model).eval(), random.Random(0)
    data = chosen.shared / "data"
    if not data.is_dir():
        parser.error(f"{data} is not there; give the folder with data/clips and data/msrvtt_frames")

    clips, told = read_clips(model, data / "clips")
    names = [name for name in clips if name in told]
    clip_text = model.encode_text([told[name] for name in names])
    clip_films = []
    for _ in range(6):
        frames_FD, where = join(draw.sample(sorted(clips), len(clips)), clips)
        clip_films.append(Film(frames_FD, clip_text, [where[name] for name in names]))

    val = read_msrvtt(model, data / "msrvtt_frames", "val.tar", 250)
    train = read_msrvtt(model, data / "msrvtt_frames", "train-0.tar", 1000)
    captions = read_captions(chosen.shared / "annotations/msrvtt")
    films, hidden = [], draw.sample(sorted(val), len(val))
    for number in range(chosen.films):
        planted = hidden[10 * number : 10 * number + 10]
        order = draw.sample(sorted(train), len(train))
        lengths = torch.tensor([len(train[name]) for name in order]).cumsum(0)
        order = order[: int((lengths < 2400).sum()) + 1]
        for name in planted:
            order.insert(draw.randrange(len(order) + 1), name)
        frames_FD, where = join(order, train | val)
        pairs = [(name, words) for name in planted for words in draw.sample(captions[name], 3)]
        text = model.encode_text([words for _, words in pairs])
        films.append(Film(frames_FD, text, [where[name] for name, _ in pairs]))

    own = [list(clips).index(name) for name in names]
    print("rule | ranges a frame | films of MSR-VTT: segment, best frame, both | of clips | clips as files")
    for name, rule in RULES.items():
        shares, density = search_films(model, films, rule)
        clip_shares, _ = search_films(model, clip_films, rule)
        first = search_clips(model, list(clips.values()), clip_text, own, rule)
        numbers = [f"{100 * share:.1f}" for share in (*shares.values(), *clip_shares.values(), first)]
        print(
            f"{name} | {density:.2f} | {', '.join(numbers[:3])} | {', '.join(numbers[3:6])} | {numbers[6]}",
            flush=True,
        )


if __name__ == "__main__":
    main()
