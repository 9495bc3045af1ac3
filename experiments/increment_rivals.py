"""Does an increment tell a match from its rivals? The first caption of every video of val, every pair.

    python experiments/increment_rivals.py runs/gare/last data/msrvtt_frames

A change of score that is the same for all texts of a video, or for all videos of a text, is taken off; what
is left belongs to the pair, and is compared between matches and the five others that score highest without
increments. For models that correct the text and take the mean frame. `gare analyze` (probe bottleneck) has
how much of an increment depends on the text at all. Shapes: T texts, V videos.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from gare import GARE
from gare.data.loader import FrameSource
from gare.evaluate.model_evaluation import encode_gallery
from gare.library.search.stage1 import plain_vectors, stage1_queries


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    chosen = parser.parse_args()
    model = GARE.from_pretrained(chosen.model).eval()
    if not model.interaction.has_increments:
        parser.error(f"{chosen.model} has no increments")
    source = FrameSource.open(chosen.data, model.config.num_frames)
    first: dict[int, str] = {}
    for caption, video in zip(
        source.manifest.captions("val"), source.manifest.video_index("val"), strict=True
    ):
        first.setdefault(video, caption)
    videos = encode_gallery(model, source, "val")
    texts = model.encode_text([first[video] for video in range(len(videos))])
    pairs = model.score_pairs(texts, videos)

    plain_TV = stage1_queries(texts.text_TD) @ plain_vectors(videos).mT
    change_TV = pairs.scores_TV - plain_TV
    change_TV = change_TV - change_TV.mean(dim=0) - change_TV.mean(dim=1, keepdim=True) + change_TV.mean()
    is_match_TV = torch.eye(len(plain_TV), dtype=torch.bool)
    hardest_T5 = plain_TV.masked_fill(is_match_TV, -2).topk(5, dim=1).indices
    print(
        f"the pair's part of the change in score: matching {change_TV[is_match_TV].mean():.4f}, "
        f"the five hardest others {change_TV.gather(1, hardest_T5).mean():.4f} "
        f"(scores spread by {plain_TV.std():.3f})"
    )


if __name__ == "__main__":
    main()
