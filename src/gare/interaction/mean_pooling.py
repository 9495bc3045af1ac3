"""The plain dual encoder: the cosine of a text and the mean of a video's frames.

A file of its own, because it is the first thing to read and to copy for a new pooling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from gare.interaction.interaction import FastScoring
from gare.interaction.pair_blocks import products
from gare.interaction.pooled_cosine import PoolCard, PooledCosine, PooledCosineConfig, mean_weights


@dataclass(frozen=True)
class MeanPoolingConfig(PooledCosineConfig):
    """The mean of a video's frames."""

    name: Literal["mean"] = "mean"


class MeanPooling(PooledCosine):
    """Every real frame counts alike."""

    Config = MeanPoolingConfig
    same_for_every_text = True
    fast_scoring: FastScoring = "vectors"

    @property
    def stage1_is_exact(self) -> bool:
        return self.masks_padding

    def weights(self, logits_VFT: Tensor, mask_VF: Tensor) -> Tensor:
        weights_VF = mean_weights(mask_VF, mask_frames=self.masks_padding, dtype=logits_VFT.dtype)
        return weights_VF[..., None].expand_as(logits_VFT)

    def pool_products(self, text_TD: Tensor, pool: PoolCard) -> tuple[Tensor, Tensor, Tensor]:
        """From the mean vectors alone: one product of length D a pair, not one a frame."""
        text_pooled_VT = products(pool.mean_VD[:, None], text_TD).squeeze(1)
        weights_VFT = self.weights(
            text_pooled_VT[:, None].expand(-1, pool.mask_VF.shape[1], -1), pool.mask_VF
        )
        return pool.mean_VD.square().sum(dim=-1, keepdim=True), text_pooled_VT, weights_VFT
