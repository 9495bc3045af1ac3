"""The scores of `gap_aware.py` without ever forming an increment.

Everything in the increment net after its attention weights is linear or a LayerNorm, and a LayerNorm only
needs a mean and a norm. So each increment is a known combination of a few vectors (*atoms*, one per head and
context token), and a score is a function of dot products with those. `docs/method.md` derives the formulas;
the step numbers below are its own.

Shapes: T texts, V videos, F frames, W words, D embedding, H heads. The net's context tokens C belong to one
side, the *owner* O: the videos when it attends over frames, the texts when over words. P is the other side,
and A = H × C counts the atoms. Pairs lie as [O, A, P]: one matrix product writes that layout, and the small
quadratic forms are batched over O.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gare.interaction.gap_aware_cards import GapAwareCards, IncrementCard, increment_card
from gare.interaction.increment_net import IncrementWeights
from gare.interaction.interaction import SQUARE_FLOOR
from gare.interaction.pair_blocks import block_budget, centre, each_block, full_precision, products
from gare.interaction.pooled_cosine import MAX_TEXTS_PER_BLOCK, PoolCard, PooledCosine
from gare.interaction.score_cards import ScoreCards, features_of, owners_per_block
from gare.types import TextFeatures, VideoFeatures, block_slices

FEW_VIDEOS_PER_BLOCK = 512


@dataclass(frozen=True)
class PairRule:
    """How the increment of a pair is made and used: each field is one ablation axis of the paper."""

    corrected_side: Literal["text", "video"] = "text"
    query: Literal["gap", "text"] = "gap"
    gap_direction: Literal["video_minus_text", "text_minus_video"] = "video_minus_text"
    normalise: bool = False


@dataclass(frozen=True)
class BlockProducts:
    """The inner products the scores of a block are made of, each [O, P] or broadcastable to it."""

    text_sq: Tensor
    pooled_sq: Tensor
    text_pooled: Tensor
    increment_sq: Tensor
    text_increment: Tensor
    pooled_increment: Tensor


def is_few(text: TextFeatures, video: VideoFeatures) -> bool:
    """Whether scoring pairs one by one is cheaper: a pair costs as much as the card of one frame."""
    return len(text) < video.frames_VFD.shape[1]


def in_full_precision(text: TextFeatures, video: VideoFeatures) -> tuple[TextFeatures, VideoFeatures]:
    """Both sides in float32 at least."""
    dtype = full_precision(text.text_TD[:0]).dtype
    return text.to(dtype), video.to(dtype)


def word_card(text: TextFeatures, net: IncrementWeights) -> IncrementCard:
    """The net folded into the words of each text."""
    return increment_card(text.words_TWD, text.mask_TW, net)


def frame_attention(text: TextFeatures, cards: GapAwareCards, rule: PairRule) -> Tensor:
    """The weights of the frames inside the net, [T, V, H, F]."""
    assert cards.increment is not None
    attention_VAT = _attention(text, cards.increment, cards.pool, rule)
    attention_VHFT: Tensor = attention_VAT.unflatten(1, (cards.increment.num_heads, -1))
    return attention_VHFT.permute(3, 0, 1, 2)


# --- blocks of pairs ----------------------------------------------------------------------------------------


def map_video_blocks(
    function: Callable[[TextFeatures, GapAwareCards], Tensor],
    text: TextFeatures,
    video: VideoFeatures | ScoreCards,
    make_cards: Callable[[VideoFeatures], GapAwareCards],
    num_heads: int,
    text_block: int | None,
    video_block: int | None,
) -> Tensor:
    """`function` of every block of pairs [V, T], as [T, V]. Videos own the cards and are the outer loop."""
    mask_VF = features_of(video).mask_VF
    num_atoms, budget = mask_VF.shape[1] * num_heads, block_budget(mask_VF.device)
    text_block = text_block or min(len(text), MAX_TEXTS_PER_BLOCK, max(1, budget // num_atoms))
    if video_block is None:
        video_block = max(1, budget // (num_atoms * text_block))
        if not isinstance(video, ScoreCards):
            video_block = min(video_block, owners_per_block(num_atoms, text.dim, mask_VF.device))
    text_blocks = list(text.blocks(text_block))

    def column_of_blocks(rows: slice) -> Tensor:
        videos = video[rows]
        cards = videos if isinstance(videos, GapAwareCards) else make_cards(features_of(videos))
        return torch.cat([function(texts, cards) for texts in text_blocks], dim=1)

    return torch.cat(each_block(column_of_blocks, list(block_slices(len(video), video_block)))).mT


def map_text_blocks(
    function: Callable[[TextFeatures, IncrementCard, PoolCard], Tensor],
    text: TextFeatures,
    video: VideoFeatures | ScoreCards,
    net: IncrementWeights,
    pooling: PooledCosine,
    text_block: int | None,
    video_block: int | None,
) -> Tensor:
    """The same [T, V] when the net attends over words: texts own the cards and are the outer loop."""
    mask_VF = features_of(video).mask_VF
    num_atoms = max(text.words_TWD.shape[1], mask_VF.shape[1]) * net.num_heads
    budget = block_budget(mask_VF.device)
    num_owners = owners_per_block(num_atoms, text.dim, mask_VF.device)
    text_block = text_block or min(len(text), MAX_TEXTS_PER_BLOCK, max(1, budget // num_atoms), num_owners)
    columns = list(block_slices(len(video), video_block or max(1, budget // (num_atoms * text_block))))

    def row_of_blocks(texts: TextFeatures) -> Tensor:
        owner = word_card(texts, net)
        videos = (video[rows] for rows in columns)
        pools = (
            v.pool if isinstance(v, GapAwareCards) else pooling.pool_card(features_of(v)) for v in videos
        )
        return torch.cat([function(texts, owner, pool) for pool in pools], dim=1)

    return torch.cat(each_block(row_of_blocks, list(text.blocks(text_block))))


# --- one block ----------------------------------------------------------------------------------------------


def pair_products(
    text: TextFeatures, owner: IncrementCard, pool: PoolCard, pooling: PooledCosine, rule: PairRule
) -> BlockProducts:
    """Steps 1–6: every inner product between text, pooled video and increment, without any of T × V × D."""
    text_TD = full_precision(text.text_TD)
    pooled_sq_VT, text_pooled_VT, weights_VFT = pooling.pool_products(text.text_TD, pool)
    text_sq_T = text_TD.square().sum(dim=-1)

    attention_OAP = _attention(text, owner, pool, rule)
    # In place, here and below: new memory of this size costs more than what is computed in it.
    grams_O3AP = (owner.grams_OKA @ attention_OAP).unflatten(1, (3, -1)).mul_(attention_OAP[:, None])
    square2_OP, square3_OP, square_OP = grams_O3AP.sum(dim=2).unbind(dim=1)
    linear3_OP, atom_scaled_OP, atom_fixed_OP = (owner.linear_OKA @ attention_OAP).unbind(dim=1)
    # LN2 and LN3 divide by these (steps 3 and 4), so that y_a = share · attention_a.
    scale2_OP = (square2_OP + owner.eps).rsqrt()
    variance3_OP = scale2_OP.square() * square3_OP + scale2_OP * linear3_OP + owner.constant3
    scale3_OP = (variance3_OP.clamp_min(0) + owner.eps).rsqrt()
    share_OP = scale2_OP * scale3_OP

    increment_sq_OP = (
        share_OP * (share_OP * square_OP + 2 * (atom_fixed_OP + scale3_OP * atom_scaled_OP))
        + scale3_OP.square() * (owner.scaled_D @ owner.scaled_D)
        + 2 * scale3_OP * (owner.scaled_D @ owner.fixed_D)
        + owner.fixed_D @ owner.fixed_D
    ).clamp_min(0)
    text_scaled_T, text_fixed_T = text_TD @ owner.scaled_D, text_TD @ owner.fixed_D

    if owner.own is not None:  # the owners are videos: [O, P] is [V, T]
        text_atoms_VT = products(owner.atom_OAD, text.text_TD).mul_(attention_OAP).sum(dim=1)
        if pooling.same_for_every_text:
            weights_VFT = weights_VFT[..., :1]  # one column serves all texts
            pooled_atoms_VT = ((owner.own.atom_frames_VAF @ weights_VFT).mT @ attention_OAP).squeeze(1)
        else:
            pooled_atoms_VT = (owner.own.atom_frames_VAF @ weights_VFT).mul_(attention_OAP).sum(dim=1)
        scaled_VT, fixed_VT = (owner.own.linear_VKF @ weights_VFT).unbind(dim=1)
        result = BlockProducts(
            text_sq=text_sq_T,
            pooled_sq=pooled_sq_VT,
            text_pooled=text_pooled_VT,
            increment_sq=increment_sq_OP,
            text_increment=share_OP * text_atoms_VT + scale3_OP * text_scaled_T + text_fixed_T,
            pooled_increment=share_OP * pooled_atoms_VT + scale3_OP * scaled_VT + fixed_VT,
        )
    else:  # the owners are texts: [O, P] is [T, V]
        atom_text_TA = (full_precision(owner.atom_OAD) @ text_TD[..., None]).squeeze(-1)
        result = BlockProducts(
            text_sq=text_sq_T[:, None],
            pooled_sq=pooled_sq_VT.mT,
            text_pooled=text_pooled_VT.mT,
            increment_sq=increment_sq_OP,
            text_increment=(
                share_OP * (atom_text_TA[:, None] @ attention_OAP).squeeze(1)
                + scale3_OP * text_scaled_T[:, None]
                + text_fixed_T[:, None]
            ),
            pooled_increment=_pooled_increment_over_words(
                owner, pool, pooling, weights_VFT, attention_OAP * share_OP[:, None], scale3_OP
            ),
        )
    return _rescale(result, text, pool, rule, owners_are_texts=owner.own is None)


def cosine_of_products(pairs: BlockProducts, corrected_side: str) -> Tensor:
    """The score from its inner products, in the layout they come in."""
    text_sq, pooled_sq, product = pairs.text_sq, pairs.pooled_sq, pairs.text_pooled
    if corrected_side == "text":
        text_sq, product = (
            text_sq + 2 * pairs.text_increment + pairs.increment_sq,
            product + pairs.pooled_increment,
        )
    else:
        pooled_sq, product = (
            pooled_sq + 2 * pairs.pooled_increment + pairs.increment_sq,
            product + pairs.text_increment,
        )
    # Floors as in `interaction.cosine`; the square of a shifted vector that almost vanishes may be negative.
    scales = [square.clamp_min(SQUARE_FLOOR).rsqrt() for square in (text_sq, pooled_sq)]
    return (product * scales[0] * scales[1]).clamp(-1, 1)


def _attention(text: TextFeatures, owner: IncrementCard, pool: PoolCard, rule: PairRule) -> Tensor:
    """Steps 1 and 2: the net's attention weights [O, A, P], each head summing to one."""
    text_TD = full_precision(text.text_TD)
    text_centred_TD = centre(text_TD)
    text_variance_T = text_centred_TD.square().mean(dim=-1)
    if owner.own is not None:
        own_OA, cross_OAP = owner.own.key_mean_VA, products(owner.key_OAD, text.text_TD)
    else:
        own_OA = (full_precision(owner.key_OAD) @ text_TD[..., None]).squeeze(-1)
        cross_OAP = products(full_precision(owner.key_OAD), pool.mean_VD)

    if rule.query == "text":
        scale_T = (text_variance_T + owner.eps).rsqrt()
        # Over words no video takes part, so one column serves all of them.
        query_OAP = cross_OAP if owner.own is not None else own_OA[..., None].expand_as(cross_OAP)
        scale_OP = scale_T if owner.own is not None else scale_T[:, None]
    else:
        mean_centred_VD = centre(pool.mean_VD)
        product_VT = mean_centred_VD @ text_centred_TD.mT * (2 / text_TD.shape[-1])
        variance_VT = mean_centred_VD.square().mean(dim=-1)[:, None] + text_variance_T - product_VT
        scale_VT = (variance_VT.clamp_min(0) + owner.eps).rsqrt()
        towards_owner = (rule.gap_direction == "video_minus_text") == (owner.own is not None)
        query_OAP = own_OA[..., None] - cross_OAP
        scale_OP = (scale_VT if owner.own is not None else scale_VT.mT) * (1 if towards_owner else -1)

    attended_OA = owner.mask_OC.repeat(1, owner.num_heads)
    bias_OA = owner.key_bias_OA.masked_fill(~attended_OA, float("-inf"))
    logits_OAP = torch.addcmul(bias_OA[..., None], query_OAP, scale_OP.unsqueeze(-2))
    weights_OHCP: Tensor = logits_OAP.unflatten(1, (owner.num_heads, -1)).softmax(dim=2)
    return weights_OHCP.flatten(1, 2)


