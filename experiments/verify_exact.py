"""Are the lists of exact search those of scoring everything in float64? Asked many times.

    python experiments/verify_exact.py library --items 100000 --queries 1000 --scale 10 --folder FOLDER
    python experiments/verify_exact.py captions ../shared

`library` asks a real library of made-up items, as `gare search --exact` does, then scores all its items for
all queries in one pass. `captions` takes the 59,800 captions of MSR-VTT's test videos and the frames of those
of them that are in `shared`, for several models: as trained, ten times as large, drawn anew ten times as
large. Each prints a line of JSON a model; what is going on goes to stderr.
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

import torch
from PIL import Image
from torch import Tensor

from gare.bench.exact_bench import CardedVideos, ExactCase, Stages, compare_lists, in_double, proven_lists
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
TEXTS_AT_ONCE = 256
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


# --- a library ----------------------------------------------------------------------------------------------


def verify_library(case: ExactCase, queries: int, folder: Path) -> dict[str, Any]:
    """Exact searches one after the other, then all items in float64."""
    model, texts = case.model(), case.text_vectors(queries)
    make_library(folder, model, case.num_items, lambda line: print(line, file=sys.stderr, flush=True))
    with Library.open(folder, model=model) as library:
        found, scored, refined = list[list[str]](), list[int](), list[int]()
        progress = Progress("exact searches", queries)
        for number, vector in enumerate(texts, start=1):
            request = SearchRequest(words="a vector", top=case.top, exact=True)
            ranking = library.searcher.find(request, query=encoded_vector(vector))
            assert ranking.certificate is not None
            found.append(ranking.ids)
            scored.append(ranking.certificate.num_scored)
            refined.append(ranking.certificate.num_refined)
            progress.reach(number)
        text = TextFeatures.from_vectors(torch.from_numpy(texts))
        expected = best_in_double(library, model, text, case)
    return {
        "items": case.num_items,
        "queries": queries,
        "scale": case.scale,
        "same_lists": sum(one == other for one, other in zip(found, expected, strict=True)),
        "keys_needed": sum(refined) / queries,
        **shares(scored, case.num_items),
    }


def best_in_double(library: Library, model: GARE, text: TextFeatures, case: ExactCase) -> list[list[str]]:
    """The ids of the best items of each text: every item of the store is scored for every text."""
    double, text = in_double(model.interaction), text.to(torch.float64)
    scores_TK = torch.zeros(len(text), 0, dtype=torch.float64)
    numbers_TK, ids = torch.zeros(len(text), 0, dtype=torch.long), list[str]()
    progress = Progress("items in float64", case.num_items)
    for batch in library.store.scan(columns=list(SCORE_COLUMNS)):
        for start in range(0, batch.num_rows, TEXTS_AT_ONCE):
            items = ItemFrames.of(batch.slice(start, TEXTS_AT_ONCE), model)
            numbers_V = torch.arange(len(ids), len(ids) + len(items))
            scores_TV = torch.cat([scores_TK, double.score(text, items.video.to(torch.float64))], dim=1)
            numbers_TV = torch.cat([numbers_TK, numbers_V.expand(len(text), -1)], dim=1)
            scores_TK, chosen_TK = scores_TV.topk(min(case.top, scores_TV.shape[1]), dim=1)
            numbers_TK = numbers_TV.gather(1, chosen_TK)
            ids += items.ids
            progress.reach(len(ids))
    return [[ids[number] for number in row] for row in numbers_TK.tolist()]


# --- captions -----------------------------------------------------------------------------------------------


def verify_captions(shared: Path, most: int | None) -> list[dict[str, Any]]:
    """Captions and frames of MSR-VTT's test videos, encoded once, for every model."""
    model = GARE.from_pretrained("gare-mini").eval()
    captions = read_captions(shared / "annotations/msrvtt/test_videodatainfo.json.zip")[:most]
    text = TextFeatures.from_vectors(encode_captions(model, captions))
    stored = read_videos(model, shared / "data/msrvtt_frames/test.tar").to(torch.float16)
    return [
        verify_model(name, interaction, text, stored) for name, interaction in interactions(model).items()
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
    name: str, interaction: Interaction, text: TextFeatures, stored: VideoFeatures
) -> dict[str, Any]:
    """All lists of one model, with their proofs and without."""
    videos, double = CardedVideos.make(interaction, stored, torch.int16), in_double(interaction)
    scored, same, broken, stages = list[int](), 0, 0, Stages(torch.device("cpu"))
    progress = Progress(name, len(text))
    for few in text.blocks(TEXTS_AT_ONCE):
        found = proven_lists(interaction, double, few, videos, TOP, stages)
        equal, outside = compare_lists(interaction, double, few, videos, TOP, found.rows, lambda line: None)
        same, broken = same + equal, broken + outside
        scored += found.scored
        progress.reach(len(scored))
    result = {"model": name, "captions": len(text), "videos": len(stored), "same_lists": same}
    result |= {"outside_bounds": broken, **shares(scored, len(stored))}
    print(json.dumps(result, ensure_ascii=False), flush=True)
    return result


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
    chosen = parser.parse_args()
    with torch.no_grad():
        if chosen.part == "captions":
            verify_captions(chosen.shared, chosen.most)
        else:
            case = ExactCase(chosen.items, 512, 12, TOP, chosen.scale, "text_conditioned", "text")
            print(json.dumps(verify_library(case, chosen.queries, chosen.folder)))


if __name__ == "__main__":
    main()
