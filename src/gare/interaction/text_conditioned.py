"""Text-conditioned pooling: frames that look like the text count more. It has no parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gare.interaction.pooled_cosine import PooledCosine, PooledCosineConfig
from gare.interaction.score_bounds import Balls
from gare.settings import PositiveFloat


@dataclass(frozen=True)
class TextConditionedConfig(PooledCosineConfig):
    """Frames weighted by a softmax over t·f."""

    name: Literal["text_conditioned"] = "text_conditioned"
    pooling_temperature: PositiveFloat = 3.0
    """Temperature of the softmax over frames."""


class TextConditionedPooling(PooledCosine):
    """Softmax over the frames of t·f / temperature."""

    Config = TextConditionedConfig
    config: TextConditionedConfig
    same_for_every_text = False

    def pooled_radius(self, text_TD: Tensor, pooled: Balls) -> Tensor:
        """Weights differ by at most e^2κ − 1 of their own, κ = |t| ρ / temperature."""
        if not self.masks_padding:
            return pooled.radius_O
        length_T1 = text_TD.double().norm(dim=-1, keepdim=True)
        kappa_TO = length_T1 * pooled.radius_O / self.config.pooling_temperature
        return torch.minimum(pooled.radius_O, torch.expm1(2 * kappa_TO) * pooled.radius_O + pooled.moved_O)

    def weights(self, logits_VFT: Tensor, mask_VF: Tensor) -> Tensor:
        padding_VF1 = ~mask_VF[..., None]
        logits_VFT = logits_VFT / self.config.pooling_temperature
        if self.masks_padding:
            return logits_VFT.masked_fill(padding_VF1, float("-inf")).softmax(dim=1)
        # The released code masks after the softmax: its weights do not sum to one on padded videos.
        return logits_VFT.softmax(dim=1).masked_fill(padding_VF1, 0)