def _pooled_increment_over_words(
    owner: IncrementCard,
    pool: PoolCard,
    pooling: PooledCosine,
    weights_VFT: Tensor,
    y_TAV: Tensor,
    scale3_TV: Tensor,
) -> Tensor:
    """Delta·pooled when the atoms belong to the texts, [T, V].

    With text-conditioned pooling the pooled video differs with the text, so its products with the text's
    atoms cannot be prepared per video. Forming it for a few texts at a time costs F + W products of length D
    a pair, ten times less than all F × W frame–atom products. Recomputed in backward, so that training keeps
    none of it either.
    """
    if pooling.same_for_every_text:
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
    pairs: BlockProducts, text: TextFeatures, pool: PoolCard, rule: PairRule, *, owners_are_texts: bool
) -> BlockProducts:
    """Scale each increment to the length that the rule sets."""
    if not rule.normalise and rule.query == "gap":
        return pairs
    increment_sq = pairs.increment_sq
    if rule.normalise:
        length = torch.ones_like(increment_sq)
    else:
        unit_TD = F.normalize(full_precision(text.text_TD), dim=-1)
        length_VT = (pool.unit_mean_VD @ unit_TD.mT).exp()
        length = length_VT.mT if owners_are_texts else length_VT
    factor = length * increment_sq.clamp_min(1e-24).rsqrt()
    return replace(
        pairs,
        increment_sq=length.square(),
        text_increment=pairs.text_increment * factor,
        pooled_increment=pairs.pooled_increment * factor,
    )
