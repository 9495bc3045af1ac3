"""What follows the matrix products of `gap_aware_factored.py`, fused into one CUDA kernel (Triton).

Plain torch reads or writes a [V, F, T] tensor some forty times; here each product is read once. Inference
only, one head, frame context. `gap_aware_factored.pair_products` is the reference: tests run this kernel in
Triton's interpreter on the CPU against it, and `gare bench scoring` compares the two again on the GPU.

Imports Triton, so `gap_aware.py` imports this file only when it can run. Shapes: T texts, V videos, F frames
(also the number of atoms, since there is one head), D embedding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from gare.interaction.gap_aware_cards import GapAwareCards
from gare.interaction.interaction import SQUARE_FLOOR
from gare.interaction.pair_blocks import centre, full_precision, products

if TYPE_CHECKING:
    from gare.interaction.gap_aware import GapAwareConfig

TEXTS_PER_PROGRAM = 64


def score(text_TD: Tensor, cards: GapAwareCards, config: GapAwareConfig) -> Tensor:
    """Scores [V, T] of one block."""
    pool, owner = cards.pool, cards.increment
    assert owner is not None
    assert owner.own is not None
    num_videos, num_frames = pool.mask_VF.shape
    num_texts, dim = text_TD.shape
    wide_TD = full_precision(text_TD)
    text_centred_TD, mean_centred_VD = centre(wide_TD), centre(pool.mean_VD)
    scaled_D, fixed_D = owner.scaled_D, owner.fixed_D
    scores_VT = torch.empty(num_videos, num_texts, dtype=torch.float32, device=text_TD.device)
    constants_4 = torch.stack([owner.constant3, scaled_D @ scaled_D, scaled_D @ fixed_D, fixed_D @ fixed_D])
    length_is_learned = config.query == "gap" or config.normalise

    _score_kernel[(num_videos, triton.cdiv(num_texts, TEXTS_PER_PROGRAM))](
        # for each frame and text
        products(owner.key_OAD, text_TD),
        products(owner.atom_OAD, text_TD),
        products(pool.frames_VFD, text_TD),
        # for each pair
        mean_centred_VD @ text_centred_TD.mT * (2 / dim),
        scores_VT if length_is_learned else pool.unit_mean_VD @ F.normalize(wide_TD, dim=-1).mT,
        # for each text
        wide_TD.square().sum(dim=-1),
        text_centred_TD.square().mean(dim=-1),
        wide_TD @ scaled_D,
        wide_TD @ fixed_D,
        # for each frame
        pool.mask_VF.contiguous(),
        owner.mask_OC.contiguous(),
        owner.key_bias_OA.contiguous(),
        owner.own.key_mean_VA.contiguous(),
        owner.linear3_OA.contiguous(),
        owner.atom_scaled_OA.contiguous(),
        owner.atom_fixed_OA.contiguous(),
        owner.own.scaled_VF.contiguous(),
        owner.own.fixed_VF.contiguous(),
        # for each pair of frames
        owner.gram2_OAA.contiguous(),
        owner.gram3_OAA.contiguous(),
        owner.gram_OAA.contiguous(),
        owner.own.atom_frames_VAF.contiguous(),
        pool.gram_VFF.contiguous(),
        # for each video, and for all
        mean_centred_VD.square().mean(dim=-1),
        constants_4,
        scores_VT,
        num_texts,
        num_frames,
        owner.eps,
        1 / config.pooling_temperature,
        FRAMES=max(16, triton.next_power_of_2(num_frames)),
        TEXTS=TEXTS_PER_PROGRAM,
        QUERY_IS_TEXT=config.query == "text",
        GAP_SIGN=1.0 if config.gap_direction == "video_minus_text" else -1.0,
        NORMALISE=config.normalise,
        CORRECT_TEXT=config.corrected_side == "text",
        POOL_MEAN=config.pooling == "mean",
        MASK_FRAMES=config.mask_frames,
        SQUARE_FLOOR=SQUARE_FLOOR,
    )
    return scores_VT


@triton.jit
def _quadratic(left, gram, right):
    return tl.sum(left * tl.dot(gram, right, input_precision="ieee"), axis=0)


@triton.jit
def _softmax_over_frames(logits, kept):
    logits = tl.where(kept, logits, float("-inf"))
    weights = tl.exp(logits - tl.max(logits, axis=0)[None, :])
    return weights / tl.sum(weights, axis=0)[None, :]


@triton.jit
def _score_kernel(
    key_text_ptr, atom_text_ptr, frame_text_ptr, gap_product_ptr, mean_cosine_ptr,
    text_sq_ptr, text_variance_ptr, text_scaled_ptr, text_fixed_ptr,
    real_ptr, attended_ptr, key_bias_ptr, key_mean_ptr, linear3_ptr, atom_scaled_ptr, atom_fixed_ptr,
    frame_scaled_ptr, frame_fixed_ptr, gram2_ptr, gram3_ptr, gram_ptr, atom_frames_ptr, frames_gram_ptr,
    mean_variance_ptr, constants_ptr, scores_ptr, num_texts, num_frames, eps, inverse_temperature,
    FRAMES: tl.constexpr, TEXTS: tl.constexpr, QUERY_IS_TEXT: tl.constexpr, GAP_SIGN: tl.constexpr,
    NORMALISE: tl.constexpr, CORRECT_TEXT: tl.constexpr, POOL_MEAN: tl.constexpr, MASK_FRAMES: tl.constexpr,
    SQUARE_FLOOR: tl.constexpr,
):  # fmt: skip
    """One video against TEXTS texts; tiles are [FRAMES, TEXTS], padded frames and texts masked on load."""
    v = tl.program_id(0).to(tl.int64)
    f = tl.arange(0, FRAMES)
    t = tl.program_id(1) * TEXTS + tl.arange(0, TEXTS)
    in_f, in_t = f < num_frames, t < num_texts

    tile = (v * num_frames + f)[:, None] * num_texts + t[None, :]
    in_tile = in_f[:, None] & in_t[None, :]
    key_text = tl.load(key_text_ptr + tile, mask=in_tile, other=0.0)
    atom_text = tl.load(atom_text_ptr + tile, mask=in_tile, other=0.0)
    frame_text = tl.load(frame_text_ptr + tile, mask=in_tile, other=0.0)

    row = v * num_frames + f
    real = tl.load(real_ptr + row, mask=in_f, other=0) != 0
    attended = tl.load(attended_ptr + row, mask=in_f, other=0) != 0
    key_bias = tl.load(key_bias_ptr + row, mask=in_f, other=0.0)
    key_mean = tl.load(key_mean_ptr + row, mask=in_f, other=0.0)
    linear3 = tl.load(linear3_ptr + row, mask=in_f, other=0.0)
    atom_scaled = tl.load(atom_scaled_ptr + row, mask=in_f, other=0.0)
    atom_fixed = tl.load(atom_fixed_ptr + row, mask=in_f, other=0.0)
    frame_scaled = tl.load(frame_scaled_ptr + row, mask=in_f, other=0.0)
    frame_fixed = tl.load(frame_fixed_ptr + row, mask=in_f, other=0.0)

    cell = (v * num_frames + f)[:, None] * num_frames + f[None, :]
    in_cell = in_f[:, None] & in_f[None, :]
    gram2 = tl.load(gram2_ptr + cell, mask=in_cell, other=0.0)
    gram3 = tl.load(gram3_ptr + cell, mask=in_cell, other=0.0)
    gram = tl.load(gram_ptr + cell, mask=in_cell, other=0.0)
    atom_frames = tl.load(atom_frames_ptr + cell, mask=in_cell, other=0.0)
    frames_gram = tl.load(frames_gram_ptr + cell, mask=in_cell, other=0.0)

    text_sq = tl.load(text_sq_ptr + t, mask=in_t, other=1.0)
    text_variance = tl.load(text_variance_ptr + t, mask=in_t, other=1.0)
    text_scaled = tl.load(text_scaled_ptr + t, mask=in_t, other=0.0)
    text_fixed = tl.load(text_fixed_ptr + t, mask=in_t, other=0.0)
    constant3 = tl.load(constants_ptr)
    scaled_sq = tl.load(constants_ptr + 1)
    scaled_fixed = tl.load(constants_ptr + 2)
    fixed_sq = tl.load(constants_ptr + 3)
    pair = v * num_texts + t

    # Pooling.
    if POOL_MEAN:
        counted = (real if MASK_FRAMES else in_f).to(tl.float32)
        pool = (counted / tl.sum(counted, axis=0))[:, None] + tl.zeros([FRAMES, TEXTS], tl.float32)
    elif MASK_FRAMES:
        pool = _softmax_over_frames(frame_text * inverse_temperature, real[:, None])
    else:
        pool = tl.where(
            real[:, None], _softmax_over_frames(frame_text * inverse_temperature, in_f[:, None]), 0.0
        )
    text_pooled = tl.sum(pool * frame_text, axis=0)
    pooled_sq = _quadratic(pool, frames_gram, pool)

    # Steps 1 and 2: the attention of the increment net.
    if QUERY_IS_TEXT:
        logits = key_text * tl.rsqrt(text_variance + eps)[None, :]
    else:
        product = tl.load(gap_product_ptr + pair, mask=in_t, other=0.0)
        variance = tl.maximum(tl.load(mean_variance_ptr + v) + text_variance - product, 0.0)
        logits = GAP_SIGN * (key_mean[:, None] - key_text) * tl.rsqrt(variance + eps)[None, :]
    attention = _softmax_over_frames(logits + key_bias[:, None], attended[:, None])

    # Steps 3 to 5: LN2, LN3 and the coefficients of the atoms.
    mixed = attention * tl.rsqrt(_quadratic(attention, gram2, attention) + eps)[None, :]
    variance3 = _quadratic(mixed, gram3, mixed) + tl.sum(linear3[:, None] * mixed, axis=0) + constant3
    scale3 = tl.rsqrt(tl.maximum(variance3, 0.0) + eps)
    y = mixed * scale3[None, :]

    # Step 6: inner products, then the length the interaction asks for, then the cosine.
    increment_sq = (
        _quadratic(y, gram, y)
        + 2 * tl.sum((atom_fixed[:, None] + scale3[None, :] * atom_scaled[:, None]) * y, axis=0)
        + scale3 * scale3 * scaled_sq
        + 2 * scale3 * scaled_fixed
        + fixed_sq
    )
    text_increment = tl.sum(y * atom_text, axis=0) + scale3 * text_scaled + text_fixed
    pooled_increment = _quadratic(y, atom_frames, pool) + tl.sum(
        (frame_fixed[:, None] + scale3[None, :] * frame_scaled[:, None]) * pool, axis=0
    )
    if NORMALISE or QUERY_IS_TEXT:
        length = tl.full([TEXTS], 1.0, tl.float32)
        if not NORMALISE:
            length = tl.exp(tl.load(mean_cosine_ptr + pair, mask=in_t, other=0.0))
        factor = length * tl.rsqrt(tl.maximum(increment_sq, 1e-24))
        text_increment *= factor
        pooled_increment *= factor
        increment_sq = length * length
    product = text_pooled
    if CORRECT_TEXT:
        text_sq += 2 * text_increment + increment_sq
        product += pooled_increment
    else:
        pooled_sq += 2 * pooled_increment + increment_sq
        product += text_increment
    scale = tl.rsqrt(tl.maximum(text_sq, SQUARE_FLOOR)) * tl.rsqrt(tl.maximum(pooled_sq, SQUARE_FLOOR))
    tl.store(scores_ptr + pair, tl.minimum(tl.maximum(product * scale, -1.0), 1.0), mask=in_t)
