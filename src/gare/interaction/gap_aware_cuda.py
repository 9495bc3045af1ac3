"""The scores of `gap_aware_factored.py` in one CUDA kernel (Triton): products and all that follows them.

A program multiplies a few texts with the keys, atoms and frames of a few videos, tile by tile over D, and
turns the products into scores while they are in registers. Nothing of T × V × F reaches memory: cards are
read, scores are written. With few texts a program has fewer rows, and takes as long as reading its cards.

Inference only, frame context. `gap_aware_factored.pair_products` is the reference: tests run this kernel in
Triton's interpreter on the CPU against it, and `gare bench scoring` compares the two again on the GPU. The
file is long because its kernel is: numbers stay in registers from the products to the scores.

Imports Triton, so `gap_aware.py` imports this file only when it can run. Shapes: T texts, V videos, F frames,
H heads, A = H × F atoms, D embedding. In the kernel frames are padded to a power of two.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gare.interaction.fused_cards import FEW_TEXTS, FusedCards, fuse
from gare.interaction.gap_aware_cards import GapAwareCards
from gare.interaction.interaction import SQUARE_FLOOR
from gare.interaction.kernel_calls_cuda import ALIGNMENT, Launch, is_watched, launch

if TYPE_CHECKING:
    from gare.interaction.gap_aware import GapAwareConfig


_MANY_PAIRS = 2**22
_MOST_CALLS = 64
TEXTS_AT_ONCE = 8
LOG2E = tl.constexpr(math.log2(math.e))
HAS_ASSEMBLY = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1" and torch.version.hip is None)
"""The interpreter has none, AMD another one; without it the numbers are the same."""


@dataclass(frozen=True, slots=True)
class _Call:
    """What all calls with as many texts share: how both kernels are launched, and where cards lie."""

    text: Launch
    num_text_programs: int
    score: Launch
    num_programs: int
    shared: int
    cards: tuple[int, ...]
    numbers: tuple[float, ...]


def score(text_TD: Tensor, cards: GapAwareCards) -> Tensor:
    """Scores [T, V] by the settings that the cards were made with."""
    device = text_TD.get_device()
    if device >= 0 and device != torch.cuda.current_device():  # kernels are launched where torch is
        with torch.cuda.device(device):
            return score(text_TD, cards)
    dtype = cards.pool.frames_VFD.dtype
    if text_TD.dtype != dtype:
        text_TD = text_TD.to(dtype)
    text_TD = text_TD.contiguous()
    num_texts = text_TD.shape[0]
    text_T4 = torch.empty(num_texts, 4, dtype=torch.float32, device=text_TD.device)
    scores_TV = torch.empty(
        num_texts, cards.pool.mask_VF.shape[0], dtype=torch.float32, device=text_TD.device
    )
    call, address = cards.calls.get(num_texts), text_TD.data_ptr()
    if call is None or address % ALIGNMENT or is_watched():
        _score_first(text_TD, cards, text_T4, scores_TV)
        return scores_TV
    numbers = text_T4.data_ptr()
    call.text(call.num_text_programs, device, (address, call.shared, numbers), (num_texts,))
    addresses = (address, numbers, *call.cards, scores_TV.data_ptr())
    call.score(call.num_programs, device, addresses, call.numbers)
    return scores_TV


def _score_first(text_TD: Tensor, cards: GapAwareCards, text_T4: Tensor, scores_TV: Tensor) -> None:
    """Fill the scores, with everything looked up; the cards keep what the next call needs."""
    owner, pool = cards.increment, cards.pool
    config: Any = cards.config
    assert owner is not None
    fused = fuse(cards) if cards.fused is None else cards.fused
    num_videos, num_frames = pool.mask_VF.shape
    num_texts, dim = text_TD.shape
    num_text_programs = triton.cdiv(num_texts, TEXTS_AT_ONCE)
    first = launch(
        _text_kernel,
        lambda _: num_text_programs,
        (text_TD, fused.shared_2D, text_T4),
        (num_texts,),
        _text_constants(dim),
        num_warps=4,
    )
    vectors = (owner.key_OAD, owner.atom_OAD, pool.frames_VFD)
    kept = (*vectors, fused.rows_VR, fused.forms_VG, fused.constants_K)
    tensors = (text_TD, text_T4, *[tensor.contiguous() for tensor in kept], scores_TV)
    size = int(num_texts * num_videos > _MANY_PAIRS)  # a shape chosen for a few pairs may be slow for many
    numbers = (num_texts, num_videos, num_frames, size, owner.eps, LOG2E.value / config.pooling_temperature)

    def num_programs_of(meta: dict[str, Any]) -> int:
        videos = max(1, meta["COLUMNS"] // fused.num_atoms)
        return int(triton.cdiv(num_videos, videos) * triton.cdiv(num_texts, meta["TEXTS"]))

    constants = _constants(config, text_TD.dtype, dim, fused, owner.num_heads, is_few=num_texts <= FEW_TEXTS)
    second = launch(_score_kernel, num_programs_of, tensors, numbers, constants, kind=(size,))
    lies_still = cards.fused is not None and all(tensor.is_contiguous() for tensor in kept)
    if first is None or second is None or not lies_still:
        return
    if len(cards.calls) >= _MOST_CALLS:
        cards.calls.clear()
    cards.calls[num_texts] = _Call(
        first,
        num_text_programs,
        second,
        num_programs_of(second.constants),
        fused.shared_2D.data_ptr(),
        tuple(tensor.data_ptr() for tensor in kept),
        numbers,
    )


def _constants(
    config: GapAwareConfig,
    dtype: torch.dtype,
    dim: int,
    fused: FusedCards,
    num_heads: int,
    *,
    is_few: bool,
) -> dict[str, Any]:
    """What the kernel is compiled for, in the order of its parameters."""
    return {
        "DIM": dim,
        "FRAMES": fused.num_frames,
        "HEADS": num_heads,
        "FEW": is_few,
        "PRECISION": "tf32" if dtype in (torch.float16, torch.bfloat16) else "tf32x3",
        "QUERY_IS_TEXT": config.query == "text",
        "GAP_SIGN": 1.0 if config.gap_direction == "video_minus_text" else -1.0,
        "NORMALISE": config.normalise,
        "CORRECT_TEXT": config.corrected_side == "text",
        "POOL_MEAN": config.pooling == "mean",
        "MASK_FRAMES": config.mask_frames,
        "SQUARE_FLOOR": SQUARE_FLOOR,
    }


def _text_constants(dim: int) -> dict[str, Any]:
    return {"DIM": dim, "TEXTS": TEXTS_AT_ONCE, "STEP": max(16, min(128, triton.next_power_of_2(dim)))}


# --- which shapes are tried ---------------------------------------------------------------------------------


MANY = [(128, 32, 64, 4, 3), (64, 32, 64, 4, 3), (128, 64, 64, 8, 3), (64, 64, 32, 4, 3), (64, 128, 32, 8, 2)]
FEW = [(16, 16, 128, 1, 3), (16, 16, 64, 1, 4), (16, 32, 64, 2, 4), (16, 64, 64, 4, 3), (16, 128, 32, 8, 2)]
"""Shapes for many texts, and for few: rows of texts, columns of keys (as many of atoms and of frames),
numbers of D at a time, warps, stages.

