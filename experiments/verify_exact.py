"""Are the lists of exact search those of scoring everything in float64? Asked many times.

    python experiments/verify_exact.py library --items 100000 --queries 1000 --scale 10 --folder FOLDER
    python experiments/verify_exact.py captions ../shared --folder FOLDER

`library` asks a real library of made-up items, as `gare search --exact` does, then scores all its items for
all queries in one pass. `captions` takes the 59,800 captions of MSR-VTT's test videos and the frames of those
of them that are in `shared`, for several models: as trained, ten times as large, drawn anew ten times as
large. Each prints a line of JSON a model; what is going on goes to stderr.

What is done is kept in FOLDER every few seconds: a run that was ended goes on from there.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import sys
import tarfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from gare.atomic import replacing
from gare.bench.exact_bench import CardedVideos, ExactCase, Stages, in_double, proven_lists
from gare.bench.search_bench import encoded_vector
from gare.bench.synthetic_library import make_library
from gare.bench.synthetic_vectors import synthetic_model
from gare.interaction import Interaction
from gare.library.library import Library
from gare.library.search.item_frames import SCORE_COLUMNS, ItemFrames
from gare.library.search.search_request import SearchRequest
from gare.model import GARE
from gare.types import TextFeatures, VideoFeatures

TOP = 10
ITEMS_AT_ONCE = 256
TEXTS_AT_ONCE = 256
CAPTIONS_AT_ONCE = 2048
DRAWN = {"drawn, text side": ("text_conditioned", "text"), "drawn, video side": ("mean", "video")}


class Progress:
    """Says how far a long loop has come, and when it will end."""

    def __init__(self, name: str, total: int) -> None:
        self._name, self._total = name, total
        self._started = self._said = time.monotonic()

    def reach(self, done: int) -> None:
        now = time.monotonic()
        if now - self._said > 15 or done == self._total:
            self._said = now
            left = (now - self._started) / done * (self._total - done)
            print(
                f"{self._name}: {done:,} of {self._total:,}, {left:.0f} s left", file=sys.stderr, flush=True
            )


class Kept:
    """Results by name in a folder; a run that was ended finds them again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def load(self, name: str) -> Any:
        file = self._folder / f"{name}.pt"
        return torch.load(file) if file.exists() else None

    def save(self, name: str, value: Any) -> None:
        with replacing(self._folder / f"{name}.pt") as place:
            torch.save(value, place)


# --- a library ----------------------------------------------------------------------------------------------


def verify_library(case: ExactCase, queries: int, folder: Path) -> dict[str, Any]:
    """Exact searches one after the other, then all items in float64."""
    model, texts = case.model(), case.text_vectors(queries)
    make_library(folder, model, case.num_items, lambda line: print(line, file=sys.stderr, flush=True))
    kept = Kept(folder / f"verified-{queries}-{case.scale:g}")
    with Library.open(folder, model=model) as library:
        found = exact_searches(library, texts, case.top, kept)
        text = TextFeatures.from_vectors(torch.from_numpy(texts))
        expected = best_in_double(library, model, text, case, kept)
    return {
        "items": case.num_items,
        "queries": queries,
        "scale": case.scale,
        "same_lists": sum(one["ids"] == other for one, other in zip(found, expected, strict=True)),
        "keys_needed": sum(one["refined"] for one in found) / queries,
        **shares([one["scored"] for one in found], case.num_items),
    }


def exact_searches(library: Library, texts: np.ndarray, top: int, kept: Kept) -> list[dict[str, Any]]:
    """The list of each text, and what its proof took."""
    found: list[dict[str, Any]] = kept.load("searches") or []
    progress = Progress("exact searches", len(texts) - len(found))
    for number, vector in enumerate(texts[len(found) :], start=1):
        request = SearchRequest(words="a vector", top=top, exact=True)
        ranking = library.searcher.find(request, query=encoded_vector(vector))
        assert ranking.certificate is not None
        proof = ranking.certificate
        found.append({"ids": ranking.ids, "scored": proof.num_scored, "refined": proof.num_refined})
        if len(found) % 50 == 0 or len(found) == len(texts):
            kept.save("searches", found)
        progress.reach(number)
    return found


