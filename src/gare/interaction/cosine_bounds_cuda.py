"""What both rungs of bounds on a GPU end with (Triton): the cosine of two vectors in balls.

`ball_bounds_cuda.py` and `key_bounds_cuda.py` are the rungs. The reference in float64 is `score_bounds.py`;
`resident_cards.py` says what differs. Every `ROUND` stands for what float32 may lose there.

Imports Triton, so others import this file only when it can run.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import triton
import triton.language as tl

TEXTS_AT_ONCE = 16
"""The fewest rows that tensor cores multiply."""


@dataclass(frozen=True)
class Rules:
    """What all pairs have in common: how the interaction pools, and what it corrects."""

    corrects_text: bool
    sign: int
    temperature: float | None
    """The temperature of text-conditioned pooling; None where frames are averaged."""

    @property
    def inverse_temperature(self) -> float:
        return 0.0 if self.temperature is None else 1 / self.temperature


def shapes_of(names: tuple[str, ...], shapes: list[tuple[int, ...]]) -> list[triton.Config]:
    """Shapes to be timed once: the values of `names`, warps, stages."""
    if os.environ.get("TRITON_INTERPRET") == "1":  # nothing to time
        shapes = shapes[:1]
    return [
        triton.Config(dict(zip(names, shape, strict=False)), num_warps=shape[-2], num_stages=shape[-1])
        for shape in shapes
    ]


@triton.jit
def number_of(ptr, place: tl.constexpr, capacity, in_pair):
    """A number of each video."""
    return tl.load(ptr + place * capacity, mask=in_pair, other=0.0)


@triton.jit
def root_of(x):
    return tl.sqrt(tl.maximum(x, 0.0))


@triton.jit
def pool_radius_of(
    number, capacity, is_in, length, inverse_temperature, POOL_MEAN: tl.constexpr, ROUND: tl.constexpr
):  # fmt: skip
    """How far from the mean frame a text of this length can pool to."""
    radius = number_of(number, 8, capacity, is_in) + 0 * length
    if not POOL_MEAN:
        kappa = 2 * length * radius * inverse_temperature
        growth = (1 + tl.exp(tl.minimum(kappa, 20.0))) / 2  # at least (e^κ − 1) / κ
        spread = number_of(number, 9, capacity, is_in) * length * inverse_temperature * growth * (1 + ROUND)
        reach = tl.where(kappa < 20, spread + number_of(number, 10, capacity, is_in), radius)
        radius = tl.minimum(radius, reach)
    return radius


@triton.jit
def cosine_bounds_of(
    least_product, most_product, left_least, left_most, right_least, right_most, left_radius, right_radius,
    ROUND: tl.constexpr,
):  # fmt: skip
    """The cosine of two vectors in balls, from products and squared lengths of the centres."""
    least = 1e-12  # the square of LEAST_LENGTH
    left_low = tl.sqrt(tl.maximum(left_least, least)) * (1 - ROUND)
    left_high = tl.sqrt(tl.maximum(left_most, least)) * (1 + ROUND)
    right_low = tl.sqrt(tl.maximum(right_least, least)) * (1 - ROUND)
    right_high = tl.sqrt(tl.maximum(right_most, least)) * (1 + ROUND)
    short, long = left_low * right_low, left_high * right_high
    high_cosine = most_product / tl.where(most_product >= 0, short, long)
    low_cosine = least_product / tl.where(least_product >= 0, long, short)
    high_cosine = tl.minimum(high_cosine + 4 * ROUND, 1.0)
    low_cosine = tl.maximum(low_cosine - 4 * ROUND, -1.0)

    # Both balls as one angle from the origin, by its sine and cosine.
    is_safe = (left_radius + 1e-6 < left_low) & (right_radius + 1e-6 < right_low) & (long < 1e38)
    left_sine = tl.minimum(left_radius / left_low * (1 + ROUND), 1.0)
    right_sine = tl.minimum(right_radius / right_low * (1 + ROUND), 1.0)
    left_cosine, right_cosine = root_of(1 - left_sine * left_sine), root_of(1 - right_sine * right_sine)
    sine = left_sine * right_cosine + right_sine * left_cosine
    cosine = left_cosine * right_cosine - left_sine * right_sine
    upper = high_cosine * cosine + root_of((1 - high_cosine) * (1 + high_cosine)) * sine + 8 * ROUND
    lower = low_cosine * cosine - root_of((1 - low_cosine) * (1 + low_cosine)) * sine - 8 * ROUND
    upper = tl.where(is_safe & (high_cosine < cosine), tl.minimum(upper, 1.0), 1.0)
    lower = tl.where(is_safe & (low_cosine > -cosine), tl.maximum(lower, -1.0), -1.0)
    # What is not a number, after an overflow, is no bound.
    return tl.where(lower == lower, lower, -1.0), tl.where(upper == upper, upper, 1.0)
