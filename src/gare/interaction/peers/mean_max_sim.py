"""Video-ColBERT's MeanMaxSim (Reddy et al. 2025): each word finds its best frame, on two levels.

There is no official code. The score is from the paper; its golden is a third party's.

Shapes: T texts, V videos, F frames, W words, D embedding, N tokens of a video.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from gare.interaction.interaction import FastScoring, InteractionConfig
from gare.interaction.peers.peer import Peer, fit, unit
from gare.interaction.temporal import TemporalTransformer, default_heads
from gare.settings import NonNegativeInt, PositiveInt
from gare.types import PairScores, TextFeatures, VideoFeatures


@dataclass(frozen=True)
class MeanMaxSimConfig(InteractionConfig):
    """Late interaction on two levels."""

    name: Literal["mean_max_sim"] = "mean_max_sim"
    num_layers: PositiveInt = 4
    num_heads: PositiveInt | None = None
    """Heads of the transformer; about one for each 64 dimensions if not given."""
    num_expansion: NonNegativeInt = 2
    """Learned tokens beside the frames on the second level."""
    max_frames: PositiveInt = 12
    expand_queries: bool = False
    """Count padded words too, as the paper's query expansion does."""

    TRAPS: ClassVar[Mapping[str, str]] = {
        "expand_queries": "Padded words count like words: the score depends on how long queries are padded.",
    }


class MeanMaxSim(Peer):
    """The mean over words of the largest cosine with a frame, plus the same after a transformer."""

    Config = MeanMaxSimConfig
    config: MeanMaxSimConfig
    reads_words = True
    fast_scoring: FastScoring = "products"
    published_terms: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "contrastive": {"weight": 0.0},
        "sigmoid": {},
    }

    def __init__(self, config: MeanMaxSimConfig, dim: int) -> None:
        super().__init__(config, dim)
        self.temporal = TemporalTransformer(
            dim,
            num_layers=config.num_layers,
            num_heads=config.num_heads or default_heads(dim),
            max_frames=config.max_frames + config.num_expansion,
        )
        self.expansion = nn.Parameter(torch.empty(config.num_expansion, dim).normal_(std=0.02))
        self.log_scale = nn.Parameter(torch.tensor(4.77))
        self.bias = nn.Parameter(torch.tensor(-12.93))

    def score_pairs(self, text: TextFeatures, video: VideoFeatures) -> PairScores:
        words_TWD = text.words_TWD
        text, video = self.prepare(text, video)
        mask_TW = text.mask_TW
        if self.config.expand_queries:
            mask_TW = torch.ones_like(mask_TW)
        else:
            words_TWD = text.words_TWD
        tokens_VND, mask_VN = self.video_tokens(video)
        frame_TV = mean_max_sim(words_TWD, mask_TW, video.frames_VFD, video.mask_VF)
        video_TV = mean_max_sim(words_TWD, mask_TW, tokens_VND, mask_VN)
        parts = {}
        if self.training:
            parts = {
                "sigmoid_scale": self.log_scale.exp(),
                "sigmoid_bias": self.bias,
                "sigmoid_scores:frame": frame_TV,
                "sigmoid_scores:video": video_TV,
            }
        return PairScores(frame_TV + video_TV, None, parts)

    def video_tokens(self, video: VideoFeatures) -> tuple[Tensor, Tensor]:
        """Frames and learned tokens after the transformer, with their mask."""
        frames_VFD, mask_VF = fit(video.frames_VFD, video.mask_VF, self.config.max_frames, "frames")
        expansion_VED = self.expansion.expand(len(video), -1, -1)
        mask_VN = torch.cat([mask_VF, mask_VF.new_ones(expansion_VED.shape[:2])], dim=1)
        return self.temporal(torch.cat([frames_VFD, expansion_VED], dim=1), mask_VN), mask_VN


def mean_max_sim(words_TWD: Tensor, mask_TW: Tensor, tokens_VND: Tensor, mask_VN: Tensor) -> Tensor:
    """The mean over the words of the largest cosine with a token of the video, [T, V]."""
    cosines_TWVN = torch.einsum("twd,vnd->twvn", unit(words_TWD), unit(tokens_VND))
    best_TWV = cosines_TWVN.masked_fill(~mask_VN, float("-inf")).amax(dim=-1)
    shares_TW = mask_TW.to(best_TWV.dtype) / mask_TW.sum(dim=1, keepdim=True)
    return torch.einsum("twv,tw->tv", best_TWV, shares_TW)
