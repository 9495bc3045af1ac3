"""What the traps of published code do to recalls, on real videos with the shipped towers and untrained heads.

    gare data prepare msrvtt-frames --annotations ANNOTATIONS --videos VIDEOS --out data/msrvtt_frames
    python experiments/trap_effects.py gare-mini data/msrvtt_frames

One caption a video, as text i and video i. Heads keep their initial weights, so the recalls say nothing about
a trained method: a row compares a head with its trap on and off, and nothing else.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from gare import GARE, INTERACTIONS, VideoFeatures
from gare.data.loader import FrameSource
from gare.evaluate import retrieval_metrics
from gare.evaluate.method_rescoring import assignment
from gare.evaluate.model_evaluation import encode_gallery
from gare.evaluate.rescoring import dual_softmax
from gare.interaction import build_interaction

TRAPS = (
    ("tmass", "own_caption", {}),
    ("token_wise", "zero_padding", {}),
    ("dmae", "zero_padding", {}),
    ("dicosa", "late_mask", {}),
    ("eercf", "count_padding", {"num_layers": 1}),
    ("emcl", "over_block", {}),
)
FEW = {"emcl": 100}
"""Nine EM rounds for every pair alone take minutes for all of them: the first so many texts and videos."""


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("--split", default="test")
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    chosen = parser.parse_args()
    model = GARE.from_pretrained(chosen.model).eval()
    source = FrameSource.open(chosen.data, model.config.num_frames)
    manifest, first = source.manifest, {}
    for caption, video in zip(
        manifest.captions(chosen.split), manifest.video_index(chosen.split), strict=True
    ):
        first.setdefault(video, caption)
    videos = encode_gallery(model, source, chosen.split).pad(12)
    videos = VideoFeatures(videos.frames_VFD[:, :12], videos.mask_VF[:, :12])
    texts = model.encode_text([first[video] for video in range(len(videos))])
    rows = []

    def add(name: str, trap: str, off: torch.Tensor, on: torch.Tensor) -> None:
        row = {"method": name, "trap": trap, "texts": off.shape[0], "videos": off.shape[1]}
        for key, scores_TV in (("off", off), ("on", on)):
            for way, matrix in (("text_to_video", scores_TV), ("video_to_text", scores_TV.mT)):
                row[f"{way} R@1 {key}"] = round(100 * retrieval_metrics(matrix).recall_at_1, 1)
        rows.append(row)
        print(row, flush=True)

    plain_TV = model.score(texts, videos)
    add("gare-mini", "Hungarian assignment (ProST)", plain_TV, assignment(plain_TV))
    add("gare-mini", "dual softmax", plain_TV, dual_softmax(plain_TV))
    for name, trap, settings in TRAPS:
        number = FEW.get(name, len(texts))
        scores = []
        for is_on in (False, True):
            torch.manual_seed(0)
            head = build_interaction(INTERACTIONS[name].Config(**{trap: is_on}, **settings), model.dim).eval()
            scores.append(head.score(texts[:number], videos[:number]))
        add(name, trap, *scores)
    if chosen.out:
        chosen.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