def best_in_double(
    library: Library, model: GARE, text: TextFeatures, case: ExactCase, kept: Kept
) -> list[list[str]]:
    """The ids of the best items of each text: every item of the store is scored for every text."""
    double, text = in_double(model.interaction), text.to(torch.float64)
    start = {
        "scores": torch.zeros(len(text), 0, dtype=torch.float64),
        "numbers": torch.zeros(len(text), 0, dtype=torch.long),
        "ids": list[str](),
    }
    best = kept.load("double") or start
    num_done = len(best["ids"])
    progress, seen = Progress("items in float64", case.num_items - num_done), 0
    for batch in library.store.scan(columns=list(SCORE_COLUMNS)):  # the same order every time
        seen += batch.num_rows
        if seen <= num_done:
            continue
        for first in range(0, batch.num_rows, ITEMS_AT_ONCE):
            items = ItemFrames.of(batch.slice(first, ITEMS_AT_ONCE), model)
            numbers_V = torch.arange(len(best["ids"]), len(best["ids"]) + len(items))
            scores_TV = torch.cat([best["scores"], double.score(text, items.video.to(torch.float64))], dim=1)
            numbers_TV = torch.cat([best["numbers"], numbers_V.expand(len(text), -1)], dim=1)
            best["scores"], chosen_TK = scores_TV.topk(min(case.top, scores_TV.shape[1]), dim=1)
            best["numbers"] = numbers_TV.gather(1, chosen_TK)
            best["ids"] += items.ids
            progress.reach(len(best["ids"]) - num_done)
        kept.save("double", best)
    return [[best["ids"][number] for number in row] for row in best["numbers"].tolist()]


# --- captions -----------------------------------------------------------------------------------------------


def verify_captions(shared: Path, most: int | None, folder: Path) -> list[dict[str, Any]]:
    """Captions and frames of MSR-VTT's test videos, encoded once, for every model."""
    model, kept = GARE.from_pretrained("gare-mini").eval(), Kept(folder)
    captions = read_captions(shared / "annotations/msrvtt/test_videodatainfo.json.zip")[:most]
    text_TD, frames = kept.load(f"texts-{len(captions)}"), kept.load("frames")
    if text_TD is None:
        text_TD = encode_captions(model, captions)
        kept.save(f"texts-{len(captions)}", text_TD)
    if frames is None:
        video = read_videos(model, shared / "data/msrvtt_frames/test.tar").to(torch.float16)
        frames = (video.frames_VFD, video.mask_VF)
        kept.save("frames", frames)
    text, stored = TextFeatures.from_vectors(text_TD), VideoFeatures(*frames)
    return [
        verify_model(name, interaction, text, stored, kept)
        for name, interaction in interactions(model).items()
    ]


def interactions(model: GARE) -> dict[str, Interaction]:
    """As trained, ten times as large, and drawn anew ten times as large."""
    larger = copy.deepcopy(model.interaction)
    for parameter in larger.parameters():
        parameter.mul_(10)
    drawn = {
        name: synthetic_model(model.dim, 12, scale=10, pooling=pooling, corrected_side=side).interaction
        for name, (pooling, side) in DRAWN.items()
    }
    return {"trained × 10": larger, **drawn, "trained": model.interaction}


def verify_model(
    name: str, interaction: Interaction, text: TextFeatures, stored: VideoFeatures, kept: Kept
) -> dict[str, Any]:
    """All lists of one model, with their proofs and without."""
    videos, double = CardedVideos.make(interaction, stored, torch.int16), in_double(interaction)
    file = f"lists-{len(text)}-{name}"
    done = kept.load(file) or {"scored": list[int](), "same": 0, "broken": 0}
    first, stages = len(done["scored"]), Stages(torch.device("cpu"))
    progress = Progress(name, len(text) - first)
    for few in text[first:].blocks(CAPTIONS_AT_ONCE) if first < len(text) else ():
        exact_TV = double.score(few.to(torch.float64), stored.to(torch.float64))
        found = proven_lists(interaction, double, few, videos, TOP, stages, exact_TV=exact_TV)
        best_TV = exact_TV.argsort(dim=1, descending=True, stable=True)
        done["same"] += sum(
            rows == expected for rows, expected in zip(found.rows, best_TV[:, :TOP].tolist(), strict=True)
        )
        done["broken"] += num_outside(interaction, few, videos, exact_TV)
        done["scored"] += found.scored
        kept.save(file, done)
        progress.reach(len(done["scored"]) - first)
    result = {"model": name, "captions": len(text), "videos": len(stored), "same_lists": done["same"]}
    result |= {"outside_bounds": done["broken"], **shares(done["scored"], len(stored))}
    print(json.dumps(result, ensure_ascii=False), flush=True)
    return result


