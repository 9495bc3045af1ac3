"""InfoNCE over the pairs of a batch. Shapes: T texts, V videos; text i belongs to video i."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gare.objective.loss_term import LossTerm, ScoredBatch


@dataclass(frozen=True)
class Contrastive(LossTerm):
    """The true pairs of a batch against all others: symmetric InfoNCE."""

    same_video: Literal["exclude", "released"] = "exclude"
    """Captions of one video in a batch: not negatives of each other, or negatives as in the released code."""

    def __call__(self, batch: ScoredBatch) -> Tensor:
        excluded = batch.video_index if self.same_video == "exclude" else None
        return symmetric_infonce(batch.pairs.scores_TV, batch.logit_scale, video_index=excluded)


def symmetric_infonce(
    scores_TV: Tensor, logit_scale: Tensor | float, *, video_index: Tensor | None = None
) -> Tensor:
    """Mean of the text→video and video→text cross-entropies; the positives are the diagonal.

    Args:
        scores_TV: cosine scores. If there are more texts than videos or the reverse, the first min(T, V) are
            pairs and the others negatives only.
        logit_scale: one over the temperature.
        video_index: which video each of the T = V pairs shows. Two captions of one video are then not
            negatives of each other: their cells are left out of both softmaxes.

    >>> symmetric_infonce(torch.eye(2), 0.0)
    tensor(0.6931)
    """
    if scores_TV.ndim != 2 or not scores_TV.numel():
        raise ValueError(f"scores must be [texts, videos] and not empty, got {list(scores_TV.shape)}")
    logits_TV = scores_TV * logit_scale
    if video_index is not None:
        if not isinstance(video_index, Tensor) or video_index.shape != (logits_TV.shape[0],):
            raise ValueError(f"video_index must be a tensor with one entry per pair, [{logits_TV.shape[0]}]")
        if logits_TV.shape[0] != logits_TV.shape[1]:
            raise ValueError(
                f"with video_index there must be as many texts as videos, got {list(scores_TV.shape)}"
            )
        logits_TV = logits_TV.masked_fill(same_video_cells(video_index), float("-inf"))
    num_pairs = min(logits_TV.shape)
    target = torch.arange(num_pairs, device=scores_TV.device)
    text_to_video = F.cross_entropy(logits_TV[:num_pairs], target)
    video_to_text = F.cross_entropy(logits_TV.mT[:num_pairs], target)
    return (text_to_video + video_to_text) / 2


def same_video_cells(video_index: Tensor) -> Tensor:
    """True off the diagonal where two pairs show the same video, [N, N].

    >>> same_video_cells(torch.tensor([7, 8, 7]))
    tensor([[False, False,  True],
            [False, False, False],
            [ True, False, False]])
    """
    same = video_index[:, None] == video_index
    return same & ~torch.eye(len(video_index), dtype=torch.bool, device=video_index.device)
