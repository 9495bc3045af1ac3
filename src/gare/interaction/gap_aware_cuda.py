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

import math
import os
from functools import lru_cache
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
TEXTS_AT_ONCE = 8
LOG2E = tl.constexpr(math.log2(math.e))
_HAS_ASSEMBLY = os.environ.get("TRITON_INTERPRET") != "1"
WARM, REGS = "prefetch" if _HAS_ASSEMBLY else "no", _HAS_ASSEMBLY
HOIST, FEW_NUMBERS = "registers" if _HAS_ASSEMBLY else "memory", "kernel"


def score(text_TD: Tensor, cards: GapAwareCards, config: GapAwareConfig) -> Tensor:
    """Scores [T, V]."""
    owner, pool = cards.increment, cards.pool
    assert owner is not None
    fused = fuse(cards) if cards.fused is None else cards.fused
    num_videos, num_frames = pool.mask_VF.shape
    num_texts, dim = text_TD.shape
    dtype, device = owner.key_OAD.dtype, text_TD.device
    text_TD = text_TD.to(dtype).contiguous()
    is_few = num_texts <= FEW_TEXTS
    constants = _constants(config, dtype, dim, fused.num_frames, owner.num_heads, is_few, _switches())
    text_T4 = fused.constants_K  # not read
    if constants["NUMBERS"] == "kernel":
        text_T4 = torch.empty(num_texts, 4, dtype=torch.float32, device=device)
        own = (text_TD, fused.shared_2D, text_T4)
        num_programs = -(-num_texts // TEXTS_AT_ONCE)
        launch(_text_kernel, lambda _: num_programs, own, (num_texts,), _text_constants(dim), num_warps=4)
    scores_TV = torch.empty(num_texts, num_videos, dtype=torch.float32, device=device)
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
    numbers = (num_texts, num_videos, num_frames, size, owner.eps, LOG2E.value / config.pooling_temperature)
    num_atoms = fused.num_atoms

    def num_programs_of(meta: dict[str, Any]) -> int:
        videos = max(1, meta["COLUMNS"] // num_atoms)
        return int(-(-num_videos // videos) * -(-num_texts // meta["TEXTS"]))

    launch(_score_kernel, num_programs_of, tensors, numbers, constants, kind=(size,))
    return scores_TV


@lru_cache
def _constants(
    config: GapAwareConfig,
    dtype: torch.dtype,
    dim: int,
    num_frames: int,
    num_heads: int,
    is_few: bool,
    switches: tuple[Any, ...],
) -> dict[str, Any]:
    """What the kernel is compiled for, in the order of its parameters."""
    is_half = dtype in (torch.float16, torch.bfloat16)
    warm, hoist, few_numbers, regs = switches
    return {
        "DIM": dim,
        "FRAMES": num_frames,
        "HEADS": num_heads,
        "FEW": is_few,
        "PRECISION": "tf32" if is_half else "tf32x3",
        "QUERY_IS_TEXT": config.query == "text",
        "GAP_SIGN": 1.0 if config.gap_direction == "video_minus_text" else -1.0,
        "NORMALISE": config.normalise,
        "CORRECT_TEXT": config.corrected_side == "text",
        "POOL_MEAN": config.pooling == "mean",
        "MASK_FRAMES": config.mask_frames,
        "SQUARE_FLOOR": SQUARE_FLOOR,
        "WARM": warm,
        "HOIST": hoist if is_half and num_frames * num_heads <= 16 else "no",
        "NUMBERS": few_numbers if is_few else "kernel",
        "REGS": regs and is_half and not is_few,
    }


def _switches() -> tuple[Any, ...]:
    return WARM, HOIST, FEW_NUMBERS, REGS


@lru_cache
def _text_constants(dim: int) -> dict[str, Any]:
    return {"DIM": dim, "TEXTS": TEXTS_AT_ONCE, "STEP": _step_of(dim, 128)}


def _step_of(dim: int, most: int) -> int:
    return max(16, min(most, 1 << (dim - 1).bit_length()))


# --- which shapes are tried ---------------------------------------------------------------------------------


MANY = [
    (128, 32, 64, 4, 3),
    (128, 32, 64, 4, 4),
    (128, 64, 64, 8, 3),
    (128, 64, 32, 8, 4),
    (256, 32, 64, 8, 3),
    (64, 32, 64, 4, 3),
    (128, 32, 128, 4, 2),
]
FEW = [
    (16, 16, 64, 1, 4),
    (16, 16, 64, 1, 3),
    (16, 16, 128, 1, 3),
    (16, 64, 128, 4, 3),
    (16, 64, 64, 4, 4),
    (16, 32, 64, 2, 4),
]
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


@triton.jit
def _touch(ptr, first, last, SIZE: tl.constexpr, BYTES: tl.constexpr, COUNT: tl.constexpr):
    """A word of every 32 bytes, so that all of them lie in the first cache."""
    place = tl.minimum(tl.minimum(tl.arange(0, SIZE) * (32 // BYTES), COUNT - 1) + first, last)
    return tl.load((ptr + place // (4 // BYTES) * (4 // BYTES)).to(tl.pointer_type(tl.int32)))


@triton.jit
def _use(word):
    """What no number on a card has as its bits: without a reader loads are left out."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.eq.u32 p, $1, 0x7fc0dead; @p trap; mov.u32 $0, 0; }", "=r,r", [word],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _here(form):
    """The same numbers, which Triton cannot move above this line."""
    return tl.inline_asm_elementwise("// $0", "=r,0", [form], dtype=form.dtype, is_pure=False, pack=2)


@triton.jit
def _times(
    weights, form, TEXTS: tl.constexpr, VIDEOS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """weights · matrix for each pair."""
    flat = tl.reshape(weights, (TEXTS, VIDEOS * ROWS)).to(form.dtype)
    return tl.reshape(tl.dot(flat, form, input_precision=PRECISION), (TEXTS, VIDEOS, COLUMNS))


@triton.constexpr_function
def _power_of_2(number):
    return 1 << (number - 1).bit_length()


@triton.jit
def _prefetch(ptr, first, last, SIZE: tl.constexpr, BYTES: tl.constexpr, COUNT: tl.constexpr):
    """Ask for COUNT numbers of BYTES each from a pointer on, a thread for every line of 128 bytes."""
    place = tl.minimum(tl.minimum(tl.arange(0, SIZE) * (128 // BYTES), COUNT - 1) + first, last)
    tl.inline_asm_elementwise(
        "prefetch.global.L1 [$1]; mov.u32 $0, 0;", "=r,l", [ptr + place], dtype=tl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


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
    WARM: tl.constexpr, HOIST: tl.constexpr, NUMBERS: tl.constexpr, REGS: tl.constexpr,
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
    # Each is read where it is used, for registers are what this kernel is short of; it is asked for before.
    row_size: tl.constexpr = 5 * ATOMS + 6 * FRAMES + 8
    a_row = rows_ptr + a_video.to(tl.int64) * row_size + a % ATOMS
    f_row = rows_ptr + f_video.to(tl.int64) * row_size + 5 * ATOMS + f % FRAMES
    number = rows_ptr + v.to(tl.int64) * row_size + 5 * ATOMS + 6 * FRAMES
    SQUARE: tl.constexpr = ATOMS * ATOMS
    form_size: tl.constexpr = 3 * SQUARE + ATOMS * FRAMES + FRAMES * FRAMES
    FORM_BYTES: tl.constexpr = forms_ptr.dtype.element_ty.primitive_bitwidth // 8
    ROW_LINES: tl.constexpr = _power_of_2(VIDEOS * row_size // 32 + 2)
    FORM_LINES: tl.constexpr = _power_of_2(VIDEOS * form_size * FORM_BYTES // 128 + 1)
    TEXT_LINES: tl.constexpr = TEXTS * 4 // 32
    a_forms, f_forms = forms_ptr, forms_ptr + 3 * SQUARE
    if WARM == "load":
        wide_v = first_v.to(tl.int64)
        row_last = tl.full([], row_size, tl.int64) * num_videos - 1
        form_last = tl.full([], form_size, tl.int64) * num_videos - 2
        touched_rows = _touch(rows_ptr, wide_v * row_size, row_last, 4 * ROW_LINES, 4, VIDEOS * row_size)
        touched_forms = _touch(
            forms_ptr, wide_v * form_size, form_last, 4 * FORM_LINES, FORM_BYTES, VIDEOS * form_size - 1
        )
    if WARM == "prefetch":
        wide_v = first_v.to(tl.int64)  # no number of the kernel itself: Triton makes a constant of a one
        row_last = tl.full([], row_size, tl.int64) * num_videos - 1
        form_last = tl.full([], form_size, tl.int64) * num_videos - 1
        _prefetch(rows_ptr, wide_v * row_size, row_last, ROW_LINES, 4, VIDEOS * row_size)
        _prefetch(forms_ptr, wide_v * form_size, form_last, FORM_LINES, FORM_BYTES, VIDEOS * form_size)
        if NUMBERS == "kernel":
            _prefetch(text_numbers_ptr, t0 * 4, num_texts * 4 - 1, TEXT_LINES, 4, 4 * TEXTS)
    if HOIST != "no":
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
    if NUMBERS == "in loop":
        square = tl.zeros([TEXTS, STEP], tl.float32)
        level = tl.zeros([TEXTS, STEP], tl.float32)
        scaled = tl.zeros([TEXTS, STEP], tl.float32)
        fixed = tl.zeros([TEXTS, STEP], tl.float32)
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
        if REGS:  # from registers tensor cores take it once for three products
            text = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [text], dtype=text.dtype, is_pure=True, pack=2
            )
        key_text = tl.dot(text, key, key_text, input_precision=PRECISION)
        atom_text = tl.dot(text, atom, atom_text, input_precision=PRECISION)
        frame_text = tl.dot(text, frame, frame_text, input_precision=PRECISION)
        if REGS:  # all products are done, so that the next numbers of a text may take its registers
            frame_text = tl.inline_asm_elementwise(
                "// $0", "=f,0", [frame_text], dtype=tl.float32, is_pure=True, pack=1
            )
        if NUMBERS == "in loop":
            number_of = text.to(tl.float32)
            square += number_of * number_of
            level += number_of
            scaled += number_of * tl.load(shared_ptr + d, mask=d < DIM, other=0.0)[None, :]
            fixed += number_of * tl.load(shared_ptr + DIM + d, mask=d < DIM, other=0.0)[None, :]

    if NUMBERS == "in loop":
        text_sq, level = tl.sum(square, axis=1), tl.sum(level, axis=1) / DIM
        text_scaled, text_fixed = tl.sum(scaled, axis=1), tl.sum(fixed, axis=1)
    elif NUMBERS == "own loop":
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

    if WARM == "load":
        _use(touched_rows)
        _use(touched_forms)
    if HOIST == "registers":  # which they leave for shared memory here
        form2, form3, form_a = _here(form2), _here(form3), _here(form_a)
        form_af, form_f = _here(form_af), _here(form_f)

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
    if HOIST == "no":
        form2 = _form(a_forms, a_video, in_a, form_size, VIDEOS, ATOMS, ATOMS)
    times = _times(attention, form2, TEXTS, VIDEOS, ATOMS, ATOMS, PRECISION)
    square2 = tl.sum(times * attention, axis=2) * tl.load(number + 2, mask=in_v, other=0.0)[None, :]
    scale2 = tl.rsqrt(tl.maximum(square2 * inverse * inverse, 0.0) + eps) * inverse
    if HOIST == "no":
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
    if HOIST == "no":
        form_f = _form(f_forms + ATOMS * FRAMES, f_video, in_f, form_size, VIDEOS, FRAMES, FRAMES)
    times = _times(pool, form_f, TEXTS, VIDEOS, FRAMES, FRAMES, PRECISION)
    pooled_sq = tl.sum(times * pool, axis=2) * tl.load(number + 6, mask=in_v, other=0.0)[None, :]
    pooled_sq *= share * share

    # Step 6: inner products, then the length the interaction asks for, then the cosine.
    if HOIST == "no":
        form_af = _form(f_forms, f_video, in_f, form_size, VIDEOS, ATOMS, FRAMES)
    times = _times(attention, form_af, TEXTS, VIDEOS, ATOMS, FRAMES, PRECISION)
    factor = both * tl.load(number + 5, mask=in_v, other=0.0)[None, :]
    times = factor[:, :, None] * times + _row(f_row + 4 * FRAMES, in_f, VIDEOS, FRAMES)
    times += scale3[:, :, None] * _row(f_row + 3 * FRAMES, in_f, VIDEOS, FRAMES)
    pooled_increment = share * tl.sum(pool * times, axis=2)
    if HOIST == "no":
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
