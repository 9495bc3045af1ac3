"""Bounds of scores on a GPU by ball and slabs (Triton): the most that each pair can score, for every video.

One kernel reads two vectors of a video and a few numbers, and writes bounds: products stay in registers. The
names are those of `increment_ball.py`, which is the reference in float64; `resident_cards.py` says what
differs.

Imports Triton, so others import this file only when it can run. Shapes: T texts, V videos, S rows of a card,
G groups of videos, D embedding.
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
    shapes_of,
)
from gare.interaction.kernel_calls_cuda import launch
from gare.interaction.resident_cards import NUM_ROWS, ROUND, ResidentCards, TextPlanes

GROUP = 64
"""Videos of one program, which says which of them can score most."""


def first_bounds(
    text: TextPlanes, cards: ResidentCards, is_here_V: Tensor, upper_TV: Tensor, rules: Rules
) -> tuple[Tensor, Tensor]:
    """Upper bounds of all scores from two products a pair, into `upper_TV`; −∞ for what is not there.

    Returns:
        Of each group of GROUP videos the largest bound, and the place of its video, both [T, groups].
    """
    num_texts, _, dim = text.planes_T2D.shape
    num_videos, num_atoms = len(cards), cards.num_frames * cards.num_heads
    num_groups = triton.cdiv(num_videos, GROUP)
    best_TG = torch.empty(num_texts, num_groups, dtype=torch.float32, device=upper_TV.device)
    place_TG = torch.empty(num_texts, num_groups, dtype=torch.int32, device=upper_TV.device)
    num_programs = num_groups * triton.cdiv(num_texts, TEXTS_AT_ONCE)
    tensors = (
        text.planes_T2D,
        cards.high_VSD,
        text.numbers_T6,
        cards.numbers_VK,
        is_here_V,
        upper_TV,
        best_TG,
        place_TG,
    )
    sizes = (num_texts, num_videos, num_groups, upper_TV.stride(0), cards.numbers_VK.stride(0))
    constants: dict[str, Any] = {
        "DIM": dim,
        "ATOMS": num_atoms,
        "CORRECTS_TEXT": rules.corrects_text,
        "POOL_MEAN": rules.temperature is None,
        "ROWS": NUM_ROWS,
        "ROUND": ROUND,
        "TEXTS": TEXTS_AT_ONCE,
        "VIDEOS": GROUP,
    }
    launch(_first_kernel, lambda _: num_programs, tensors, (*sizes, rules.inverse_temperature), constants)
    return best_TG, place_TG


FIRST_CONFIGS = shapes_of(("STEP",), [(128, 4, 3), (128, 8, 3)])


@triton.autotune(FIRST_CONFIGS, key=["DIM"], cache_results=True)
@triton.jit(do_not_specialize=["num_texts"])
def _first_kernel(
    text_ptr, high_ptr, text_numbers_ptr, numbers_ptr, here_ptr, upper_ptr, best_ptr, place_ptr, num_texts,
    num_videos, num_groups, upper_size, row_size, inverse_temperature, DIM: tl.constexpr, ATOMS: tl.constexpr,
    CORRECTS_TEXT: tl.constexpr, POOL_MEAN: tl.constexpr, ROWS: tl.constexpr, ROUND: tl.constexpr,
    TEXTS: tl.constexpr, VIDEOS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """TEXTS × VIDEOS pairs: two products of words of two bytes, then bounds by ball and by slabs."""
    num_blocks = tl.cdiv(num_texts, TEXTS)
    t = (tl.program_id(0) % num_blocks) * TEXTS + tl.arange(0, TEXTS)
    group = tl.program_id(0) // num_blocks
    v = group * VIDEOS + tl.arange(0, VIDEOS)
    in_t, in_v = t < num_texts, v < num_videos

    # High with high bytes, high with low ones and the other way round, low with low: of the mean frame, then
    # of the increment at even attention.
    mean_hh = tl.zeros([TEXTS, VIDEOS], tl.int32)
    mean_hl = tl.zeros([TEXTS, VIDEOS], tl.int32)
    mean_ll = tl.zeros([TEXTS, VIDEOS], tl.int32)
    even_hh = tl.zeros([TEXTS, VIDEOS], tl.int32)
    even_hl = tl.zeros([TEXTS, VIDEOS], tl.int32)
    even_ll = tl.zeros([TEXTS, VIDEOS], tl.int32)
    text_row = text_ptr + t.to(tl.int64)[:, None] * (2 * DIM)
    card = high_ptr + (v.to(tl.int64) * (ATOMS + 4) + ATOMS)[None, :] * DIM
    for first in range(0, DIM, STEP):
        d = first + tl.arange(0, STEP)
        in_text, in_card = in_t[:, None], in_v[None, :]
        if DIM % STEP != 0:
            in_text, in_card = in_text & (d < DIM)[None, :], in_card & (d < DIM)[:, None]
        text_high = tl.load(text_row + d[None, :], mask=in_text, other=0)
        text_low = tl.load(text_row + DIM + d[None, :], mask=in_text, other=0)
        mean_high = tl.load(card + d[:, None], mask=in_card, other=0)
        mean_low = tl.load(card + DIM + d[:, None], mask=in_card, other=0)
        even_high = tl.load(card + 2 * DIM + d[:, None], mask=in_card, other=0)
        even_low = tl.load(card + 3 * DIM + d[:, None], mask=in_card, other=0)
        mean_hh = tl.dot(text_high, mean_high, mean_hh, out_dtype=tl.int32)
        mean_hl = tl.dot(text_high, mean_low, mean_hl, out_dtype=tl.int32)
        mean_hl = tl.dot(text_low, mean_high, mean_hl, out_dtype=tl.int32)
        mean_ll = tl.dot(text_low, mean_low, mean_ll, out_dtype=tl.int32)
        even_hh = tl.dot(text_high, even_high, even_hh, out_dtype=tl.int32)
        even_hl = tl.dot(text_high, even_low, even_hl, out_dtype=tl.int32)
        even_hl = tl.dot(text_low, even_high, even_hl, out_dtype=tl.int32)
        even_ll = tl.dot(text_low, even_low, even_ll, out_dtype=tl.int32)

    number = numbers_ptr + v.to(tl.int64)[None, :] * row_size + ROWS * ATOMS
    in_row = in_v[None, :]
    text_number = text_numbers_ptr + 6 * t[:, None]
    text_scale = tl.load(text_number, mask=in_t[:, None], other=0.0)
    length = tl.load(text_number + 1, mask=in_t[:, None], other=1.0)
    error = tl.load(text_number + 4, mask=in_t[:, None], other=0.0)  # of a product, over a length
    length_sq = tl.load(text_number + 5, mask=in_t[:, None], other=1.0)
    text_mean = (mean_hh.to(tl.float32) * 256 + mean_hl.to(tl.float32)) * 256 + mean_ll.to(tl.float32)
    text_even = (even_hh.to(tl.float32) * 256 + even_hl.to(tl.float32)) * 256 + even_ll.to(tl.float32)
    text_mean = text_mean * text_scale * number_of(number, 0, 1, in_row)
    text_even = text_even * text_scale * number_of(number, 1, 1, in_row)
    mean_length = number_of(number, 7, 1, in_row)
    even_length = tl.sqrt(number_of(number, 12, 1, in_row)) + number_of(number, 11, 1, in_row)
    mean_error = error * mean_length
    radius = number_of(number, 24, 1, in_row)
    text_error = error * even_length + length * radius
    along_low, along_high = number_of(number, 25, 1, in_row), number_of(number, 26, 1, in_row)
    square_low, square_high = number_of(number, 27, 1, in_row), number_of(number, 28, 1, in_row)
    pool_radius = pool_radius_of(number, 1, in_row, length, inverse_temperature, POOL_MEAN, ROUND)

    # By slabs: an increment is anywhere between them, its product with the text anywhere in the ball.
    mean_sq = mean_length * mean_length
    mean_least, mean_most = mean_sq * (1 - 4 * ROUND), mean_sq * (1 + 4 * ROUND)
    text_least, text_most = length_sq * (1 - 4 * ROUND), length_sq * (1 + 4 * ROUND)
    along = tl.maximum(tl.abs(along_low), tl.abs(along_high))
    none = 0 * pool_radius
    if CORRECTS_TEXT:
        slack = 4 * ROUND * (length * mean_length + along) + mean_error
        left_slack = 4 * ROUND * (length_sq + 2 * tl.abs(text_even) + square_high) + 2 * text_error
        shifted = length_sq + 2 * text_even
        _, upper = cosine_bounds_of(
            text_mean + along_low - slack, text_mean + along_high + slack, shifted + square_low - left_slack,
            shifted + square_high + left_slack, mean_least, mean_most, none, pool_radius, ROUND,
        )  # fmt: skip
    else:
        slack = 4 * ROUND * (length * mean_length + tl.abs(text_even) + text_error) + mean_error + text_error
        right_slack = 4 * ROUND * (mean_sq + 2 * along + square_high)
        _, upper = cosine_bounds_of(
            text_mean + text_even - slack, text_mean + text_even + slack, text_least, text_most,
            mean_sq + 2 * along_low + square_low - right_slack,
            mean_sq + 2 * along_high + square_high + right_slack, none, pool_radius, ROUND,
        )  # fmt: skip

    # By the ball around the increment at even attention.
    even_sq, even_moved = number_of(number, 12, 1, in_row), number_of(number, 11, 1, in_row)
    between = number_of(number, 19, 1, in_row)
    text_error = error * even_length + length * even_moved
    radius = radius + even_moved
    if CORRECTS_TEXT:
        slack = 4 * ROUND * (length + even_length) * mean_length + mean_error
        left_slack = 4 * ROUND * (length_sq + 2 * tl.abs(text_even) + even_sq) + 2 * text_error
        shifted = length_sq + 2 * text_even + even_sq
        _, of_ball = cosine_bounds_of(
            text_mean + between - slack, text_mean + between + slack, shifted - left_slack,
            shifted + left_slack, mean_least, mean_most, radius + none, pool_radius, ROUND,
        )  # fmt: skip
    else:
        slack = 4 * ROUND * length * (mean_length + even_length) + mean_error + text_error
        right_slack = 4 * ROUND * (mean_sq + 2 * even_length * mean_length + even_sq)
        shifted = mean_sq + 2 * between + even_sq
        _, of_ball = cosine_bounds_of(
            text_mean + text_even - slack, text_mean + text_even + slack, text_least, text_most,
            shifted - right_slack, shifted + right_slack, none, radius + pool_radius, ROUND,
        )  # fmt: skip
    upper = tl.minimum(upper, of_ball)
    is_here = tl.load(here_ptr + v, mask=in_v, other=0)
    upper = tl.where((is_here != 0)[None, :], upper, float("-inf"))
    pair = t.to(tl.int64)[:, None] * upper_size + v[None, :]
    tl.store(upper_ptr + pair, upper, mask=in_t[:, None] & in_v[None, :])
    best, place = tl.max(upper, axis=1, return_indices=True)
    of_group = t.to(tl.int64) * num_groups + group
    tl.store(best_ptr + of_group, best, mask=in_t)
    tl.store(place_ptr + of_group, group * VIDEOS + place, mask=in_t)