def num_outside(interaction: Interaction, text: TextFeatures, videos: CardedVideos, exact_TV: Tensor) -> int:
    """How many scores lie outside their bounds, of either rung."""
    outside, first = 0, 0
    for balls, keys in videos.blocks:
        scores_TV = exact_TV[:, first : first + len(balls)]
        for bounds in (interaction.bounds(text, balls), interaction.key_bounds(text, balls, keys)):
            outside += int(((scores_TV > bounds.upper_TV) | (scores_TV < bounds.lower_TV)).sum())
        first += len(balls)
    return outside


def shares(scored: Sequence[int], num_items: int) -> dict[str, Any]:
    mean = sum(scored) / len(scored)
    return {"scored": mean, "scored_most": max(scored), "share_scored": mean / num_items}


def read_captions(archive: Path) -> list[str]:
    with zipfile.ZipFile(archive) as opened:
        member = next(name for name in opened.namelist() if name.endswith("videodatainfo.json"))
        return [sentence["caption"] for sentence in json.loads(opened.read(member))["sentences"]]


def encode_captions(model: GARE, captions: Sequence[str]) -> Tensor:
    """Sentence vectors; captions of like length go together, which halves the padding."""
    order = sorted(range(len(captions)), key=lambda place: len(captions[place].split()))
    text_TD, progress = torch.empty(len(captions), model.dim), Progress("captions encoded", len(captions))
    for start in range(0, len(order), TEXTS_AT_ONCE):
        places = order[start : start + TEXTS_AT_ONCE]
        text_TD[places] = model.encode_text([captions[place] for place in places]).text_TD
        progress.reach(start + len(places))
    return text_TD


def read_videos(model: GARE, archive: Path) -> VideoFeatures:
    """The frame vectors of all videos of an archive of pictures."""
    pictures: dict[str, list[tuple[str, Image.Image]]] = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and (data := tar.extractfile(member)):
                image = Image.open(io.BytesIO(data.read())).convert("RGB")
                pictures.setdefault(member.name.split("/")[0], []).append((member.name, image))
    parts, progress = list[Tensor](), Progress("videos encoded", len(pictures))
    for frames in pictures.values():
        video = model.encode_frames(*model.load_frames([[image for _, image in sorted(frames)]]))
        parts.append(video.frames_VFD[0, video.mask_VF[0]])
        progress.reach(len(parts))
    return VideoFeatures.stack(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    library = parts.add_parser("library")
    library.add_argument("--items", type=int, default=100_000)
    library.add_argument("--queries", type=int, default=1_000)
    library.add_argument("--scale", type=float, default=10.0)
    library.add_argument("--folder", type=Path, required=True, help="where the library is, or is to be made")
    captions = parts.add_parser("captions")
    captions.add_argument("shared", type=Path)
    captions.add_argument("--most", type=int, help="captions; default: all")
    captions.add_argument("--folder", type=Path, required=True, help="where what is done is kept")
    chosen = parser.parse_args()
    with torch.no_grad():
        if chosen.part == "captions":
            verify_captions(chosen.shared, chosen.most, chosen.folder)
        else:
            case = ExactCase(chosen.items, 512, 12, TOP, chosen.scale, "text_conditioned", "text")
            print(json.dumps(verify_library(case, chosen.queries, chosen.folder)))


if __name__ == "__main__":
    main()