On an H200 the first of each is the fastest in half precision; the second is for float32. The others are for
videos of more atoms.
"""


def configs(shapes: list[tuple[int, int, int, int, int]]) -> list[triton.Config]:
    """Shapes that are timed once for each kind of card; the fastest is remembered on this machine."""
    if os.environ.get("TRITON_INTERPRET") == "1":  # nothing to time
        return [triton.Config({"TEXTS": 64, "COLUMNS": 32, "STEP": 32})]
    return [
        triton.Config({"TEXTS": texts, "COLUMNS": columns, "STEP": step}, num_warps=warps, num_stages=stages)
        for texts, columns, step, warps, stages in shapes
    ]


def fitting(configs: list[triton.Config], named_args: dict[str, object], **meta: int) -> list[triton.Config]:
    """Those for as many texts whose columns are the fewest that hold the atoms of a video."""
    atoms = meta["FRAMES"] * meta["HEADS"]
    possible = [
        config
        for config in configs
        if (config.kwargs["TEXTS"] == FEW_TEXTS) == meta["FEW"] and config.kwargs["COLUMNS"] >= atoms
    ]
    fewest = min((config.kwargs["COLUMNS"] for config in possible), default=0)
    return [config for config in possible if config.kwargs["COLUMNS"] == fewest] or configs[:1]


# --- the kernels --------------------------------------------------------------------------------------------


@triton.jit
def _text_kernel(
    text_ptr, shared_ptr, numbers_ptr, num_texts, DIM: tl.constexpr, TEXTS: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """What a text brings into every pair: |t|², the mean of its numbers, products with two fixed vectors."""
    t = tl.program_id(0) * TEXTS + tl.arange(0, TEXTS)
    in_t = t < num_texts
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
    tl.store(numbers_ptr + 4 * t, tl.sum(square, axis=1), mask=in_t)
    tl.store(numbers_ptr + 4 * t + 1, tl.sum(level, axis=1) / DIM, mask=in_t)
    tl.store(numbers_ptr + 4 * t + 2, tl.sum(scaled, axis=1), mask=in_t)
    tl.store(numbers_ptr + 4 * t + 3, tl.sum(fixed, axis=1), mask=in_t)


@triton.jit
def _row(ptr, is_in, VIDEOS: tl.constexpr, WIDTH: tl.constexpr):
    """A number for each atom, or each frame, of each video."""
    return tl.reshape(tl.load(ptr, mask=is_in, other=0.0), (1, VIDEOS, WIDTH))


@triton.jit
def _form(ptr, video, is_in, form_size, VIDEOS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A matrix [ROWS, COLUMNS] of each video: they stand on the diagonal of a larger one, which tensor cores
    multiply at once."""
    row, column = tl.arange(0, VIDEOS * ROWS), tl.arange(0, VIDEOS * COLUMNS)
    cell = (
        video.to(tl.int64)[None, :] * form_size
        + (row % ROWS)[:, None] * COLUMNS
        + (column % COLUMNS)[None, :]
    )
    is_own = (row // ROWS)[:, None] == (column // COLUMNS)[None, :]
    return tl.load(ptr + cell, mask=is_own & is_in[None, :], other=0.0)


# Three lines of assembly that compute nothing: where numbers lie is Triton's choice, and these change it.
# On an H200 they save 7 % of the time at 1,000 × 1,000, 6 % at 1,000 × 10,000, 5 % at 1 × 10,000.


@triton.jit
def _in_registers(text):
    """The same numbers, held in registers for three products, which otherwise each read shared memory.

    Triton gives a left side from registers only to what was computed, not loaded (its pull request 5003).
    """
    if HAS_ASSEMBLY:
        text = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [text], dtype=text.dtype, is_pure=True, pack=2
        )
    return text


