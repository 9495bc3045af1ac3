"""Compare models, and the mean of their scores, by text→video recall on several datasets.

    python experiments/compare.py runs/student/last runs/stage1/last --data data/msrvtt_frames data/flickr8k \
        --together 0,1 --image-size 208

prints R@1 / R@5 / R@10 on `val` for each model, and their mean of R@1 and R@10 over the datasets, by which
gare-mini was chosen. --together 0,1 adds a row for the mean of the first two models' scores.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from gare import GARE
from gare.data.loader import FrameSource
from gare.evaluate.caption_protocols import evaluate_scores
from gare.evaluate.model_evaluation import score_split


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--split", choices=("train", "val"), default="val")
    parser.add_argument("--together", nargs="*", default=[], metavar="0,1", help="positions among the models")
    parser.add_argument("--image-size", type=int, help="of the pictures, instead of each model's own")
    parser.add_argument("--workers", type=int, default=0)
    chosen = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sources = [FrameSource.open(place, 12, "uniform") for place in chosen.data]
    truth: list[Tensor] = []
    scores: list[list[Tensor]] = []
    print(f"| {chosen.split} | {' | '.join(place.name for place in chosen.data)} | mean of R@1, R@10 |")
    print(f"| --- |{' --- |' * len(chosen.data)} ---: |")
    for name in chosen.models:
        model = at_size(GARE.from_pretrained(name), chosen.image_size).to(device)
        splits = [score_split(model, source, chosen.split, num_workers=chosen.workers) for source in sources]
        truth = [split.video_of_text for split in splits]
        scores.append([split.scores_TV for split in splits])
        print(row(name, scores[-1], truth), flush=True)
    for together in chosen.together:
        members = [scores[int(position)] for position in together.split(",")]
        mean_scores = [torch.stack(each).mean(dim=0) for each in zip(*members, strict=True)]
        print(row(f"mean of the scores of {together}", mean_scores, truth), flush=True)


def at_size(model: GARE, size: int | None) -> GARE:
    """The model, looking at pictures of another size."""
    if size is not None:
        model.encoder.image_format = replace(model.encoder.image_format, size=size)
    return model


def row(name: str, scores: list[Tensor], truth: list[Tensor]) -> str:
    recalls = []
    for scores_TV, video_of_text in zip(scores, truth, strict=True):
        metrics = evaluate_scores(scores_TV, video_of_text).text_to_video["pessimistic"]
        recalls.append(
            [100 * recall for recall in (metrics.recall_at_1, metrics.recall_at_5, metrics.recall_at_10)]
        )
    cells = [" / ".join(f"{recall:.1f}" for recall in each) for each in recalls]
    goals = mean(recall for each in recalls for recall in (each[0], each[2]))
    return f"| {name} | {' | '.join(cells)} | {goals:.2f} |"


if __name__ == "__main__":
    main()
