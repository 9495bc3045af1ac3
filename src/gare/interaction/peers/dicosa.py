"""DiCoSA (Jin et al. 2023): a text and a video compared in slices of channels, each with a learned weight.

Shapes: T texts, V videos, F frames, D embedding, C slices ("concepts") of d channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from gare.interaction.interaction import InteractionConfig
from gare.interaction.peers.peer import LATE_MASK, Peer, cosine_of_pairs, pool_by_text, start_normal
from gare.settings import PositiveFloat, PositiveInt
from gare.types import PairScores, TextFeatures, VideoFeatures


@dataclass(frozen=True)
class DicosaConfig(InteractionConfig):
    """Slices of channels with learned weights."""

    name: Literal["dicosa"] = "dicosa"
    num_concepts: PositiveInt = 8
    pooling_temperature: PositiveFloat = 3.0
    late_mask: bool = False
    """Mask frames after the softmax of the pooling."""

    COUNTS_PADDING: ClassVar[Mapping[str, bool]] = {"late_mask": True}
    TRAPS: ClassVar[Mapping[str, str]] = {"late_mask": LATE_MASK}


class Dicosa(Peer):
    """Σ_c ω_c cos(t_c, v_c), with ω from a small net on both slices; there is no softmax over the slices."""

    Config = DicosaConfig
    config: DicosaConfig
    published_terms: ClassVar[Mapping[str, Mapping[str, Any]]] = {"concept_decorrelation": {}}
    original_names = ((r"weight_fc\.0\.", "hidden."), (r"weight_fc\.2\.", "output."))

    def __init__(self, config: DicosaConfig, dim: int) -> None:
        super().__init__(config, dim)
        if dim % config.num_concepts or dim // config.num_concepts < 2:
            raise ValueError(
                f"the embedding has {dim} dimensions, which {config.num_concepts} slices do not divide into "
                "two channels or more; choose another interaction.num_concepts"
            )
        width = dim // config.num_concepts
        self.hidden, self.output = nn.Linear(2 * width, 4 * width), nn.Linear(4 * width, 1)
        start_normal(self)

    def score_pairs(self, text: TextFeatures, video: VideoFeatures) -> PairScores:
        text, video = self.prepare(text, video)
        pooled_TVD = pool_by_text(
            text.text_TD, video, self.config.pooling_temperature, late_mask=self.config.late_mask
        )
        slices = (self.config.num_concepts, -1)
        text_TCd, pooled_TVCd = text.text_TD.unflatten(-1, slices), pooled_TVD.unflatten(-1, slices)
        text_TVCd = text_TCd[:, None].expand_as(pooled_TVCd)
        hidden = self.hidden(torch.cat([text_TVCd, pooled_TVCd], dim=-1)).relu()
        weight_TVC = self.output(hidden).squeeze(-1)
        scores_TV: Tensor = (weight_TVC * cosine_of_pairs(text_TVCd, pooled_TVCd)).sum(dim=-1)
        parts = {}
        if self.training:
            own = torch.arange(min(len(text), len(video)), device=scores_TV.device)
            parts = {"text_slices_BCd": text_TCd[own], "video_slices_BCd": pooled_TVCd[own, own]}
        return PairScores(scores_TV, None, parts)
