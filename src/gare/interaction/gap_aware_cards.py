"""GARE's score cards: the increment net folded into the frames of each video (or the words of each text).

Step numbers are those of the derivation in `docs/method.md`.
Shapes: V videos, F frames, D embedding, H heads; O owners of C context tokens each, A = H × C atoms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gare.cpu_products import multiply
from gare.interaction.fused_cards import FusedCards, fuse
from gare.interaction.increment_net import IncrementWeights
from gare.interaction.interaction import InteractionConfig
from gare.interaction.pair_blocks import centre, full_precision
from gare.interaction.pooled_cosine import PoolCard, PooledCards, PooledCosine
from gare.interaction.score_cards import cards_in_blocks, owners_per_block
from gare.types import VideoFeatures


@dataclass(frozen=True)
class OwnFrames:
    """Steps 2 and 6: what the net folded into the frames of a video gives with that video's own vectors."""

    key_mean_VA: Tensor
    atom_frames_VAF: Tensor
    linear_VKF: Tensor
    """Products of `scaled` and `fixed` with the frames."""


@dataclass(frozen=True)
class IncrementCard:
    """The increment net folded into the context tokens of each owner."""

    key_OAD: Tensor
    """Step 2: keys carried back through the query projection and LN1's scale, centred, over sqrt(D / H)."""
    key_bias_OA: Tensor
    mask_OC: Tensor
    grams_OKA: Tensor
    """The three quadratic forms in the attention weights (below), so that one product takes them all."""
    linear_OKA: Tensor
    """The three linear ones."""
    constant3: Tensor
    atom_OAD: Tensor
    """Step 5: Delta = Σ_a y_a atom_a + scaled / s3 + fixed."""
    scaled_D: Tensor
    fixed_D: Tensor
    num_heads: int
    eps: float
    own: OwnFrames | None = None
    """Products with the owner's own frames; None when the owners are texts, which have none."""

    @property
    def gram2_OAA(self) -> Tensor:
        """Step 3: the variance LN2 divides by, as a quadratic form in the attention weights."""
        return self.grams_OKA.chunk(3, dim=1)[0]

    @property
    def gram3_OAA(self) -> Tensor:
        """Step 4: the same for LN3, with the linear part `linear3_OA` and a constant one."""
        return self.grams_OKA.chunk(3, dim=1)[1]

    @property
    def gram_OAA(self) -> Tensor:
        """Step 5: the products of the atoms."""
        return self.grams_OKA.chunk(3, dim=1)[2]

    @property
    def linear3_OA(self) -> Tensor:
        return self.linear_OKA[:, 0]

    @property
    def atom_scaled_OA(self) -> Tensor:
        return self.linear_OKA[:, 1]

    @property
    def atom_fixed_OA(self) -> Tensor:
        return self.linear_OKA[:, 2]


