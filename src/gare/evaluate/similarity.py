"""From a model and a split to the score matrix: every text and every video is encoded once.

Shapes: T texts, V videos, F frames, D embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gare.data.loader import FrameSource, load_gallery
from gare.data.manifest import Split
from gare.data.transforms import normalise
from gare.model import GARE
from gare.types import VideoFeatures


@dataclass(frozen=True)
class SplitScores:
    """Scores of every caption of a split with every video of it."""

    scores_TV: Tensor
    video_of_text: Tensor
    captions: list[str]
    video_ids: list[str]


@torch.no_grad()
def score_split(
    model: GARE,
    source: FrameSource,
    split: Split,
    *,
    batch_size: int | None = None,
    num_workers: int = 0,
    first_caption_only: bool = False,
    videos: VideoFeatures | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> SplitScores:
    """Encode the split and score it in float32 on the model's device; the matrix comes back to the CPU.

    Args:
        videos: features of the gallery, if they are at hand.
        first_caption_only: one text per video.
        on_progress: called with the number of videos encoded and their total.
    """
    was_training = model.training
    model.eval()
    rows = source.manifest.videos(split)
    captions, video_of_text = source.manifest.captions(split), source.manifest.video_index(split)
    if first_caption_only:
        first = {video: text for text, video in reversed(list(enumerate(video_of_text)))}
        captions, video_of_text = [captions[first[v]] for v in range(len(rows))], list(range(len(rows)))
    if videos is None:
        videos = encode_gallery(model, source, split, batch_size, num_workers, on_progress)
    text = model.encode_text(captions)
    # Frames as a library keeps them: what is measured is what a search gives. Cosines move by about 1e-5.
    videos = videos.to(torch.float16).to(torch.float32)
    scores_TV = model.score(text.to(torch.float32), videos).cpu()
    model.train(was_training)
    return SplitScores(scores_TV, torch.tensor(video_of_text), captions, [row.video_id for row in rows])


@torch.no_grad()
def encode_gallery(
    model: GARE,
    source: FrameSource,
    split: Split,
    batch_size: int | None = None,
    num_workers: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> VideoFeatures:
    """Features of every video of a split, in the order of its gallery."""
    format_ = model.backbone.image_format
    batch_size = batch_size or (32 if model.device.type == "cuda" else 4)
    total = len(source.manifest.videos(split))
    parts: list[VideoFeatures] = []
    done = 0
    for batch in load_gallery(
        source, split, image_size=format_.size, batch_size=batch_size, num_workers=num_workers
    ):
        batch = batch.to(model.device)
        pixels_VFCHW = normalise(batch.pixels_VFCHW, format_.mean, format_.std)
        parts.append(model.video_features(pixels_VFCHW, batch.mask_VF))
        done += len(batch)
        if on_progress:
            on_progress(done, total)
    return concatenate(parts)


def concatenate(parts: Sequence[VideoFeatures]) -> VideoFeatures:
    return VideoFeatures(torch.cat([p.frames_VFD for p in parts]), torch.cat([p.mask_VF for p in parts]))
