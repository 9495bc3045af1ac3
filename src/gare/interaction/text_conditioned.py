"""Text-conditioned pooling: frames that look like the text count more. It has no parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gare.interaction.pooled_cosine import PooledCosine, PooledCosineConfig
from gare.interaction.score_bounds import SLACK, Balls
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
        """λ (e^2κ − 1) / 2ρ with κ = |t| ρ / temperature and λ the largest variance of the frames."""
        if not self.masks_padding:
            return pooled.radius_O
        length_T1 = text_TD.double().norm(dim=-1, keepdim=True)
        kappa_TO = length_T1 * pooled.radius_O / self.config.pooling_temperature
        # (e^2κ − 1) / 2κ is at least one, and one where the ball has no radius.
        growth_TO = torch.expm1(2 * kappa_TO.clamp_min(1e-9)) / (2 * kappa_TO.clamp_min(1e-9))
        reach_TO = pooled.spread_O * length_T1 / self.config.pooling_temperature * growth_TO * (1 + SLACK)
        return torch.minimum(pooled.radius_O, reach_TO + pooled.moved_O)

    def weights(self, logits_VFT: Tensor, mask_VF: Tensor) -> Tensor:
        padding_VF1 = ~mask_VF[..., None]
        if self.masks_padding:
            outside_VF1 = logits_VFT.new_zeros(padding_VF1.shape).masked_fill(padding_VF1, float("-inf"))
            scaled_VFT = torch.add(outside_VF1, logits_VFT, alpha=1 / self.config.pooling_temperature)
            return scaled_VFT.softmax(dim=1)
        # The released code masks after the softmax: its weights do not sum to one on padded videos.
        return (logits_VFT / self.config.pooling_temperature).softmax(dim=1).masked_fill(padding_VF1, 0)
