"""EMCL-Net (Jin et al. 2022): pooled videos and texts pulled towards a few bases found by EM rounds.

The rounds cluster the D *channels* of a matrix of vectors, and the result is added to the vectors. The
published code clusters all pairs of a block at once, so a score depends on the rest of its block. Here each
pair is clustered alone, unless `over_block` is set.

Shapes: T texts, V videos, F frames, D embedding, K bases, N rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gare.interaction.interaction import InteractionConfig
from gare.interaction.pair_blocks import block_budget
from gare.interaction.peers.peer import LATE_MASK, Peer, cosine_of_pairs, pool_by_text
from gare.interaction.score_cards import ScoreCards
from gare.settings import NonNegativeFloat, PositiveFloat, PositiveInt
from gare.types import PairScores, TextFeatures, VideoFeatures

MOMENTUM = 0.9
FLOOR = 1e-6


@dataclass(frozen=True)
class EmclConfig(InteractionConfig):
    """EM over channels, added to both vectors of a pair."""

    name: Literal["emcl"] = "emcl"
    num_bases: PositiveInt = 32
    iterations: PositiveInt = 9
    em_temperature: PositiveFloat = 1.0
    reconstruction_weight: NonNegativeFloat = 3.0
    pooling_temperature: PositiveFloat = 3.0
    over_block: bool = False
    """Cluster all pairs of a block together."""
    forget_basis: bool = False
    """Leave the learned starting row out of saved files."""
    late_mask: bool = False
    """Mask frames after the softmax of the pooling."""

    COUNTS_PADDING: ClassVar[Mapping[str, bool]] = {"late_mask": True}
    TRAPS: ClassVar[Mapping[str, str]] = {
        "over_block": "All pairs of a block are clustered together: a score depends on the other texts and "
        "videos of its block, and on the size of the blocks.",
        "forget_basis": "The learned starting row is not saved: a loaded model scores with a random one.",
        "late_mask": LATE_MASK,
    }


class Emcl(Peer):
    """cos(t + 3 r_t, v + 3 r_v), with r what the bases make of the two vectors."""

    Config = EmclConfig
    config: EmclConfig
    basis_1K: Tensor
    original_names = ((r"basis_start_1K$", "basis_1K"),)

    def __init__(self, config: EmclConfig, dim: int) -> None:
        super().__init__(config, dim)
        row_1K = torch.randn(1, config.num_bases)
        # The published start, a row divided by its own column norms, is a sign for each base.
        self.register_buffer("basis_1K", row_1K / row_1K.abs(), persistent=not config.forget_basis)

    def score_pairs(self, text: TextFeatures, video: VideoFeatures) -> PairScores:
        text, video = self.prepare(text, video)
        pooled_TVD = pool_by_text(
            text.text_TD, video, self.config.pooling_temperature, late_mask=self.config.late_mask
        )
        if self.config.over_block:
            rows_ND = torch.cat([pooled_TVD.flatten(0, 1), text.text_TD])
            added_ND, basis_1K = self.reconstruct(rows_ND)
            added_TVD = added_ND[: -len(text)].view_as(pooled_TVD)
            added_text_TVD = added_ND[-len(text) :, None]
        else:
            added_TV2D, basis_1K = self._each_pair(text.text_TD, pooled_TVD)
            added_TVD, added_text_TVD = added_TV2D.unbind(dim=2)
        if self.training:
            with torch.no_grad():
                self.basis_1K.copy_(MOMENTUM * self.basis_1K + (1 - MOMENTUM) * basis_1K)
        weight = self.config.reconstruction_weight
        text_TVD = text.text_TD[:, None] + weight * added_text_TVD
        return PairScores(cosine_of_pairs(text_TVD, pooled_TVD + weight * added_TVD), None)

    def score(
        self,
        text: TextFeatures,
        video: VideoFeatures | ScoreCards,
        *,
        text_block: int | None = None,
        video_block: int | None = None,
    ) -> Tensor:
        """Blocks of 32 × 32, as the published evaluation has them, matter only with `over_block`."""
        if self.config.over_block:
            text_block, video_block = text_block or 32, video_block or 32
        return super().score(text, video, text_block=text_block, video_block=video_block)

    @torch.no_grad()
    def reconstruct(self, rows_ND: Tensor) -> tuple[Tensor, Tensor]:
        """What the bases make of the rows, [..., N, D], and the mean row of the bases [1, K]."""
        basis_NK = self.basis_1K.to(rows_ND.dtype).expand(*rows_ND.shape[:-1], -1)
        for _ in range(self.config.iterations):
            shares_DK = (rows_ND.mT @ basis_NK / self.config.em_temperature).softmax(dim=-1)
            shares_DK = shares_DK / (FLOOR + shares_DK.sum(dim=-2, keepdim=True))
            basis_NK = rows_ND @ shares_DK
            basis_NK = basis_NK / (FLOOR + basis_NK.norm(dim=-2, keepdim=True))
        return basis_NK @ shares_DK.mT, basis_NK.flatten(0, -2).mean(dim=0, keepdim=True)

    @torch.no_grad()
    def _each_pair(self, text_TD: Tensor, pooled_TVD: Tensor) -> tuple[Tensor, Tensor]:
        """The same for the two rows of each pair alone, some texts at a time."""
        numbers = pooled_TVD.shape[1] * pooled_TVD.shape[2] * self.config.num_bases
        texts = max(1, block_budget(text_TD.device) // numbers)
        pairs_TV2D = torch.stack([pooled_TVD, text_TD[:, None].expand_as(pooled_TVD)], dim=2)
        done = [self.reconstruct(part) for part in pairs_TV2D.split(texts)]
        sizes = [len(part) / len(text_TD) for part in pairs_TV2D.split(texts)]
        basis_1K = torch.stack([size * basis for size, (_, basis) in zip(sizes, done, strict=True)]).sum(
            dim=0
        )
        return torch.cat([added for added, _ in done]), basis_1K
