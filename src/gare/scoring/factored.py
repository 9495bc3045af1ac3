"""The scores of `dense` without ever forming an increment.

Everything in psi after its attention weights is linear or a LayerNorm, and a LayerNorm only needs a mean and
a norm. So each increment is a known combination of a few vectors (*atoms*, one per head and context token),
and a score is a function of dot products with those. `docs/method.md` derives the formulas; the step numbers
below are its own.

Shapes: T texts, V videos, F frames, W words, D embedding, H heads. Psi's context tokens C belong to one side,
the *owner* O: the videos when it attends over frames, the texts when over words. P is the other side, and
A = H × C counts the atoms. Pairs lie as [O, A, P]: one matrix product writes that layout, and the small
quadratic forms are batched over O.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gare.scoring import dense, token_wise
from gare.scoring.blocks import block_budget, each_block
from gare.scoring.cards import (
    IncrementCard,
    PoolCard,
    ScoreCards,
    centre,
    full_precision,
    increment_card,
    owners_per_block,
    pool_card,
    score_cards,
)
from gare.scoring.checks import check_features, increment_module
from gare.scoring.dense import SQUARE_FLOOR
from gare.scoring.few import QueryFirst
from gare.scoring.pooling import pool_weights
from gare.scoring.products import products
from gare.types import IncrementModule, Interaction, PairModule, TextFeatures, VideoFeatures, block_slices

MAX_TEXTS_PER_BLOCK = 1024
FEW_VIDEOS_PER_BLOCK = 512

AS_INCREMENT = Interaction(query="text", normalise=True)
"""Cross-attention pooling is psi asked by the text: what it gives is the video vector, at length one."""


@dataclass(frozen=True)
class FrameWeights:
    """Which frames a pair looks at."""

    pool_TVF: Tensor
    """Weights of the frames in the video vector of the score; token-wise, what each frame adds to it."""
    attention_TVHF: Tensor | None
    """Weights inside psi, or of each head that pools; None for the other baselines and for word context."""


@dataclass(frozen=True)
class PairProducts:
    """The inner products a score is made of, each [O, P] or broadcastable to it."""

    text_sq: Tensor
    pooled_sq: Tensor
    text_pooled: Tensor
    increment_sq: Tensor | float
    text_increment: Tensor | float
    pooled_increment: Tensor | float


def score(
    text: TextFeatures,
    video: VideoFeatures | ScoreCards,
    psi: PairModule | None,
    interaction: Interaction,
    *,
    text_block: int | None = None,
    video_block: int | None = None,
) -> Tensor:
    """Scores [T, V], equal to `dense.score` up to rounding whatever the blocks; half precision in float32.

    Pass `score_cards(...)` instead of videos to pay for them once.
    """
    if interaction.pooling == "token_wise":
        check_features(text, video, psi, interaction)
        return token_wise.score(text, video, psi, text_block=text_block, video_block=video_block)
    psi = increment_module(psi, interaction)
    if psi is not None and isinstance(video, VideoFeatures) and _is_few(text, video, interaction):
        few = psi if isinstance(psi, QueryFirst) else QueryFirst(psi.weights())
        text, video = _in_full_precision(text, video)
        video_block = video_block or FEW_VIDEOS_PER_BLOCK
        return dense.score(text, video, few, interaction, text_block=text_block, video_block=video_block)

    def score_block(text: TextFeatures, owner: IncrementCard | None, pool: PoolCard) -> Tensor:
        if interaction.pooling == "cross_attention":
            pairs = pair_products(text, owner, pool, AS_INCREMENT)
            return (pairs.text_increment * pairs.text_sq.clamp_min(SQUARE_FLOOR).rsqrt()).clamp(-1, 1)
        if owner is not None and _kernel_fits(text, owner, pool):
            from gare.scoring import kernel

            return kernel.score(text.text_TD, owner, pool, interaction)
        return cosine(pair_products(text, owner, pool, interaction), interaction)

    return _map_blocks(score_block, text, video, psi, interaction, text_block, video_block)


def _is_few(text: TextFeatures, video: VideoFeatures, interaction: Interaction) -> bool:
    """A pair scored by itself costs as much as the card of one frame."""
    return interaction.context == "frames" and len(text) < video.frames_VFD.shape[1]


def _in_full_precision(text: TextFeatures, video: VideoFeatures) -> tuple[TextFeatures, VideoFeatures]:
    dtype = full_precision(text.text_TD[:0]).dtype
    return text.to(dtype), video.to(dtype)


def radii(
    text: TextFeatures, video: VideoFeatures | ScoreCards, psi: IncrementModule, interaction: Interaction
) -> Tensor:
    """The length of every increment, |Delta_ij|, [T, V]."""

    def radius_block(text: TextFeatures, owner: IncrementCard | None, pool: PoolCard) -> Tensor:
        increment_sq = pair_products(text, owner, pool, interaction).increment_sq
        assert isinstance(increment_sq, Tensor)
        return increment_sq.sqrt()

    return _map_blocks(radius_block, text, video, psi, interaction, None, None)


def frame_weights(
    text: TextFeatures,
    video: VideoFeatures | ScoreCards,
    psi: PairModule | None,
    interaction: Interaction,
) -> FrameWeights:
    """The frames behind each score: T × V × F numbers, so for the pairs one shows, not for a gallery."""
    check_features(text, video, psi, interaction)
    if interaction.pooling == "token_wise":
        return FrameWeights(token_wise.frame_shares(text, video, psi), None)
    cards = video if isinstance(video, ScoreCards) else score_cards(video, psi, interaction)
    attention_TVHF: Tensor | None = None
    if cards.increment is not None:
        pools = interaction.pooling == "cross_attention"
        attention_VAT = _attention(text, cards.increment, cards.pool, AS_INCREMENT if pools else interaction)
        attention_TVHF = attention_VAT.unflatten(1, (cards.increment.num_heads, -1)).permute(3, 0, 1, 2)
        if pools:
            return FrameWeights(attention_TVHF.mean(dim=2), attention_TVHF)
    pool_VFT = pool_weights(products(cards.pool.frames_VFD, text.text_TD), cards.pool.mask_VF, interaction)
    return FrameWeights(pool_VFT.permute(2, 0, 1), attention_TVHF)


# --- blocks of pairs ----------------------------------------------------------------------------------------


def _map_blocks(
    function: Callable[[TextFeatures, IncrementCard | None, PoolCard], Tensor],
    text: TextFeatures,
    video: VideoFeatures | ScoreCards,
    psi: IncrementModule | None,
    interaction: Interaction,
    text_block: int | None,
    video_block: int | None,
) -> Tensor:
    """`function` of every block of pairs, as [T, V]. Owners are the outer loop: their cards cost most."""
    check_features(text, video, psi, interaction)
    default_text, default_video = _block_sizes(text, video, psi, interaction)
    text_block, video_block = text_block or default_text, video_block or default_video

    if psi is not None and interaction.context == "words":

        def row_of_blocks(texts: TextFeatures) -> Tensor:
            owner = increment_card(texts.words_TWD, texts.mask_TW, psi.weights())
            columns = block_slices(len(video), video_block)
            pools = (
                video[rows].pool if isinstance(video, ScoreCards) else pool_card(video[rows], interaction)
                for rows in columns
            )
            return torch.cat([function(texts, owner, pool) for pool in pools], dim=1)

        return torch.cat(each_block(row_of_blocks, list(text.blocks(text_block))))

    def column_of_blocks(videos: VideoFeatures | ScoreCards) -> Tensor:
        cards = videos if isinstance(videos, ScoreCards) else score_cards(videos, psi, interaction)
        return torch.cat(
            [function(texts, cards.increment, cards.pool) for texts in text.blocks(text_block)], dim=1
        )

    return torch.cat(
        each_block(column_of_blocks, [video[rows] for rows in block_slices(len(video), video_block)])
    ).mT


def _block_sizes(
    text: TextFeatures,
    video: VideoFeatures | ScoreCards,
    psi: IncrementModule | None,
    interaction: Interaction,
) -> tuple[int, int]:
    """Texts and videos a block, so that neither its pairs nor the cards of its owners take much memory."""
    frames_VFD = video.pool.frames_VFD if isinstance(video, ScoreCards) else video.frames_VFD
    over_words = psi is not None and interaction.context == "words"
    num_tokens = max(text.words_TWD.shape[1], frames_VFD.shape[1]) if over_words else frames_VFD.shape[1]
    num_atoms = num_tokens * (1 if psi is None else psi.weights().num_heads)
    budget = block_budget(frames_VFD.device)
    num_owners = owners_per_block(num_atoms, text.dim, frames_VFD.device)
    text_block = min(len(text), MAX_TEXTS_PER_BLOCK, max(1, budget // num_atoms))
    if over_words:
        text_block = min(text_block, num_owners)
    video_block = max(1, budget // (num_atoms * text_block))
    if not over_words and not isinstance(video, ScoreCards):
        video_block = min(video_block, num_owners)
    return text_block, video_block


def _kernel_fits(text: TextFeatures, owner: IncrementCard, pool: PoolCard) -> bool:
    """Whether the fused CUDA kernel can take this block; if not, plain torch gives the same numbers."""
    return (
        text.text_TD.is_cuda
        and not (torch.is_grad_enabled() and (text.text_TD.requires_grad or owner.key_OAD.requires_grad))
        and text.text_TD.dtype != torch.float64
        and owner.own is not None
        and owner.num_heads == 1
        and pool.mask_VF.shape[1] <= 64
        and find_spec("triton") is not None
    )


# --- one block ----------------------------------------------------------------------------------------------


def pair_products(
    text: TextFeatures, owner: IncrementCard | None, pool: PoolCard, interaction: Interaction
) -> PairProducts:
    """Steps 1–6: every inner product between text, pooled video and increment, without any of T × V × D."""
    text_TD = full_precision(text.text_TD)
    frame_text_VFT = products(pool.frames_VFD, text.text_TD)
    weights_VFT = pool_weights(frame_text_VFT, pool.mask_VF, interaction)
    text_sq_T = text_TD.square().sum(dim=-1)
    pooled_sq_VT = _quadratic(pool.gram_VFF, weights_VFT)
    text_pooled_VT = (weights_VFT * frame_text_VFT).sum(dim=1)
    if owner is None:
        return PairProducts(text_sq_T, pooled_sq_VT, text_pooled_VT, 0.0, 0.0, 0.0)

    attention_OAP = _attention(text, owner, pool, interaction)
    # A row of scales over P for each owner; LN2 and LN3 divide by them (steps 3 and 4).
    scale2_O1P = (_quadratic(owner.gram2_OAA, attention_OAP) + owner.eps).rsqrt()[:, None]
    mixed_OAP = attention_OAP * scale2_O1P
    variance3_OP = (
        _quadratic(owner.gram3_OAA, mixed_OAP) + _linear(owner.linear3_OA, mixed_OAP) + owner.constant3
    )
    scale3_OP = (variance3_OP.clamp_min(0) + owner.eps).rsqrt()
    y_OAP = mixed_OAP * scale3_OP[:, None]

    increment_sq_OP = (
        _quadratic(owner.gram_OAA, y_OAP)
        + 2 * _linear(owner.atom_fixed_OA, y_OAP)
        + 2 * scale3_OP * _linear(owner.atom_scaled_OA, y_OAP)
        + scale3_OP.square() * (owner.scaled_D @ owner.scaled_D)
        + 2 * scale3_OP * (owner.scaled_D @ owner.fixed_D)
        + owner.fixed_D @ owner.fixed_D
    ).clamp_min(0)
    text_scaled_T, text_fixed_T = text_TD @ owner.scaled_D, text_TD @ owner.fixed_D

    if owner.own is not None:  # the owners are videos: [O, P] is [V, T]
        scaled_VT = _linear(owner.own.scaled_VF, weights_VFT)
        fixed_VT = _linear(owner.own.fixed_VF, weights_VFT)
        text_atoms_VT = (y_OAP * products(owner.atom_OAD, text.text_TD)).sum(dim=1)
        pooled_atoms_VT = (y_OAP * (owner.own.atom_frames_VAF @ weights_VFT)).sum(dim=1)
        result = PairProducts(
            text_sq=text_sq_T,
            pooled_sq=pooled_sq_VT,
            text_pooled=text_pooled_VT,
            increment_sq=increment_sq_OP,
            text_increment=text_atoms_VT + scale3_OP * text_scaled_T + text_fixed_T,
            pooled_increment=pooled_atoms_VT + scale3_OP * scaled_VT + fixed_VT,
        )
    else:  # the owners are texts: [O, P] is [T, V]
        atom_text_TA = (full_precision(owner.atom_OAD) @ text_TD[..., None]).squeeze(-1)
        result = PairProducts(
            text_sq=text_sq_T[:, None],
            pooled_sq=pooled_sq_VT.mT,
            text_pooled=text_pooled_VT.mT,
            increment_sq=increment_sq_OP,
            text_increment=(
                _linear(atom_text_TA, y_OAP) + scale3_OP * text_scaled_T[:, None] + text_fixed_T[:, None]
            ),
            pooled_increment=_pooled_increment_over_words(
                owner, pool, weights_VFT, y_OAP, scale3_OP, interaction
            ),
        )
    return _rescale(result, text, pool, interaction)


def cosine(pairs: PairProducts, interaction: Interaction) -> Tensor:
    """The score from its inner products, in the layout they come in."""
    text_sq, pooled_sq, product = pairs.text_sq, pairs.pooled_sq, pairs.text_pooled
    if interaction.corrected_side == "text":
        text_sq, product = (
            text_sq + 2 * pairs.text_increment + pairs.increment_sq,
            product + pairs.pooled_increment,
        )
    else:
        pooled_sq, product = (
            pooled_sq + 2 * pairs.pooled_increment + pairs.increment_sq,
            product + pairs.text_increment,
        )
    # Floors as in `dense.cosine`; where a shifted vector almost vanishes, its square may come out negative.
    scales = [square.clamp_min(SQUARE_FLOOR).rsqrt() for square in (text_sq, pooled_sq)]
    return (product * scales[0] * scales[1]).clamp(-1, 1)


def _attention(text: TextFeatures, owner: IncrementCard, pool: PoolCard, interaction: Interaction) -> Tensor:
    """Steps 1 and 2: psi's attention weights [O, A, P], each head summing to one."""
    text_TD = full_precision(text.text_TD)
    text_centred_TD = centre(text_TD)
    text_variance_T = text_centred_TD.square().mean(dim=-1)
    if owner.own is not None:
        own_OA, cross_OAP = owner.own.key_mean_VA, products(owner.key_OAD, text.text_TD)
    else:
        own_OA = (full_precision(owner.key_OAD) @ text_TD[..., None]).squeeze(-1)
        cross_OAP = products(full_precision(owner.key_OAD), pool.mean_VD)

    if interaction.query == "text":
        scale_T = (text_variance_T + owner.eps).rsqrt()
        # Over words no video takes part, so one column serves all of them.
        text_OAP = cross_OAP if owner.own is not None else own_OA[..., None].expand_as(cross_OAP)
        logits_OAP = text_OAP * (scale_T if owner.own is not None else scale_T[:, None, None])
    else:
        mean_centred_VD = centre(pool.mean_VD)
        product_VT = mean_centred_VD @ text_centred_TD.mT * (2 / text_TD.shape[-1])
        variance_VT = mean_centred_VD.square().mean(dim=-1)[:, None] + text_variance_T - product_VT
        scale_VT = (variance_VT.clamp_min(0) + owner.eps).rsqrt()
        scale_OP = scale_VT if owner.own is not None else scale_VT.mT
        towards_owner = (interaction.gap_direction == "video_minus_text") == (owner.own is not None)
        difference_OAP = own_OA[..., None] - cross_OAP
        logits_OAP = (difference_OAP if towards_owner else -difference_OAP) * scale_OP[:, None]

    logits_OAP = logits_OAP + owner.key_bias_OA[..., None]
    logits_OHCP = logits_OAP.unflatten(1, (owner.num_heads, -1))
    weights_OHCP: Tensor = logits_OHCP.masked_fill(~owner.mask_OC[:, None, :, None], float("-inf")).softmax(
        dim=2
    )
    return weights_OHCP.flatten(1, 2)


