"""The scores of `gap_aware_factored.py` in one CUDA kernel (Triton): products and all that follows them.

A program multiplies a few texts with the keys, atoms and frames of a few videos, tile by tile over D, and
turns the products into scores while they are in registers. Nothing of T × V × F reaches memory: cards are
read, scores are written. With few texts a program has fewer rows, and takes as long as reading its cards.

Inference only, frame context. `gap_aware_factored.pair_products` is the reference: tests run this kernel in
Triton's interpreter on the CPU against it, and `gare bench scoring` compares the two again on the GPU.

Imports Triton, so `gap_aware.py` imports this file only when it can run. Shapes: T texts, V videos, F frames,
H heads, A = H × F atoms, D embedding. In the kernel frames are padded to a power of two.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gare.interaction.fused_cards import FEW_TEXTS, fuse
from gare.interaction.gap_aware_cards import GapAwareCards
from gare.interaction.interaction import SQUARE_FLOOR
from gare.interaction.kernel_calls_cuda import launch

if TYPE_CHECKING:
    from gare.interaction.gap_aware import GapAwareConfig


_MANY_PAIRS = 2**22


def score(text_TD: Tensor, cards: GapAwareCards, config: GapAwareConfig) -> Tensor:
    """Scores [T, V]."""
    owner, pool = cards.increment, cards.pool
    assert owner is not None
    fused = fuse(cards) if cards.fused is None else cards.fused
    num_videos, num_frames = pool.mask_VF.shape
    num_texts, dim = text_TD.shape
    text_TD = text_TD.to(owner.key_OAD.dtype).contiguous()
    is_few = num_texts <= FEW_TEXTS
    text_T4 = fused.constants_K  # not read
    if not is_few:
        text_T4 = torch.empty(num_texts, 4, dtype=torch.float32, device=text_TD.device)
        sizes = {"DIM": dim, "TEXTS": FEW_TEXTS, "STEP": _step_of(dim, 128)}
        own = (text_TD, fused.shared_2D, text_T4)
        launch(_text_kernel, lambda _: triton.cdiv(num_texts, FEW_TEXTS), own, (num_texts,), sizes)
    scores_TV = torch.empty(num_texts, num_videos, dtype=torch.float32, device=text_TD.device)
    tensors = (
        text_TD,
        text_T4,
        fused.shared_2D,
        owner.key_OAD.contiguous(),
        owner.atom_OAD.contiguous(),
        pool.frames_VFD.contiguous(),
        fused.rows_VR.contiguous(),
        fused.forms_VG.contiguous(),
        fused.constants_K,
        scores_TV,
    )
    size = int(num_texts * num_videos > _MANY_PAIRS)  # the fastest shape is another one then
    numbers = (num_texts, num_videos, num_frames, size, owner.eps, 1 / config.pooling_temperature)
    is_half = text_TD.dtype in (torch.float16, torch.bfloat16)
    constants: dict[str, Any] = {
        "DIM": dim,
        "FRAMES": fused.num_frames,
        "HEADS": owner.num_heads,
        "FEW": is_few,
        "PRECISION": "tf32" if is_half else "tf32x3",
        "QUERY_IS_TEXT": config.query == "text",
        "GAP_SIGN": 1.0 if config.gap_direction == "video_minus_text" else -1.0,
        "NORMALISE": config.normalise,
        "CORRECT_TEXT": config.corrected_side == "text",
        "POOL_MEAN": config.pooling == "mean",
        "MASK_FRAMES": config.mask_frames,
        "SQUARE_FLOOR": SQUARE_FLOOR,
    }

    def num_programs(meta: dict[str, Any]) -> int:
        videos = max(1, meta["COLUMNS"] // fused.num_atoms)
        return int(triton.cdiv(num_videos, videos) * triton.cdiv(num_texts, meta["TEXTS"]))

    launch(_score_kernel, num_programs, tensors, numbers, constants, kind=(size,))
    return scores_TV


def _step_of(dim: int, most: int) -> int:
    return max(16, min(most, 1 << (dim - 1).bit_length()))


# --- which shapes are tried ---------------------------------------------------------------------------------


MANY = [
    (128, 32, 64, 4, 3),
    (128, 64, 64, 8, 3),
    (128, 64, 32, 8, 4),
    (256, 32, 64, 8, 3),
    (64, 32, 64, 4, 3),
    (128, 32, 128, 4, 2),
]
FEW = [(16, 64, 128, 4, 3), (16, 64, 64, 4, 4), (16, 64, 128, 8, 3), (16, 32, 64, 2, 4)]
"""Shapes for many texts, and for few: rows of texts, columns of keys (as many of atoms and of frames),
numbers of D at a time, warps, stages."""


def configs(shapes: list[tuple[int, int, int, int, int]]) -> list[triton.Config]:
    """Shapes that are timed once for each kind of card; the fastest is remembered on this machine."""
    if os.environ.get("TRITON_INTERPRET") == "1":  # nothing to time
        return [triton.Config({"TEXTS": 64, "COLUMNS": 32, "STEP": 32})]
    return [
        triton.Config({"TEXTS": texts, "COLUMNS": columns, "STEP": step}, num_warps=warps, num_stages=stages)
        for texts, columns, step, warps, stages in shapes
    ]


def _fitting(configs: list[triton.Config], named_args: dict[str, object], **meta: int) -> list[triton.Config]:
    """Those for as many texts, whose tile holds the atoms of a video."""
    atoms = meta["FRAMES"] * meta["HEADS"]
    fitting = [
        config
        for config in configs
        if (config.kwargs["TEXTS"] == FEW_TEXTS) == meta["FEW"]
        and config.kwargs["COLUMNS"] >= min(atoms, 128)
    ]
    return fitting or configs[:1]


# --- the kernels --------------------------------------------------------------------------------------------


@triton.jit
def _text_numbers(
    text_ptr, shared_ptr, t, in_t, DIM: tl.constexpr, TEXTS: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """What a text brings into every pair: |t|², the mean of its numbers, products with two fixed vectors."""
    square = tl.zeros([TEXTS, STEP], tl.float32)
    level = tl.zeros([TEXTS, STEP], tl.float32)
    scaled = tl.zeros([TEXTS, STEP], tl.float32)
    fixed = tl.zeros([TEXTS, STEP], tl.float32)
    for first in range(0, DIM, STEP):
        d = first + tl.arange(0, STEP)
        in_d = d < DIM
        cell = t.to(tl.int64)[:, None] * DIM + d[None, :]
        text = tl.load(text_ptr + cell, mask=in_t[:, None] & in_d[None, :], other=0.0).to(tl.float32)
        square += text * text
        level += text
        scaled += text * tl.load(shared_ptr + d, mask=in_d, other=0.0)[None, :]
        fixed += text * tl.load(shared_ptr + DIM + d, mask=in_d, other=0.0)[None, :]
    return tl.sum(square, axis=1), tl.sum(level, axis=1) / DIM, tl.sum(scaled, axis=1), tl.sum(fixed, axis=1)


@triton.jit
def _text_kernel(
    text_ptr, shared_ptr, numbers_ptr, num_texts, DIM: tl.constexpr, TEXTS: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """The numbers of many texts, which programs of `_score_kernel` share."""
    t = tl.program_id(0) * TEXTS + tl.arange(0, TEXTS)
    in_t = t < num_texts
    square, level, scaled, fixed = _text_numbers(text_ptr, shared_ptr, t, in_t, DIM, TEXTS, STEP)
    tl.store(numbers_ptr + 4 * t, square, mask=in_t)
    tl.store(numbers_ptr + 4 * t + 1, level, mask=in_t)
    tl.store(numbers_ptr + 4 * t + 2, scaled, mask=in_t)
    tl.store(numbers_ptr + 4 * t + 3, fixed, mask=in_t)


@triton.jit
def _row(ptr, is_in, VIDEOS: tl.constexpr, WIDTH: tl.constexpr):
    """A number for each atom, or each frame, of each video."""
    return tl.reshape(tl.load(ptr, mask=is_in, other=0.0), (1, VIDEOS, WIDTH))


@triton.jit
def _times(
    weights, ptr, video, is_in, form_size, TEXTS: tl.constexpr, VIDEOS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """weights · matrix for each pair; a video's matrix is [ROWS, COLUMNS].

    The matrices of all videos stand on the diagonal of a larger one, whose product tensor cores take at once.
    """
    row, column = tl.arange(0, VIDEOS * ROWS), tl.arange(0, VIDEOS * COLUMNS)
    cell = (
        video.to(tl.int64)[None, :] * form_size
        + (row % ROWS)[:, None] * COLUMNS
        + (column % COLUMNS)[None, :]
    )
    is_own = (row // ROWS)[:, None] == (column // COLUMNS)[None, :]
    matrix = tl.load(ptr + cell, mask=is_own & is_in[None, :], other=0.0)
    flat = tl.reshape(weights, (TEXTS, VIDEOS * ROWS)).to(matrix.dtype)
    return tl.reshape(tl.dot(flat, matrix, input_precision=PRECISION), (TEXTS, VIDEOS, COLUMNS))


@triton.autotune(
    configs(MANY + FEW),
    key=["DIM", "FRAMES", "HEADS", "FEW", "size", "PRECISION"],
    prune_configs_by={"early_config_prune": _fitting},
    cache_results=True,
)
@triton.jit(do_not_specialize=["size"])
def _score_kernel(
    text_ptr, text_numbers_ptr, shared_ptr, key_ptr, atom_ptr, frame_ptr, rows_ptr, forms_ptr, constants_ptr,
    scores_ptr, num_texts, num_videos, num_frames, size, eps, inverse_temperature,
    DIM: tl.constexpr, FRAMES: tl.constexpr, HEADS: tl.constexpr, FEW: tl.constexpr, PRECISION: tl.constexpr,
    QUERY_IS_TEXT: tl.constexpr, GAP_SIGN: tl.constexpr, NORMALISE: tl.constexpr, CORRECT_TEXT: tl.constexpr,
    POOL_MEAN: tl.constexpr, MASK_FRAMES: tl.constexpr, SQUARE_FLOOR: tl.constexpr,
    TEXTS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """TEXTS texts against VIDEOS videos. Texts are rows; the atoms of a video, or its frames, are columns."""
    ATOMS: tl.constexpr = HEADS * FRAMES
    VIDEOS: tl.constexpr = COLUMNS // ATOMS if COLUMNS > ATOMS else 1
    A: tl.constexpr = VIDEOS * ATOMS
    F: tl.constexpr = VIDEOS * FRAMES
    # Programs that share videos run together, so that cards come from memory once.
    num_blocks = tl.cdiv(num_texts, TEXTS)
    t = (tl.program_id(0) % num_blocks) * TEXTS + tl.arange(0, TEXTS)
    first_v = (tl.program_id(0) // num_blocks) * VIDEOS
    v = first_v + tl.arange(0, VIDEOS)
    in_t, in_v = t < num_texts, v < num_videos

    a, f = tl.arange(0, A), tl.arange(0, F)
    a_video, f_video = first_v + a // ATOMS, first_v + f // FRAMES
    in_a, in_f = a_video < num_videos, f_video < num_videos
    atom_row = (a_video.to(tl.int64) * HEADS + a % ATOMS // FRAMES) * num_frames + a % FRAMES
    frame_row = f_video.to(tl.int64) * num_frames + f % FRAMES
    real_a, real_f = in_a & (a % FRAMES < num_frames), in_f & (f % FRAMES < num_frames)

    # The products.
    key_text = tl.zeros([TEXTS, A], tl.float32)
    atom_text = tl.zeros([TEXTS, A], tl.float32)
    frame_text = tl.zeros([TEXTS, F], tl.float32)
    text_row = t.to(tl.int64)[:, None] * DIM
    for first in range(0, DIM, STEP):
        d = first + tl.arange(0, STEP)
        if DIM % STEP == 0:
            text = tl.load(text_ptr + text_row + d[None, :], mask=in_t[:, None], other=0.0)
            key = tl.load(key_ptr + atom_row[None, :] * DIM + d[:, None], mask=real_a[None, :], other=0.0)
            atom = tl.load(atom_ptr + atom_row[None, :] * DIM + d[:, None], mask=real_a[None, :], other=0.0)
            frame = tl.load(
                frame_ptr + frame_row[None, :] * DIM + d[:, None], mask=real_f[None, :], other=0.0
            )
        else:
            in_d = d < DIM
            text = tl.load(text_ptr + text_row + d[None, :], mask=in_t[:, None] & in_d[None, :], other=0.0)
            some_a, some_f = real_a[None, :] & in_d[:, None], real_f[None, :] & in_d[:, None]
            key = tl.load(key_ptr + atom_row[None, :] * DIM + d[:, None], mask=some_a, other=0.0)
            atom = tl.load(atom_ptr + atom_row[None, :] * DIM + d[:, None], mask=some_a, other=0.0)
            frame = tl.load(frame_ptr + frame_row[None, :] * DIM + d[:, None], mask=some_f, other=0.0)
        key_text = tl.dot(text, key, key_text, input_precision=PRECISION)
        atom_text = tl.dot(text, atom, atom_text, input_precision=PRECISION)
        frame_text = tl.dot(text, frame, frame_text, input_precision=PRECISION)

    # Rows of each video: five over its atoms, six over its frames, then single numbers (`fused_cards.fuse`).
    # Each is read where it is used, for registers are what this kernel is short of.
    row_size = 5 * ATOMS + 6 * FRAMES + 8
    a_row = rows_ptr + a_video.to(tl.int64) * row_size + a % ATOMS
    f_row = rows_ptr + f_video.to(tl.int64) * row_size + 5 * ATOMS + f % FRAMES
    number = rows_ptr + v.to(tl.int64) * row_size + 5 * ATOMS + 6 * FRAMES
    SQUARE: tl.constexpr = ATOMS * ATOMS
    form_size = 3 * SQUARE + ATOMS * FRAMES + FRAMES * FRAMES
    if FEW:  # computed here, for another kernel takes longer to start
        text_sq, level, text_scaled, text_fixed = _text_numbers(
            text_ptr, shared_ptr, t, in_t, DIM, TEXTS, STEP
        )
    else:
        text_sq = tl.load(text_numbers_ptr + 4 * t, mask=in_t, other=1.0)
        level = tl.load(text_numbers_ptr + 4 * t + 1, mask=in_t, other=0.0)
        text_scaled = tl.load(text_numbers_ptr + 4 * t + 2, mask=in_t, other=0.0)
        text_fixed = tl.load(text_numbers_ptr + 4 * t + 3, mask=in_t, other=0.0)
    text_sq, level = text_sq[:, None], level[:, None]
    text_variance = tl.maximum(text_sq / DIM - level * level, 0.0)

    # What frames say of the pair without pooling.
    frame_text = tl.reshape(frame_text, (TEXTS, VIDEOS, FRAMES))
    mean_weight = _row(f_row + FRAMES, in_f, VIDEOS, FRAMES)
    text_mean = tl.sum(mean_weight * frame_text, axis=2)
    mean_cosine = text_mean
    if QUERY_IS_TEXT and not NORMALISE:
        unit_weight = _row(f_row + 5 * FRAMES, in_f, VIDEOS, FRAMES)
        mean_cosine = tl.sum(unit_weight * frame_text, axis=2) * tl.rsqrt(tl.maximum(text_sq, 1e-24))

    # Steps 1 and 2: the attention of the increment net.
    key_text = tl.reshape(key_text, (TEXTS, VIDEOS, ATOMS))
    if QUERY_IS_TEXT:
        logits = key_text * tl.rsqrt(text_variance + eps)[:, :, None]
    else:
        mean_variance = tl.load(number, mask=in_v, other=1.0)[None, :]
        mean_level = tl.load(number + 1, mask=in_v, other=0.0)[None, :]
        variance = mean_variance + text_variance - 2 * (text_mean / DIM - level * mean_level)
        scale1 = GAP_SIGN * tl.rsqrt(tl.maximum(variance, 0.0) + eps)
        logits = (_row(a_row + ATOMS, in_a, VIDEOS, ATOMS) - key_text) * scale1[:, :, None]
    logits = tl.reshape(logits + _row(a_row, in_a, VIDEOS, ATOMS), (TEXTS, VIDEOS * HEADS, FRAMES))
    attention = tl.exp(logits - tl.max(logits, axis=2, keep_dims=True))
    attention = attention * (1 / tl.sum(attention, axis=2, keep_dims=True))
    attention = tl.reshape(attention, (TEXTS, VIDEOS, ATOMS))
    text_atoms = tl.sum(attention * tl.reshape(atom_text, (TEXTS, VIDEOS, ATOMS)), axis=2)

    # Steps 3 to 5: LN2, LN3 and what they scale the atoms by. A linear part is summed with its form.
    constant3 = tl.load(constants_ptr)
    scaled_sq = tl.load(constants_ptr + 1)
    scaled_fixed = tl.load(constants_ptr + 2)
    fixed_sq = tl.load(constants_ptr + 3)
    times = _times(
        attention, forms_ptr, a_video, in_a, form_size, TEXTS, VIDEOS, ATOMS, ATOMS, PRECISION
    )  # fmt: skip
    square2 = tl.sum(times * attention, axis=2) * tl.load(number + 2, mask=in_v, other=0.0)[None, :]
    scale2 = tl.rsqrt(tl.maximum(square2, 0.0) + eps)
    times = _times(
        attention, forms_ptr + SQUARE, a_video, in_a, form_size, TEXTS, VIDEOS, ATOMS, ATOMS, PRECISION
    )  # fmt: skip
    factor3 = scale2 * tl.load(number + 3, mask=in_v, other=0.0)[None, :]
    linear3 = _row(a_row + 2 * ATOMS, in_a, VIDEOS, ATOMS)
    variance3 = scale2 * tl.sum(attention * (factor3[:, :, None] * times + linear3), axis=2) + constant3
    scale3 = tl.rsqrt(tl.maximum(variance3, 0.0) + eps)
    both = scale2 * scale3

    # Pooling.
    share = tl.full([TEXTS, VIDEOS], 1.0, tl.float32)
    if POOL_MEAN:
        pool = mean_weight + tl.zeros([TEXTS, VIDEOS, FRAMES], tl.float32)
    else:
        logits = frame_text * inverse_temperature + _row(f_row, in_f, VIDEOS, FRAMES)
        pool = tl.exp(logits - tl.max(logits, axis=2, keep_dims=True))
        total = tl.sum(pool, axis=2)
        if not MASK_FRAMES:  # what padding takes of the softmax is lost
            pool = tl.where(_row(f_row + 2 * FRAMES, in_f, VIDEOS, FRAMES) != 0, pool, 0.0)
            kept = tl.maximum(tl.sum(pool, axis=2), 1e-37)
            share = kept / total
            total = kept
        pool = pool * (1 / total)[:, :, None]
    text_pooled = share * tl.sum(pool * frame_text, axis=2)
    times = _times(
        pool, forms_ptr + 3 * SQUARE + ATOMS * FRAMES, f_video, in_f, form_size, TEXTS, VIDEOS, FRAMES,
        FRAMES, PRECISION,
    )  # fmt: skip
    pooled_sq = tl.sum(times * pool, axis=2) * tl.load(number + 6, mask=in_v, other=0.0)[None, :]
    pooled_sq *= share * share

    # Step 6: inner products, then the length the interaction asks for, then the cosine.
    times = _times(
        attention, forms_ptr + 3 * SQUARE, f_video, in_f, form_size, TEXTS, VIDEOS, ATOMS, FRAMES, PRECISION
    )  # fmt: skip
    factor = both * tl.load(number + 5, mask=in_v, other=0.0)[None, :]
    times = factor[:, :, None] * times + _row(f_row + 4 * FRAMES, in_f, VIDEOS, FRAMES)
    times += scale3[:, :, None] * _row(f_row + 3 * FRAMES, in_f, VIDEOS, FRAMES)
    pooled_increment = share * tl.sum(pool * times, axis=2)
    times = _times(
        attention, forms_ptr + 2 * SQUARE, a_video, in_a, form_size, TEXTS, VIDEOS, ATOMS, ATOMS, PRECISION
    )  # fmt: skip
    factor = both * tl.load(number + 4, mask=in_v, other=0.0)[None, :]
    times = factor[:, :, None] * times + 2 * _row(a_row + 4 * ATOMS, in_a, VIDEOS, ATOMS)
    times += (2 * scale3)[:, :, None] * _row(a_row + 3 * ATOMS, in_a, VIDEOS, ATOMS)
    increment_sq = (
        both * tl.sum(attention * times, axis=2) + scale3 * (scale3 * scaled_sq + 2 * scaled_fixed) + fixed_sq
    )
    text_increment = both * text_atoms + scale3 * text_scaled[:, None] + text_fixed[:, None]
    if NORMALISE or QUERY_IS_TEXT:
        length = tl.full([TEXTS, VIDEOS], 1.0, tl.float32)
        if not NORMALISE:
            length = tl.exp(mean_cosine)
        factor = length * tl.rsqrt(tl.maximum(increment_sq, 1e-24))
        text_increment *= factor
        pooled_increment *= factor
        increment_sq = length * length
    product = text_pooled
    if CORRECT_TEXT:
        text_sq = text_sq + 2 * text_increment + increment_sq
        product += pooled_increment
    else:
        pooled_sq += 2 * pooled_increment + increment_sq
        product += text_increment
    scale = tl.rsqrt(tl.maximum(text_sq, SQUARE_FLOOR)) * tl.rsqrt(tl.maximum(pooled_sq, SQUARE_FLOOR))
    place = t.to(tl.int64)[:, None] * num_videos + v[None, :]
    score = tl.minimum(tl.maximum(product * scale, -1.0), 1.0)
    tl.store(scores_ptr + place, score, mask=in_t[:, None] & in_v[None, :])