@dataclass(frozen=True)
class GapAwareCards(PooledCards):
    """2·H·F + F vectors of D numbers and a few F×F matrices for each video."""

    increment: IncrementCard | None
    """The increment net folded into the frames; None when it attends over words, which texts own."""
    fused: FusedCards | None = None
    """The same for the CUDA kernel, where there is one to read it."""

    @cached_property
    def calls(self) -> dict[int, Any]:
        """What calls of the CUDA kernel with so many texts share: `gap_aware_cuda.py` keeps it here."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """Calls know where the tensors of these cards lie; those of a copy lie elsewhere."""
        return {name: value for name, value in vars(self).items() if name != "calls"}


def gap_aware_cards(
    video: VideoFeatures,
    config: InteractionConfig,
    pooling: PooledCosine,
    net: IncrementWeights | None,
    *,
    fused: bool = False,
) -> GapAwareCards:
    """The cards of all videos, made in blocks.

    Args:
        net: None when it attends over words.
        fused: with what the CUDA kernel reads.
    """

    def make(part: VideoFeatures) -> GapAwareCards:
        pool = pooling.pool_card(part)
        card = None if net is None else frame_card(part, pool, net, masks_padding=pooling.masks_padding)
        cards = GapAwareCards(config, pool, card)
        return replace(cards, fused=fuse(cards)) if fused else cards

    num_frames, dim = video.frames_VFD.shape[1:]
    num_atoms = num_frames * (1 if net is None else net.num_heads)
    size = owners_per_block(num_atoms, dim, video.frames_VFD.device)
    cards: GapAwareCards = cards_in_blocks(make, video, size)
    return cards


def frame_card(
    video: VideoFeatures, pool: PoolCard, net: IncrementWeights, *, masks_padding: bool
) -> IncrementCard:
    """The net folded into the frames of each video, with its products with those frames."""
    attended_VF = video.mask_VF if masks_padding else torch.ones_like(video.mask_VF)
    card = increment_card(video.frames_VFD, attended_VF, net)
    frames_VFD = full_precision(pool.frames_VFD)
    own = OwnFrames(
        key_mean_VA=(full_precision(card.key_OAD) @ pool.mean_VD[..., None]).squeeze(-1),
        atom_frames_VAF=full_precision(card.atom_OAD) @ frames_VFD.mT,
        linear_VKF=torch.stack([frames_VFD @ card.scaled_D, frames_VFD @ card.fixed_D], dim=1),
    )
    return replace(card, own=own)


def increment_card(context_OCD: Tensor, mask_OC: Tensor, net: IncrementWeights) -> IncrementCard:
    """Fold the increment net into context tokens.

    Large vectors are kept in the tokens' own precision, the rest in full.
    """
    stored = context_OCD.dtype
    context_OCD = full_precision(context_OCD.masked_fill(~mask_OC[..., None], 0))
    net = net.to(context_OCD.dtype)
    dim, num_heads = context_OCD.shape[-1], net.num_heads
    normed_OCD = F.layer_norm(context_OCD, (dim,), net.norm1_weight, net.norm1_bias, net.eps)

    def project_by_head(weight: Tensor, tokens_OCD: Tensor) -> Tensor:
        """Each head's slice of `tokens` through its rows of `weight`, [O, H·C, D]."""
        num_owners, num_tokens = tokens_OCD.shape[:2]
        # Heads first: one product a head, instead of a copy of the weights for every owner.
        tokens_HNd = tokens_OCD.reshape(num_owners * num_tokens, num_heads, -1).transpose(0, 1)
        parts = zip(tokens_HNd, weight.view(num_heads, -1, dim), strict=True)
        projected_HND = torch.stack([multiply(tokens_Nd, part_dD.mT) for tokens_Nd, part_dD in parts])
        projected_HOCD = projected_HND.view(num_heads, num_owners, num_tokens, dim)
        return projected_HOCD.transpose(0, 1).flatten(1, 2)

    key_OCD = multiply(normed_OCD, net.key_weight, net.key_bias) / math.sqrt(dim / num_heads)
    folded_OAD = project_by_head(net.query_weight, key_OCD)
    query_bias = F.linear(net.norm1_bias, net.query_weight, net.query_bias)
    key_bias_OAd = (key_OCD * query_bias).unflatten(-1, (num_heads, -1)).transpose(1, 2).flatten(1, 2)

    value_OCD = multiply(normed_OCD, net.value_weight, net.value_bias)
    # Attention weights sum to one in each head, so the output bias may be shared out over the heads.
    mixed_OAD = centre(project_by_head(net.out_weight.mT.contiguous(), value_OCD) + net.out_bias / num_heads)

    residual = (
        torch.eye(dim, dtype=net.residual_weight.dtype, device=context_OCD.device) + net.residual_weight
    )
    residual_OAD = centre(multiply(mixed_OAD * net.norm2_weight, residual))
    constant_D = centre(F.linear(net.norm2_bias, residual, net.residual_bias))

    atom_OAD = multiply(residual_OAD * net.norm3_weight, net.output_weight)
    scaled_D = F.linear(constant_D * net.norm3_weight, net.output_weight)
    fixed_D = F.linear(net.norm3_bias, net.output_weight, net.output_bias)
    return IncrementCard(
        key_OAD=centre(folded_OAD * net.norm1_weight).to(stored),
        key_bias_OA=key_bias_OAd.sum(dim=-1),
        mask_OC=mask_OC,
        grams_OKA=torch.cat(
            [
                mixed_OAD @ mixed_OAD.mT / dim,
                residual_OAD @ residual_OAD.mT / dim,
                atom_OAD @ atom_OAD.mT,
            ],
            dim=1,
        ),
        linear_OKA=torch.stack(
            [2 * residual_OAD @ constant_D / dim, atom_OAD @ scaled_D, atom_OAD @ fixed_D], dim=1
        ),
        constant3=constant_D @ constant_D / dim,
        atom_OAD=atom_OAD.to(stored),
        scaled_D=scaled_D,
        fixed_D=fixed_D,
        num_heads=num_heads,
        eps=net.eps,
    )