def _pooled_increment_over_words(
    owner: IncrementCard,
    pool: PoolCard,
    weights_VFT: Tensor,
    y_TAV: Tensor,
    scale3_TV: Tensor,
    interaction: Interaction,
) -> Tensor:
    """Delta·pooled when the atoms belong to the texts, [T, V].

    With text-conditioned pooling the pooled video differs with the text, so its products with the text's
    atoms cannot be prepared per video. Forming it for a few texts at a time costs F + W products of length D
    a pair, ten times less than all F × W frame–atom products. Recomputed in backward, so that training keeps
    none of it either.
    """
    if interaction.pooling == "mean":  # the same for every text
        scaled_V, fixed_V = pool.mean_VD @ owner.scaled_D, pool.mean_VD @ owner.fixed_D
        atoms_TAV = products(full_precision(owner.atom_OAD), pool.mean_VD)
        return (y_TAV * atoms_TAV).sum(dim=1) + scale3_TV * scaled_V + fixed_V
    frames_VFD = full_precision(pool.frames_VFD)

    def few_texts(weights_VFN: Tensor, atom_NAD: Tensor, y_NAV: Tensor, scale3_NV: Tensor) -> Tensor:
        pooled_NVD = (weights_VFN.mT @ frames_VFD).transpose(0, 1)
        products_NVA = pooled_NVD @ full_precision(atom_NAD).mT
        scaled_NV, fixed_NV = pooled_NVD @ owner.scaled_D, pooled_NVD @ owner.fixed_D
        return (y_NAV * products_NVA.mT).sum(dim=1) + scale3_NV * scaled_NV + fixed_NV

    size = max(1, min(16, len(y_TAV) // 4))
    pieces = (x.split(size) for x in (owner.atom_OAD, y_TAV, scale3_TV))
    rows = zip(weights_VFT.split(size, dim=-1), *pieces, strict=True)
    if torch.is_grad_enabled():
        return torch.cat(
            [checkpoint(few_texts, *row, use_reentrant=False, preserve_rng_state=False) for row in rows]
        )
    return torch.cat([few_texts(*row) for row in rows])


def _rescale(
    pairs: PairProducts, text: TextFeatures, pool: PoolCard, interaction: Interaction
) -> PairProducts:
    """Give each increment the length the interaction asks for."""
    if not interaction.normalise and interaction.query == "gap":
        return pairs
    increment_sq = torch.as_tensor(pairs.increment_sq)
    if interaction.normalise:
        length = torch.ones_like(increment_sq)
    else:
        unit_TD = F.normalize(full_precision(text.text_TD), dim=-1)
        length_VT = (pool.unit_mean_VD @ unit_TD.mT).exp()
        length = length_VT if interaction.context == "frames" else length_VT.mT
    factor = length * increment_sq.clamp_min(1e-24).rsqrt()
    return replace(
        pairs,
        increment_sq=length.square(),
        text_increment=pairs.text_increment * factor,
        pooled_increment=pairs.pooled_increment * factor,
    )


def _quadratic(gram_OAA: Tensor, x_OAP: Tensor) -> Tensor:
    return (x_OAP * (gram_OAA @ x_OAP)).sum(dim=1)


def _linear(row_OA: Tensor, x_OAP: Tensor) -> Tensor:
    return (row_OA[:, None] @ x_OAP).squeeze(1)
