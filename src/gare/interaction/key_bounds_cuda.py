"""Bounds of scores on a GPU by keys (Triton): between which two numbers pairs lie, for picked videos.

Numbers of the picked videos are put side by side, texts are multiplied with their keys, and products become
bounds: a kernel each. The names are those of `increment_keys.py`, which is the reference in float64;
`resident_cards.py` says what differs. Every `ROUND` stands for what float32 may lose there.

Imports Triton, so others import this file only when it can run. Shapes: T texts, U picked videos, S rows of a
card, A atoms, K numbers of a card, D embedding.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gare.interaction.cosine_bounds_cuda import (
    TEXTS_AT_ONCE,
    Rules,
    cosine_bounds_of,
    number_of,
    pool_radius_of,
    root_of,
    shapes_of,
)
from gare.interaction.kernel_calls_cuda import launch
from gare.interaction.resident_cards import (
    EXTRA_ROWS,
    FORM_ROUNDING,
    NUM_NUMBERS,
    NUM_ROWS,
    ROUND,
    ResidentCards,
    TextPlanes,
)

_VIDEOS = 32  # side by side, as the kernel of the bounds reads them: a line of memory
_NUMBERS = 64  # of a video, put side by side with those of others at once


def bounds_of(
    text: TextPlanes, cards: ResidentCards, rules: Rules, rows_U: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Lower and upper bounds of the scores of some videos, or of all, by their keys; each [T, U], float32."""
    num_texts, _, dim = text.planes_T2D.shape
    if rows_U is None:
        rows_U = torch.arange(len(cards), device=text.planes_T2D.device)
    num_asked = len(rows_U)
    # Kernels are compiled for whole lines: a few videos more, which are left out in the end.
    rows_U = torch.nn.functional.pad(rows_U, (0, -num_asked % _VIDEOS))
    num_videos, num_atoms = len(rows_U), cards.num_frames * cards.num_heads
    options: dict[str, Any] = {"dtype": torch.float32, "device": text.planes_T2D.device}
    product_STU = torch.empty(num_atoms + EXTRA_ROWS, num_texts, num_videos, **options)
    lower_TU, upper_TU = (torch.empty(num_texts, num_videos, **options) for _ in range(2))
    num_numbers = cards.numbers_VK.shape[1]
    numbers_KU = torch.empty(num_numbers, num_videos, **options)
    launch(
        _column_kernel,
        lambda _: num_videos // _VIDEOS * triton.cdiv(num_numbers, _NUMBERS),
        (cards.numbers_VK, rows_U, numbers_KU),
        (num_videos, num_numbers, cards.numbers_VK.stride(0)),
        {"VIDEOS": _VIDEOS, "NUMBERS": _NUMBERS},
    )
    text_blocks = triton.cdiv(num_texts, TEXTS_AT_ONCE)
    width = max(16, triton.next_power_of_2(num_atoms + EXTRA_ROWS))
    low_VAD = cards.high_VSD if cards.low_VAD is None else cards.low_VAD
    launch(
        _product_kernel,
        lambda meta: triton.cdiv(num_videos, meta["COLUMNS"] // width) * text_blocks,
        (text.planes_T2D, cards.high_VSD, low_VAD, rows_U, product_STU),
        (num_texts, num_videos),
        {
            "DIM": dim,
            "ATOMS": num_atoms,
            "WIDTH": width,
            "WIDE_KEYS": cards.low_VAD is not None,
            "TEXTS": TEXTS_AT_ONCE,
        },
    )
    launch(
        _bounds_kernel,
        lambda meta: num_videos // meta["VIDEOS"] * text_blocks,
        (product_STU, text.numbers_T6, numbers_KU, cards.shared_K, lower_TU, upper_TU),
        (num_texts, num_videos, num_videos, rules.inverse_temperature),
        {
            "DIM": dim,
            "FRAMES": cards.num_frames,
            "HEADS": cards.num_heads,
            "SIGN": float(rules.sign),
            "CORRECTS_TEXT": rules.corrects_text,
            "POOL_MEAN": rules.temperature is None,
            "ROWS": NUM_ROWS,
            "NUMBERS": NUM_NUMBERS,
            "ROUND": ROUND * max(1, num_atoms / 16),  # a sum in float32 loses more, the longer it is
            "FORM": FORM_ROUNDING * max(1, num_atoms / 64),
            "TEXTS": TEXTS_AT_ONCE,
        },
    )
    return lower_TU[:, :num_asked], upper_TU[:, :num_asked]


@triton.jit
def _column_kernel(
    table_ptr, rows_ptr, found_ptr, num_rows, size, row_size, VIDEOS: tl.constexpr, NUMBERS: tl.constexpr
):  # fmt: skip
    """Numbers of picked videos, with their videos side by side."""
    num_blocks = tl.cdiv(size, NUMBERS)
    v = tl.program_id(0) // num_blocks * VIDEOS + tl.arange(0, VIDEOS)
    k = tl.program_id(0) % num_blocks * NUMBERS + tl.arange(0, NUMBERS)
    row = tl.load(rows_ptr + v).to(tl.int64)
    value = tl.load(table_ptr + row[:, None] * row_size + k[None, :], mask=(k < size)[None, :], other=0.0)
    place = k.to(tl.int64)[:, None] * num_rows + v[None, :]
    tl.store(found_ptr + place, tl.trans(value), mask=(k < size)[:, None])


PRODUCT_CONFIGS = shapes_of(("COLUMNS", "STEP"), [(128, 128, 4, 3), (256, 128, 8, 3)])


def _holding_a_video(configs: list[triton.Config], _: Any, **named: Any) -> list[triton.Config]:
    """Triton hands over arguments without a name, which are pointers here, and those with one."""
    return [config for config in configs if config.kwargs["COLUMNS"] >= named["WIDTH"]]


@triton.autotune(
    PRODUCT_CONFIGS,
    key=["DIM", "WIDTH", "WIDE_KEYS"],
    prune_configs_by={"early_config_prune": _holding_a_video},
    cache_results=True,
)
@triton.jit(do_not_specialize=["num_texts"])  # one text is compiled as many are
def _product_kernel(
    text_ptr, high_ptr, low_ptr, rows_ptr, product_ptr, num_texts, num_videos, DIM: tl.constexpr,
    ATOMS: tl.constexpr, WIDTH: tl.constexpr, WIDE_KEYS: tl.constexpr, TEXTS: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Texts are rows; keys and the two vectors of a picked video are columns. Sums of products are exact."""
    VIDEOS: tl.constexpr = COLUMNS // WIDTH
    num_blocks = tl.cdiv(num_texts, TEXTS)
    t = (tl.program_id(0) % num_blocks) * TEXTS + tl.arange(0, TEXTS)
    c = tl.arange(0, COLUMNS)
    # Videos side by side, as products are stored: so a line of memory is written at once.
    video = ((tl.program_id(0) // num_blocks) * VIDEOS + c % VIDEOS).to(tl.int64)
    place = c // VIDEOS
    in_t, in_v = t < num_texts, video < num_videos
    is_row, is_atom = in_v & (place < ATOMS + 4), in_v & (place < ATOMS)
    row = tl.load(rows_ptr + video, mask=in_v, other=0).to(tl.int64)

    high = tl.zeros([TEXTS, COLUMNS], tl.int32)
    low = tl.zeros([TEXTS, COLUMNS], tl.int32)
    key_high = tl.zeros([TEXTS, COLUMNS], tl.int32)
    key_low = tl.zeros([TEXTS, COLUMNS], tl.int32)
    text_row = text_ptr + t.to(tl.int64)[:, None] * (2 * DIM)
    card = high_ptr + (row * (ATOMS + 4) + place)[None, :] * DIM
    card_low = low_ptr + (row * ATOMS + place)[None, :] * DIM
    for first in range(0, DIM, STEP):
        d = first + tl.arange(0, STEP)
        in_text, in_rows, in_keys = in_t[:, None], is_row[None, :], is_atom[None, :]
        if DIM % STEP != 0:
            in_text, in_rows = in_text & (d < DIM)[None, :], in_rows & (d < DIM)[:, None]
            in_keys = in_keys & (d < DIM)[:, None]
        text_high = tl.load(text_row + d[None, :], mask=in_text, other=0)
        text_low = tl.load(text_row + DIM + d[None, :], mask=in_text, other=0)
        rows = tl.load(card + d[:, None], mask=in_rows, other=0)
        high = tl.dot(text_high, rows, high, out_dtype=tl.int32)
        low = tl.dot(text_low, rows, low, out_dtype=tl.int32)
        if WIDE_KEYS:
            keys = tl.load(card_low + d[:, None], mask=in_keys, other=0)
            key_high = tl.dot(text_high, keys, key_high, out_dtype=tl.int32)
            key_low = tl.dot(text_low, keys, key_low, out_dtype=tl.int32)
    product = high.to(tl.float32) * 256 + low.to(tl.float32)
    if WIDE_KEYS:
        key_product = product * 256 + (key_high.to(tl.float32) * 256 + key_low.to(tl.float32))
        product = tl.where(is_atom[None, :], key_product, product)
    cell = (place[None, :] * num_texts + t[:, None]) * tl.cast(num_videos, tl.int64) + video[None, :]
    tl.store(product_ptr + cell, product, mask=in_t[:, None] & is_row[None, :])


@triton.jit
def _along(x_ptr, plane, ptr, capacity, in_pair, COUNT: tl.constexpr, TOGETHER: tl.constexpr):
    """The sum over the atoms of a row times x."""
    total = tl.zeros_like(in_pair).to(tl.float32)
    for a in tl.range(COUNT, loop_unroll_factor=TOGETHER):
        x = tl.load(x_ptr + a * plane, mask=in_pair, other=0.0)
        total += x * tl.load(ptr + a * capacity, mask=in_pair, other=0.0)
    return total


@triton.jit
def _quadratic(x_ptr, plane, ptr, capacity, in_pair, COUNT: tl.constexpr, TOGETHER: tl.constexpr):
    """x · matrix · x, of whose matrix the lower triangle is kept."""
    total = tl.zeros_like(in_pair).to(tl.float32)
    for i in range(COUNT):
        row = ptr + i * (i + 1) // 2 * capacity
        inner = tl.zeros_like(total)
        for j in tl.range(i, loop_unroll_factor=TOGETHER):
            x = tl.load(x_ptr + j * plane, mask=in_pair, other=0.0)
            inner += x * tl.load(row + j * capacity, mask=in_pair, other=0.0)
        x = tl.load(x_ptr + i * plane, mask=in_pair, other=0.0)
        total += x * (2 * inner + x * tl.load(row + i * capacity, mask=in_pair, other=0.0))
    return total


BOUNDS_CONFIGS = shapes_of(("VIDEOS", "TOGETHER"), [(32, 2, 8, 1), (32, 1, 8, 1), (16, 4, 8, 1)])
"""Videos of a program, and steps of its sums that wait for memory together."""


@triton.autotune(
    BOUNDS_CONFIGS,
    key=["DIM", "FRAMES", "HEADS"],
    restore_value=["product_ptr"],  # the kernel writes where it has read
    cache_results=True,
)
@triton.jit(do_not_specialize=["num_texts"])
def _bounds_kernel(
    product_ptr, text_numbers_ptr, numbers_ptr, shared_ptr, lower_ptr, upper_ptr, num_texts, num_videos,
    capacity, inverse_temperature, DIM: tl.constexpr, FRAMES: tl.constexpr, HEADS: tl.constexpr,
    SIGN: tl.constexpr,
    CORRECTS_TEXT: tl.constexpr, POOL_MEAN: tl.constexpr, ROWS: tl.constexpr, NUMBERS: tl.constexpr,
    ROUND: tl.constexpr, FORM: tl.constexpr, TEXTS: tl.constexpr, VIDEOS: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """TEXTS × VIDEOS pairs. What a pair has for every atom takes the place of its product: first the logit,
    then the weight, then the difference from even attention. Loops over what is there compile in seconds; the
    same unrolled, in registers, took minutes.
    """
    ATOMS: tl.constexpr = FRAMES * HEADS
    num_blocks = tl.cdiv(num_texts, TEXTS)
    t = (tl.program_id(0) % num_blocks) * TEXTS + tl.arange(0, TEXTS)
    v = (tl.program_id(0) // num_blocks) * VIDEOS + tl.arange(0, VIDEOS)
    in_pair = (t < num_texts)[:, None] & (v < num_videos)[None, :]
    # What belongs to a text, or to a video, is read for each pair: all numbers of a pair are in one thread.
    t = tl.broadcast_to(t[:, None], (TEXTS, VIDEOS))
    v = tl.broadcast_to(v[None, :], (TEXTS, VIDEOS))
    plane = num_texts * tl.cast(num_videos, tl.int64)
    pair = t * tl.cast(num_videos, tl.int64) + v
    capacity = tl.cast(capacity, tl.int64)
    row = numbers_ptr + v
    number = row + ROWS * ATOMS * capacity
    form = number + (NUMBERS + 3 * HEADS) * capacity

    text_number = text_numbers_ptr + 6 * t
    text_scale = tl.load(text_number, mask=in_pair, other=0.0)
    length = tl.load(text_number + 1, mask=in_pair, other=1.0)
    text_variance = tl.load(text_number + 2, mask=in_pair, other=1.0)
    level = tl.load(text_number + 3, mask=in_pair, other=0.0)
    error = tl.load(text_number + 4, mask=in_pair, other=0.0)  # of a product, over a length

    # Products with the two vectors, and what LayerNorm 1 divides the gap by.
    extra = product_ptr + ATOMS * plane + pair
    mean_high = tl.load(extra, mask=in_pair, other=0.0)
    mean_low = tl.load(extra + plane, mask=in_pair, other=0.0)
    even_high = tl.load(extra + 2 * plane, mask=in_pair, other=0.0)
    even_low = tl.load(extra + 3 * plane, mask=in_pair, other=0.0)
    text_mean = (mean_high * 256 + mean_low) * text_scale * number_of(number, 0, capacity, in_pair)
    text_even = (even_high * 256 + even_low) * text_scale * number_of(number, 1, capacity, in_pair)
    mean_length = number_of(number, 7, capacity, in_pair)
    mean_error = error * mean_length
    own_variance, own_level = number_of(number, 4, capacity, in_pair), number_of(number, 5, capacity, in_pair)
    variance = text_variance + own_variance - 2 * (text_mean / DIM - level * own_level)
    slack = 2 / DIM * (mean_error + length * number_of(number, 6, capacity, in_pair)) + ROUND * (
        text_variance + own_variance + level * level + own_level * own_level
    )
    constant3 = tl.load(shared_ptr)
    scaled_sq = tl.load(shared_ptr + 1)
    eps = tl.load(shared_ptr + 2)
    root3 = tl.load(shared_ptr + 3)
    root_scaled = tl.load(shared_ptr + 4)
    scale_low = tl.rsqrt(tl.maximum(variance + slack, 0.0) + eps) * (1 - ROUND)
    scale_high = tl.rsqrt(tl.maximum(variance - slack, 0.0) + eps) * (1 + ROUND)
    scale = (scale_low + scale_high) / 2

    # Logits, and how far they may be off. Barriers, because a number may be read by another thread.
    atom = product_ptr + pair
    largest = 0 * scale
    for a in range(ATOMS):
        bias = tl.load(row + (2 * ATOMS + a) * capacity, mask=in_pair, other=0.0)
        own = tl.load(row + (ATOMS + a) * capacity, mask=in_pair, other=0.0)
        key_scale = SIGN * tl.load(row + a * capacity, mask=in_pair, other=0.0)
        key_text = tl.load(atom + a * plane, mask=in_pair, other=0.0) * key_scale * text_scale
        is_attended = bias > -1e30
        logit = tl.where(is_attended, (own - key_text) * scale + bias, -1e38)
        tl.store(atom + a * plane, logit, mask=in_pair)
        largest = tl.maximum(largest, tl.where(is_attended, tl.abs(own) + tl.abs(key_text), 0.0))
    tl.debug_barrier()
    key_error = length * number_of(number, 2, capacity, in_pair)
    key_error += error * number_of(number, 3, capacity, in_pair)
    away = (
        key_error * scale_high
        + largest * ((scale_high - scale_low) / 2 + 4 * ROUND * scale)
        + 4 * ROUND * (1 + number_of(number, 23, capacity, in_pair))
    )

    # Attention, head by head: its weights, and how much of them can lie elsewhere.
    most2 = number_of(number, 20, capacity, in_pair)
    most3 = number_of(number, 21, capacity, in_pair)
    most = number_of(number, 22, capacity, in_pair)
    off2, off3, off = ROUND * most2 + 0 * scale, ROUND * most3 + 0 * scale, ROUND * most + 0 * scale
    bounded = tl.minimum(away, 40.0)
    grows = 2 * bounded * tl.exp(2 * bounded) * (1 + ROUND)  # at least e^2ε − 1
    for head in range(HEADS):
        of_head = atom + head * FRAMES * plane
        top = tl.load(of_head, mask=in_pair, other=0.0)
        for f in range(1, FRAMES):
            top = tl.maximum(top, tl.load(of_head + f * plane, mask=in_pair, other=0.0))
        total = 0 * top
        for f in range(FRAMES):
            total += tl.exp(tl.load(of_head + f * plane, mask=in_pair, other=0.0) - top)
        tl.debug_barrier()
        for f in range(FRAMES):
            logit = tl.load(of_head + f * plane, mask=in_pair, other=0.0)
            tl.store(of_head + f * plane, tl.exp(logit - top) / total, mask=in_pair)
        rest = tl.maximum(1 - 1 / total, 0.0) + ROUND  # the heaviest has weight 1 / total
        few = rest * grows * tl.maximum(1 - rest, 0.0) / (1 + rest * grows)
        at_most = tl.minimum(away / 2, 1.0)
        is_few = (rest * (1 + tl.exp(bounded)) < 1) & (away <= 40)
        moved = tl.where(is_few, tl.minimum(few, at_most), at_most) * (1 + ROUND) + 1e-28
        of_head = number + (NUMBERS + head) * capacity
        off2 += moved * tl.load(of_head, mask=in_pair, other=0.0)
        off3 += moved * tl.load(of_head + HEADS * capacity, mask=in_pair, other=0.0)
        off += moved * tl.load(of_head + 2 * HEADS * capacity, mask=in_pair, other=0.0)
    tl.debug_barrier()

    # σ2 and N: computed, and between which two numbers they lie.
    TRIANGLE: tl.constexpr = ATOMS * (ATOMS + 1) // 2
    square2 = tl.maximum(_quadratic(atom, plane, form, capacity, in_pair, ATOMS, TOGETHER), 0.0)
    low2 = tl.maximum(root_of(square2 - FORM * most2 * most2) - off2, 0.0) * (1 - ROUND)
    high2 = (root_of(square2 + FORM * most2 * most2) + off2) * (1 + ROUND)
    sigma2 = tl.sqrt(square2 + eps)
    low2 = tl.sqrt(low2 * low2 + eps) * (1 - ROUND)
    high2 = tl.sqrt(high2 * high2 + eps) * (1 + ROUND)
    away2 = tl.maximum(high2 - sigma2, sigma2 - low2) + ROUND * sigma2
    linear3 = _along(atom, plane, row + 3 * ATOMS * capacity, capacity, in_pair, ATOMS, TOGETHER)
    square3 = _quadratic(atom, plane, form + TRIANGLE * capacity, capacity, in_pair, ATOMS, TOGETHER)
    square3 = tl.maximum(square3 + sigma2 * (linear3 + sigma2 * constant3), 0.0)
    off3 += root3 * away2
    most3 = most3 + root3 * sigma2
    low3 = tl.maximum(root_of(square3 - FORM * most3 * most3) - off3, 0.0) * (1 - ROUND)
    high3 = (root_of(square3 + FORM * most3 * most3) + off3) * (1 + ROUND)
    inverse = tl.rsqrt(tl.maximum(square3 + eps * sigma2 * sigma2, 1e-30))
    inverse_high = tl.rsqrt(tl.maximum(low3 * low3 + eps * low2 * low2, 1e-30)) * (1 + ROUND)
    inverse_low = tl.rsqrt(tl.maximum(high3 * high3 + eps * high2 * high2, 1e-30)) * (1 - ROUND)
    share = sigma2 * inverse

    # The increment, as far as it is from that at even attention.
    even_y, even_share = number_of(number, 13, capacity, in_pair), number_of(number, 14, capacity, in_pair)
    size = 0 * scale
    tl.debug_barrier()
    for a in range(ATOMS):
        is_attended = tl.load(row + (2 * ATOMS + a) * capacity, mask=in_pair, other=0.0) > -1e30
        weight = tl.load(atom + a * plane, mask=in_pair, other=0.0)
        y = weight * inverse - tl.where(is_attended, even_y, 0.0)
        tl.store(atom + a * plane, y, mask=in_pair)
        size += tl.abs(y)
    tl.debug_barrier()
    more = share - even_share
    size = size * most + tl.abs(more) * root_scaled
    with_scaled = _along(atom, plane, row + 6 * ATOMS * capacity, capacity, in_pair, ATOMS, TOGETHER)
    apart_sq = _quadratic(atom, plane, form + 2 * TRIANGLE * capacity, capacity, in_pair, ATOMS, TOGETHER)
    apart_sq = tl.maximum(apart_sq + more * (2 * with_scaled + more * scaled_sq), 0.0)
    apart = tl.sqrt(apart_sq + FORM * size * size) * (1 + ROUND)
    reach = most * inverse + share * root_scaled + number_of(number, 16, capacity, in_pair)
    off += root_scaled * away2
    turn = tl.maximum(inverse_high - inverse, inverse - inverse_low) + ROUND * inverse
    image = (number_of(number, 15, capacity, in_pair) + apart) / inverse
    radius = (off * inverse_high + image * turn) * (1 + ROUND) + 4 * ROUND * reach

    even_sq = number_of(number, 12, capacity, in_pair)
    even_length = tl.sqrt(even_sq)
    along = more * number_of(number, 17, capacity, in_pair)
    along += _along(atom, plane, row + 4 * ATOMS * capacity, capacity, in_pair, ATOMS, TOGETHER)
    square = even_sq + 2 * along + apart_sq
    square_error = 4 * ROUND * (even_sq + even_length * size) + FORM * size * size
    pooled = number_of(number, 19, capacity, in_pair) + more * number_of(number, 18, capacity, in_pair)
    pooled += _along(atom, plane, row + 5 * ATOMS * capacity, capacity, in_pair, ATOMS, TOGETHER)
    pooled_error = 4 * ROUND * mean_length * (even_length + size)
    even_moved = number_of(number, 11, capacity, in_pair)
    text_error = error * (even_length + even_moved) + length * (apart + even_moved)

    # How far from the mean frame the text can pool to.
    pool_radius = pool_radius_of(number, capacity, in_pair, length, inverse_temperature, POOL_MEAN, ROUND)

    # The cosine of two vectors in balls.
    length_sq = tl.load(text_number + 5, mask=in_pair, other=1.0)
    mean_sq = mean_length * mean_length
    if CORRECTS_TEXT:
        product_mid, product_error = text_mean + pooled, mean_error + pooled_error
        left_sq = length_sq + 2 * text_even + square
        left_error = 2 * text_error + square_error + 4 * ROUND * (length_sq + 2 * tl.abs(text_even) + even_sq)
        right_sq, right_error = mean_sq + 0 * scale, 4 * ROUND * mean_sq + 0 * scale
        left_radius, right_radius = radius, pool_radius
    else:
        product_mid, product_error = text_mean + text_even, mean_error + text_error
        left_sq, left_error = length_sq + 0 * scale, 4 * ROUND * length_sq + 0 * scale
        right_sq = mean_sq + 2 * pooled + square
        right_error = 2 * pooled_error + square_error + 4 * ROUND * (mean_sq + 2 * tl.abs(pooled) + even_sq)
        left_radius, right_radius = 0 * scale, radius + pool_radius
    product_error += 4 * ROUND * (length * mean_length + tl.abs(product_mid))
    lower, upper = cosine_bounds_of(
        product_mid - product_error, product_mid + product_error, left_sq - left_error, left_sq + left_error,
        right_sq - right_error, right_sq + right_error, left_radius, right_radius, ROUND,
    )  # fmt: skip
    tl.store(lower_ptr + pair, lower, mask=in_pair)
    tl.store(upper_ptr + pair, upper, mask=in_pair)
