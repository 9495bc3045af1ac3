"""NeighborRetr (Lin et al. 2025): token-wise scores, trained against videos near many texts.

Scoring is token-wise interaction. Training also needs each side merged to one vector, and a bank of earlier
texts and videos that says how central a video is. The bank fills as training goes and is not saved.

Shapes: T texts, V videos, F frames, W words, D embedding, M pairs of the bank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from gare.interaction.interaction import InteractionConfig
from gare.interaction.peers.peer import unit, words_without_padding
from gare.interaction.peers.token_merging import MergeStage, stage_names
from gare.interaction.token_wise import ZERO_PADDING, TokenWise, token_scores
from gare.settings import NonNegativeFloat, NonNegativeInt
from gare.types import PairScores, TextFeatures, VideoFeatures

TEXT_RATIOS, VIDEO_RATIOS = (1 / 6, 0), (1 / 4, 0)
"""The second stage leaves one vector of any number. The published ratios, 1/4 and 1/3, do so for at most
24 words and 12 frames only, and then this is the same."""


@dataclass(frozen=True)
class NeighborRetrConfig(InteractionConfig):
    """Token-wise interaction trained with neighbours."""

    name: Literal["neighbor_retr"] = "neighbor_retr"
    bank_size: NonNegativeInt = 1920
    """Earlier pairs that say how central a text or a video is; the batch itself while there are none."""
    centrality_scale: NonNegativeFloat = 0.3
    zero_padding: bool = False
    """Compare padding with a cosine of zero instead of leaving it out."""
    leaky_padding: bool = False
    """Let padding take part in the merging and in the weights of the contrastive term."""

    COUNTS_PADDING: ClassVar[Mapping[str, bool]] = {"leaky_padding": True}
    TRAPS: ClassVar[Mapping[str, str]] = {
        "zero_padding": ZERO_PADDING,
        "leaky_padding": "Padded tokens reach their neighbours when tokens are merged, and count in the mean "
        "over all words of a batch: training depends on the amount of padding.",
    }


class NeighborRetr(TokenWise):
    """WTI with hidden layers of 2 D."""

    Config = NeighborRetrConfig
    hidden_ratio = 2
    published_terms: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "contrastive": {"weight": 0.0},
        "centrality": {},
        "uniform": {},
        "neighbor": {},
        "level_agreement": {},
    }
    original_names = (
        *TokenWise.original_names,
        (r"(text|video)_weight_fc1\.", ""),
        *stage_names("text_ctm0", "text_block0", "text_stages.0"),
        *stage_names("text_ctm1", "text_block1", "text_stages.1"),
        *stage_names("video_ctm0", "video_block0", "video_stages.0"),
        *stage_names("video_ctm1", "video_block1", "video_stages.1"),
    )

    def __init__(self, config: NeighborRetrConfig, dim: int) -> None:
        super().__init__(config, dim)
        leaky = config.leaky_padding
        self.text_stages = nn.ModuleList(MergeStage(dim, r, leaky_padding=leaky) for r in TEXT_RATIOS)
        self.video_stages = nn.ModuleList(MergeStage(dim, r, leaky_padding=leaky) for r in VIDEO_RATIOS)
        self._bank: tuple[TextFeatures, VideoFeatures] | None = None

    def score_pairs(self, text: TextFeatures, video: VideoFeatures) -> PairScores:
        pairs = super().score_pairs(text, video)
        if not self.training:
            return pairs
        bank = self._bank or (_detached(text), _detached(video))
        self._remember(text, video)
        return PairScores(pairs.scores_TV, None, {**pairs.parts, **self.training_parts(text, video, *bank)})

    def training_parts(
        self, text: TextFeatures, video: VideoFeatures, bank_text: TextFeatures, bank_video: VideoFeatures
    ) -> dict[str, Tensor]:
        """Merged vectors, their weights in the contrastive term, and how central each text and video is."""
        text_TD = self.merge(self.text_stages, text.words_TWD, text.mask_TW)
        video_VD = self.merge(self.video_stages, video.frames_VFD, video.mask_VF)
        words, frames = self._word_card(text), self._frame_card(video)
        zero_padding = self.config.zero_padding
        bank_to_video_MV = token_scores(self._word_card(bank_text), frames, zero_padding=zero_padding)
        text_to_bank_TM = token_scores(words, self._frame_card(bank_video), zero_padding=zero_padding)
        return {
            "merged_text": text_TD,
            "merged_video": video_VD,
            "merged_scores": text_TD @ video_VD.mT,
            "contrastive_weight_T": self._weight(text_TD, text.words_TWD, text.mask_TW),
            "contrastive_weight_V": self._weight(video_VD, video.frames_VFD, video.mask_VF),
            "video_centrality": bank_to_video_MV.mean(dim=0),
            "text_centrality": text_to_bank_TM.mean(dim=1),
        }

    def merge(self, stages: nn.ModuleList, tokens_OND: Tensor, mask_ON: Tensor) -> Tensor:
        """All tokens of each owner as one vector, [O, D]."""
        merged_O1D: Tensor = stages[1](stages[0](tokens_OND, mask_ON))
        return merged_O1D.squeeze(1)

    def _weight(self, merged_OD: Tensor, tokens_OND: Tensor, mask_ON: Tensor) -> Tensor:
        """exp(0.3 · mean cosine with all tokens of the batch): central owners count more."""
        counted = tokens_OND.flatten(0, 1) if self.config.leaky_padding else tokens_OND[mask_ON]
        mean_O = (unit(merged_OD) @ unit(counted).mT).mean(dim=1)
        scale: float = self.config.centrality_scale
        return (scale * mean_O).exp()

    @torch.no_grad()
    def _remember(self, text: TextFeatures, video: VideoFeatures) -> None:
        """Newest first; the oldest fall out."""
        if not self.config.bank_size:
            return
        text, video = _detached(text), _detached(video)
        if self._bank is not None and self._bank[0].text_TD.device == text.text_TD.device:
            text = TextFeatures.cat([text, self._bank[0]])
            video = VideoFeatures.cat([video, self._bank[1]])
        self._bank = (text[: self.config.bank_size], video[: self.config.bank_size])


def _detached(features: TextFeatures | VideoFeatures) -> Any:
    if isinstance(features, TextFeatures):
        features = words_without_padding(features)
        return TextFeatures(features.text_TD.detach(), features.words_TWD.detach(), features.mask_TW)
    return VideoFeatures(features.without_padding().frames_VFD.detach(), features.mask_VF)