@triton.jit
def _finished(product):
    """The same product, waited for: the next numbers of a text may then take the registers of these."""
    if HAS_ASSEMBLY:
        product = tl.inline_asm_elementwise(
            "// $0", "=f,0", [product], dtype=tl.float32, is_pure=True, pack=1
        )
    return product


@triton.jit
def _not_before(form):
    """The same matrix, in registers until here: Triton takes it to shared memory as soon as it is loaded."""
    if HAS_ASSEMBLY:
        form = tl.inline_asm_elementwise("// $0", "=r,0", [form], dtype=form.dtype, is_pure=False, pack=2)
    return form


@triton.jit
def _times(
    weights, form, TEXTS: tl.constexpr, VIDEOS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """weights · matrix for each pair."""
    flat = tl.reshape(weights, (TEXTS, VIDEOS * ROWS)).to(form.dtype)
    return tl.reshape(tl.dot(flat, form, input_precision=PRECISION), (TEXTS, VIDEOS, COLUMNS))


@triton.autotune(
    configs(MANY + FEW),
    key=["DIM", "FRAMES", "HEADS", "FEW", "size", "PRECISION"],
    prune_configs_by={"early_config_prune": fitting},
    cache_results=True,
)
@triton.jit(do_not_specialize=["size"])
def _score_kernel(
    text_ptr, text_numbers_ptr, key_ptr, atom_ptr, frame_ptr, rows_ptr, forms_ptr, constants_ptr,
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
    t0 = (tl.program_id(0) % num_blocks) * TEXTS
    t = t0 + tl.arange(0, TEXTS)
    first_v = (tl.program_id(0) // num_blocks) * VIDEOS
    v = first_v + tl.arange(0, VIDEOS)
    in_t, in_v = t < num_texts, v < num_videos

    a, f = tl.arange(0, A), tl.arange(0, F)
    a_video, f_video = first_v + a // ATOMS, first_v + f // FRAMES
    in_a, in_f = a_video < num_videos, f_video < num_videos
    atom_row = (a_video.to(tl.int64) * HEADS + a % ATOMS // FRAMES) * num_frames + a % FRAMES
    frame_row = f_video.to(tl.int64) * num_frames + f % FRAMES
    real_a, real_f = in_a & (a % FRAMES < num_frames), in_f & (f % FRAMES < num_frames)

    # Rows of each video: five over its atoms, six over its frames, then single numbers (`fused_cards.fuse`).
    # Each is read where it is used, for registers are what this kernel is short of.
    row_size: tl.constexpr = 5 * ATOMS + 6 * FRAMES + 8
    a_row = rows_ptr + a_video.to(tl.int64) * row_size + a % ATOMS
    f_row = rows_ptr + f_video.to(tl.int64) * row_size + 5 * ATOMS + f % FRAMES
    number = rows_ptr + v.to(tl.int64) * row_size + 5 * ATOMS + 6 * FRAMES
    SQUARE: tl.constexpr = ATOMS * ATOMS
    form_size: tl.constexpr = 3 * SQUARE + ATOMS * FRAMES + FRAMES * FRAMES
    a_forms, f_forms = forms_ptr, forms_ptr + 3 * SQUARE
    IS_HALF: tl.constexpr = text_ptr.dtype.element_ty.primitive_bitwidth == 16
    EARLY: tl.constexpr = IS_HALF and ATOMS <= 16  # matrices come while products are made
    if EARLY:
        form2 = _form(a_forms, a_video, in_a, form_size, VIDEOS, ATOMS, ATOMS)
        form3 = _form(a_forms + SQUARE, a_video, in_a, form_size, VIDEOS, ATOMS, ATOMS)
        form_a = _form(a_forms + 2 * SQUARE, a_video, in_a, form_size, VIDEOS, ATOMS, ATOMS)
        form_af = _form(f_forms, f_video, in_f, form_size, VIDEOS, ATOMS, FRAMES)
        form_f = _form(f_forms + ATOMS * FRAMES, f_video, in_f, form_size, VIDEOS, FRAMES, FRAMES)

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
        if IS_HALF and not FEW:
            text = _in_registers(text)
        key_text = tl.dot(text, key, key_text, input_precision=PRECISION)
        atom_text = tl.dot(text, atom, atom_text, input_precision=PRECISION)
        frame_text = tl.dot(text, frame, frame_text, input_precision=PRECISION)
        if IS_HALF and not FEW:
            frame_text = _finished(frame_text)

    text_sq = tl.load(text_numbers_ptr + 4 * t, mask=in_t, other=1.0)
    level = tl.load(text_numbers_ptr + 4 * t + 1, mask=in_t, other=0.0)
    text_scaled = tl.load(text_numbers_ptr + 4 * t + 2, mask=in_t, other=0.0)
    text_fixed = tl.load(text_numbers_ptr + 4 * t + 3, mask=in_t, other=0.0)
    text_sq, level = text_sq[:, None], level[:, None]
    text_variance = tl.maximum(text_sq / DIM - level * level, 0.0)

    if EARLY:
        form2, form3, form_a = _not_before(form2), _not_before(form3), _not_before(form_a)
        form_af, form_f = _not_before(form_af), _not_before(form_f)

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
        logits = key_text * (tl.rsqrt(text_variance + eps) * LOG2E)[:, :, None]
    else:
        mean_variance = tl.load(number, mask=in_v, other=1.0)[None, :]
        mean_level = tl.load(number + 1, mask=in_v, other=0.0)[None, :]
        variance = mean_variance + text_variance - 2 * (text_mean / DIM - level * mean_level)
        scale1 = GAP_SIGN * LOG2E * tl.rsqrt(tl.maximum(variance, 0.0) + eps)
        logits = (_row(a_row + ATOMS, in_a, VIDEOS, ATOMS) - key_text) * scale1[:, :, None]
    logits = tl.reshape(logits + _row(a_row, in_a, VIDEOS, ATOMS), (TEXTS, VIDEOS * HEADS, FRAMES))
    # Not divided by its sum: what is made of it is.
    attention = tl.exp2(logits - tl.max(logits, axis=2, keep_dims=True))
    if HEADS == 1:
        inverse = tl.reshape(1 / tl.sum(attention, axis=2), (TEXTS, VIDEOS))
    else:  # each head has its own
        attention = attention * (1 / tl.sum(attention, axis=2, keep_dims=True))
        inverse = tl.full([TEXTS, VIDEOS], 1.0, tl.float32)
    attention = tl.reshape(attention, (TEXTS, VIDEOS, ATOMS))
    text_atoms = tl.sum(attention * tl.reshape(atom_text, (TEXTS, VIDEOS, ATOMS)), axis=2)

    # Steps 3 to 5: LN2, LN3 and what they scale the atoms by, over the sum of the attention. A linear part is
    # summed with its form.
    constant3 = tl.load(constants_ptr)
    scaled_sq = tl.load(constants_ptr + 1)
    scaled_fixed = tl.load(constants_ptr + 2)
    fixed_sq = tl.load(constants_ptr + 3)
    if not EARLY:
        form2 = _form(a_forms, a_video, in_a, form_size, VIDEOS, ATOMS, ATOMS)
    times = _times(attention, form2, TEXTS, VIDEOS, ATOMS, ATOMS, PRECISION)
    square2 = tl.sum(times * attention, axis=2) * tl.load(number + 2, mask=in_v, other=0.0)[None, :]
    scale2 = tl.rsqrt(tl.maximum(square2 * inverse * inverse, 0.0) + eps) * inverse
    if not EARLY:
        form3 = _form(a_forms + SQUARE, a_video, in_a, form_size, VIDEOS, ATOMS, ATOMS)
    times = _times(attention, form3, TEXTS, VIDEOS, ATOMS, ATOMS, PRECISION)
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
        pool = tl.exp2(logits - tl.max(logits, axis=2, keep_dims=True))
        total = tl.sum(pool, axis=2)
        if MASK_FRAMES:
            share = 1 / total  # not divided here, but in what is made of it
        else:  # what padding takes of the softmax is lost
            pool = tl.where(_row(f_row + 2 * FRAMES, in_f, VIDEOS, FRAMES) != 0, pool, 0.0)
            kept = tl.maximum(tl.sum(pool, axis=2), 1e-37)
            share = kept / total
            pool = pool * (1 / kept)[:, :, None]
    text_pooled = share * tl.sum(pool * frame_text, axis=2)
    if not EARLY:
        form_f = _form(f_forms + ATOMS * FRAMES, f_video, in_f, form_size, VIDEOS, FRAMES, FRAMES)
    times = _times(pool, form_f, TEXTS, VIDEOS, FRAMES, FRAMES, PRECISION)
    pooled_sq = tl.sum(times * pool, axis=2) * tl.load(number + 6, mask=in_v, other=0.0)[None, :]
    pooled_sq *= share * share

    # Step 6: inner products, then the length the interaction asks for, then the cosine.
    if not EARLY:
        form_af = _form(f_forms, f_video, in_f, form_size, VIDEOS, ATOMS, FRAMES)
    times = _times(attention, form_af, TEXTS, VIDEOS, ATOMS, FRAMES, PRECISION)
    factor = both * tl.load(number + 5, mask=in_v, other=0.0)[None, :]
    times = factor[:, :, None] * times + _row(f_row + 4 * FRAMES, in_f, VIDEOS, FRAMES)
    times += scale3[:, :, None] * _row(f_row + 3 * FRAMES, in_f, VIDEOS, FRAMES)
    pooled_increment = share * tl.sum(pool * times, axis=2)
    if not EARLY:
        form_a = _form(a_forms + 2 * SQUARE, a_video, in_a, form_size, VIDEOS, ATOMS, ATOMS)
    times = _times(attention, form_a, TEXTS, VIDEOS, ATOMS, ATOMS, PRECISION)
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
            length = tl.exp2(mean_cosine * LOG2E)
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
