"""Both directions of a text × video matrix, with several captions per video. Shapes: T texts, V videos.

Text→video: every caption is a query. Video→text has three protocols in use, 10–15 points apart on MSVD, so a
number means nothing without its name:

- `max_caption`: each video is represented by its best caption for the query; rank among the V videos.
- `any_caption`: rank of the query's best own caption among all captions of *other* videos; own captions never
  compete with each other, so a video whose caption occurs twice is not punished for it.
- `one_caption`: only the first caption of each video is kept; rank among those V captions.

With one caption per video, paragraph retrieval included, the three agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gare.evaluate.rank_metrics import (
    Array,
    RetrievalMetrics,
    Rivals,
    TiePolicy,
    as_index,
    as_matrix,
    count_above_and_level,
    count_rivals,
    metrics_of_ranks,
)

CaptionProtocol = Literal["max_caption", "any_caption", "one_caption"]
TIE_POLICIES: tuple[TiePolicy, ...] = ("pessimistic", "average", "optimistic", "legacy")


@dataclass(frozen=True)
class TwoWayMetrics:
    """Both directions under every tie policy; "pessimistic" is the main one, "legacy" for comparison only."""

    protocol: CaptionProtocol
    text_to_video: dict[TiePolicy, RetrievalMetrics]
    video_to_text: dict[TiePolicy, RetrievalMetrics]
    video_of_text: Tensor
    """The video of each text, [T], on the CPU."""


def evaluate_scores(
    scores: Array,
    video_of_text: Array | None = None,
    *,
    protocol: CaptionProtocol = "max_caption",
    video_to_text_scores: Array | None = None,
) -> TwoWayMetrics:
    """Measure both directions of a text × video matrix under every tie policy.

    Args:
        scores: [texts, videos], higher is better, finite.
        video_of_text: the column of each text's video, in any order; every video needs a text. By default
            text i belongs to video i.
        protocol: which video→text protocol.
        video_to_text_scores: [texts, videos], for rescoring, which makes one matrix for each direction.

    Examples:
        >>> scores = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.3, 0.4]])
        >>> result = evaluate_scores(scores, torch.tensor([0, 1, 0]), protocol="any_caption")
        >>> result.text_to_video["pessimistic"].ranks, result.video_to_text["pessimistic"].ranks
        (tensor([1, 1, 2]), tensor([1, 1]))
    """
    scores_TV = as_matrix(scores)
    reverse_scores_TV = scores_TV if video_to_text_scores is None else as_matrix(video_to_text_scores)
    if reverse_scores_TV.shape != scores_TV.shape:
        raise ValueError(
            f"video_to_text_scores must be [texts, videos] as scores, {list(scores_TV.shape)}, "
            f"got {list(reverse_scores_TV.shape)}"
        )
    video_T = _as_video_of_text(video_of_text, scores_TV)
    return TwoWayMetrics(
        protocol=protocol,
        text_to_video=_under_every_policy(count_rivals(scores_TV, video_T)),
        video_to_text=_under_every_policy(video_to_text_rivals(reverse_scores_TV, video_T, protocol)),
        video_of_text=video_T.cpu(),
    )


def video_to_text_rivals(scores_TV: Tensor, video_T: Tensor, protocol: CaptionProtocol) -> Rivals:
    """What stands above and level with each video's own text, one query per video."""
    if protocol not in VIDEO_TO_TEXT:
        raise ValueError(f"unknown protocol {protocol!r}; choose one of {', '.join(VIDEO_TO_TEXT)}")
    return VIDEO_TO_TEXT[protocol](scores_TV, video_T)


def _max_caption(scores_TV: Tensor, video_T: Tensor) -> Rivals:
    best_VV = _reduce_by_video(scores_TV, video_T, "amax")  # [captions of video u, query video v]
    return count_rivals(best_VV.mT)


def _any_caption(scores_TV: Tensor, video_T: Tensor) -> Rivals:
    own_T1 = scores_TV.gather(1, video_T[:, None])
    best_V1 = _reduce_by_video(own_T1, video_T, "amax")
    above_V, level_V = count_above_and_level(scores_TV.mT, best_V1)
    is_own_best_T = (own_T1 == best_V1[video_T]).squeeze(1)
    own_level_V = video_T[is_own_best_T].bincount(minlength=scores_TV.shape[1])
    return Rivals(above_V, level_V - own_level_V)


def _one_caption(scores_TV: Tensor, video_T: Tensor) -> Rivals:
    position_T1 = torch.arange(len(video_T), device=video_T.device)[:, None]
    first_V = _reduce_by_video(position_T1, video_T, "amin").squeeze(1)
    return count_rivals(scores_TV[first_V].mT)


VIDEO_TO_TEXT: dict[CaptionProtocol, Callable[[Tensor, Tensor], Rivals]] = {
    "max_caption": _max_caption,
    "any_caption": _any_caption,
    "one_caption": _one_caption,
}


def _reduce_by_video(values_TX: Tensor, video_T: Tensor, reduce: Literal["amax", "amin"]) -> Tensor:
    """The largest or smallest row of each video, column by column, [V, X]."""
    empty_VX = values_TX.new_empty(int(video_T.max()) + 1, values_TX.shape[1])
    index_TX = video_T[:, None].expand_as(values_TX)
    return empty_VX.scatter_reduce(0, index_TX, values_TX, reduce, include_self=False)


def _as_video_of_text(video_of_text: Array | None, scores_TV: Tensor) -> Tensor:
    num_texts, num_videos = scores_TV.shape
    if video_of_text is None:
        if num_texts != num_videos:
            raise ValueError(
                f"{num_texts} texts and {num_videos} videos are not pairs; "
                "pass video_of_text, the column of each text's video"
            )
        return torch.arange(num_texts, device=scores_TV.device)
    video_T = as_index(
        video_of_text, name="video_of_text", length=num_texts, below=num_videos, device=scores_TV.device
    )
    without_text = (video_T.bincount(minlength=num_videos) == 0).nonzero().flatten().tolist()
    if without_text:
        raise ValueError(
            f"{len(without_text)} of {num_videos} videos have no text (the first: column {without_text[0]}), "
            "so video→text cannot rank it; drop these columns, or use retrieval_metrics for text→video alone"
        )
    return video_T


def _under_every_policy(rivals: Rivals) -> dict[TiePolicy, RetrievalMetrics]:
    num_queries = len(rivals.above_Q)
    return {
        ties: metrics_of_ranks(rivals.ranks(ties), num_queries=num_queries, ties=ties)
        for ties in TIE_POLICIES
    }
