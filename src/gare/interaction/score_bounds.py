"""Bounds of scores from two products a pair: a video whose upper bound is below the tenth best score is out.

Every score here is the cosine of two vectors. Each lies in a ball whose centre depends on one side of the
pair alone: on the text, or on the mean frame and the increment at even attention. The angle between the two
vectors differs from that between the centres by no more than the balls are wide, seen from the origin.
`docs/proof.md` derives this, and what rounding adds; `increment_ball.py` finds the ball of the increments.

Centres may be stored in any precision: what rounding moves them is added to the radius.

Shapes: T texts, V videos, D embedding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gare.cpu_products import multiply
from gare.interaction.pair_blocks import block_budget
from gare.interaction.score_cards import map_tensors
from gare.types import Rows, block_slices

LEAST_LENGTH = 1e-6
"""Vectors that may be as short as this have no direction to speak of: their scores are not bounded."""
SLACK = 1e-9
"""Added to every bound: more than all that is computed in float64 can be off."""


@dataclass(frozen=True)
class ScoreBounds:
    """Where the exact score of each pair lies, [T, V], in float64."""

    lower_TV: Tensor
    upper_TV: Tensor

    def narrowed(self, other: ScoreBounds) -> ScoreBounds:
        """Other bounds of the same scores are known as well."""
        return ScoreBounds(
            torch.maximum(self.lower_TV, other.lower_TV), torch.minimum(self.upper_TV, other.upper_TV)
        )


@dataclass(frozen=True)
class Interval:
    """Numbers that are known to lie between two others, elementwise, in float64."""

    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, value: Tensor, error: Tensor | float) -> Interval:
        """`value`, give or take `error`."""
        return cls(value - error, value + error)

    def __add__(self, other: Interval | Tensor) -> Interval:
        low, high = (other.low, other.high) if isinstance(other, Interval) else (other, other)
        return Interval(self.low + low, self.high + high)

    def within(self, other: Interval) -> Interval:
        """What lies in both."""
        return Interval(torch.maximum(self.low, other.low), torch.minimum(self.high, other.high))

    def widened(self, error: Tensor | float) -> Interval:
        """The number, give or take `error` more."""
        return Interval(self.low - error, self.high + error)

    def doubled(self) -> Interval:
        """Twice the number."""
        return Interval(2 * self.low, 2 * self.high)

    def times(self, factor: Interval) -> Interval:
        """Times a number that is not negative."""
        return Interval(
            torch.minimum(self.low * factor.low, self.low * factor.high)
            - SLACK * self.low.abs() * factor.high,
            torch.maximum(self.high * factor.low, self.high * factor.high)
            + SLACK * self.high.abs() * factor.high,
        )

    @property
    def mT(self) -> Interval:
        """The same with its last two dimensions exchanged."""
        return Interval(self.low.mT, self.high.mT)


@dataclass(frozen=True)
class Balls:
    """A ball for each of O owners: what is not known exactly lies inside it."""

    centre_OD: Tensor
    radius_O: Tensor
    """float64; what storing the centre in its precision has moved is part of it."""
    length_O: Tensor
    """float64: of the centre as it is stored."""
    moved_O: Tensor
    """float64: how far the centre has been moved by storing it."""
    spread_O: Tensor
    """float64: the largest variance of the owner's frames in any direction; zero where it does not matter."""

    @classmethod
    def around(
        cls, centre_OD: Tensor, radius_O: Tensor, dtype: torch.dtype, spread_O: Tensor | None = None
    ) -> Balls:
        """Balls whose centres are stored in `dtype`."""
        stored_OD = centre_OD.to(dtype)
        moved_O = (stored_OD.double() - centre_OD.double()).norm(dim=-1) * (1 + SLACK)
        radius_O = (radius_O.double() + moved_O) * (1 + SLACK)
        spread_O = torch.zeros_like(moved_O) if spread_O is None else spread_O.double()
        return cls(stored_OD, radius_O, stored_OD.double().norm(dim=-1), moved_O, spread_O)


@dataclass(frozen=True)
class IncrementSlabs:
    """Between which two planes, and which two lengths, all increments of an owner lie; float64."""

    square: Interval
    """The squares of their lengths, [O]."""
    with_pooled: Interval
    """Their products with the stored mean frame, [O]."""


@dataclass(frozen=True)
class BoundCards:
    """What the bounds of every score of a video need: two vectors, or one, and a few numbers."""

    pooled: Balls
    """Around the mean frame: every pooled frame vector."""
    increment: Balls | None = None
    """Around the increment at even attention: every increment; None without increments over frames."""
    between_O: Tensor | None = None
    """float64: the product of the two centres."""
    slabs: IncrementSlabs | None = None
    """What is known of the increments besides their ball."""

    @classmethod
    def join(cls, pooled: Balls, increment: Balls, slabs: IncrementSlabs) -> BoundCards:
        """The cards of these balls; what the ball of the increments leaves of the slabs."""
        between_O = torch.linalg.vecdot(pooled.centre_OD.double(), increment.centre_OD.double())
        length_O, radius_O = increment.length_O * (1 + SLACK), increment.radius_O
        least_O = (increment.length_O * (1 - SLACK) - radius_O).clamp_min(0)
        of_ball = IncrementSlabs(
            Interval(least_O.square(), (length_O + radius_O).square()),
            Interval.of(between_O, pooled.length_O * (radius_O + SLACK * length_O) * (1 + SLACK)),
        )
        left = IncrementSlabs(
            slabs.square.within(of_ball.square), slabs.with_pooled.within(of_ball.with_pooled)
        )
        return cls(pooled, increment, between_O, left)

    def __len__(self) -> int:
        return len(self.pooled.radius_O)

    def __getitem__(self, rows: Rows) -> BoundCards:
        return map_tensors(self, lambda tensor: tensor[rows])

    def to(self, device: torch.device | str) -> BoundCards:
        """The same cards on another device."""
        return map_tensors(self, lambda tensor: tensor.to(device))


def product_dtype() -> torch.dtype:
    """What products are summed in: float32, or float64 where torch may shorten it to TF32 or bfloat16."""
    # torch 2.9 and later; before, these have no such setting.
    backends = (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
    is_full = all(getattr(backend, "fp32_precision", "none") in ("none", "ieee") for backend in backends)
    try:
        is_full = is_full and torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # both ways to set it were used
        is_full = False
    return torch.float32 if is_full else torch.float64


def product_error(dim: int, dtype: torch.dtype) -> float:
    """What a product of two vectors may be off as a share of their lengths, summed in float32 or float64.

    However a sum of D products is ordered, its error is at most γ|x||y| with γ = Du / (1 − Du) and u = 2⁻²⁴
    (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1). Two u more are for a text that has
    to be rounded.
    """
    terms = (dim + 2) * (2.0**-53 if dtype == torch.float64 else 2.0**-24)
    return terms / (1 - terms)


def stored_products(rows_ND: Tensor, text_TD: Tensor, dtype: torch.dtype) -> Tensor:
    """The products [N, T] of stored rows with texts, summed in `dtype`.

    A few rows at a time are widened into memory that is used again: new memory for all of them would take
    longer than their products.
    """
    text_TD, dim = text_TD.to(dtype), text_TD.shape[-1]
    if rows_ND.dtype == dtype:
        return multiply(rows_ND, text_TD)
    size = max(1, block_budget(rows_ND.device) // dim)
    wide_ND = rows_ND.new_empty(min(len(rows_ND), size), dim, dtype=dtype)
    product_NT = rows_ND.new_empty(len(rows_ND), len(text_TD), dtype=dtype)
    for rows in block_slices(len(rows_ND), size):
        few_ND = wide_ND[: rows.stop - rows.start].copy_(rows_ND[rows])
        product_NT[rows] = multiply(few_ND, text_TD)
    return product_NT


def product_interval(text_TD: Tensor, balls: Balls) -> Interval:
    """The products [T, O] of texts with stored centres, and what float32 may have lost of them.

    Besides `product_error` that is what numbers too small for float32 add up to.
    """
    is_double = text_TD.dtype == balls.centre_OD.dtype == torch.float64
    dtype, dim = torch.float64 if is_double else product_dtype(), text_TD.shape[-1]
    product_TO = stored_products(balls.centre_OD, text_TD, dtype).double().mT
    length_T1 = text_TD.double().norm(dim=-1, keepdim=True)
    return Interval.of(product_TO, product_error(dim, dtype) * length_T1 * balls.length_O + dim * 1e-37)


def cosine_bounds(product: Interval, left_sq: Interval, right_sq: Interval, width: Tensor) -> ScoreBounds:
    """The cosine of two vectors, each in a ball, from the products of the centres.

    Args:
        product: of the two centres.
        left_sq, right_sq: squares of their lengths.
        width: how wide the two balls are as angles from the origin, together; π where one holds the origin.

    A vector without a direction to speak of leaves the score open: a cosine divides by no less than 1e-8.
    """
    least = [square.low.clamp_min(LEAST_LENGTH**2).sqrt() for square in (left_sq, right_sq)]
    most = [square.high.clamp_min(LEAST_LENGTH**2).sqrt() for square in (left_sq, right_sq)]
    short, long = least[0] * least[1], most[0] * most[1]
    # A positive product is largest over the shortest vectors, a negative one over the longest.
    high = torch.where(product.high >= 0, product.high / short, product.high / long)
    low = torch.where(product.low >= 0, product.low / long, product.low / short)
    is_long = (left_sq.low > LEAST_LENGTH**2) & (right_sq.low > LEAST_LENGTH**2)
    width = torch.where(is_long, width, torch.pi)
    least_angle = high.clamp(-1, 1).acos() - width
    most_angle = low.clamp(-1, 1).acos() + width
    # What is not a number, after numbers too large for a precision, is no bound.
    return ScoreBounds(
        lower_TV=(most_angle.clamp(max=torch.pi).cos() - SLACK).clamp_min(-1).nan_to_num(nan=-1.0),
        upper_TV=(least_angle.clamp(min=0).cos() + SLACK).clamp_max(1).nan_to_num(nan=1.0),
    )


def angle_of(radius: Tensor, length: Interval) -> Tensor:
    """The angle that a ball of this radius covers, its centre at this distance from the origin."""
    is_safe = radius + LEAST_LENGTH < length.low
    ratio = (radius / length.low.clamp_min(LEAST_LENGTH)).clamp_max(1)
    return torch.where(is_safe, ratio.asin() + SLACK, torch.full_like(ratio, torch.pi))


def square_of(length: Tensor) -> Interval:
    """The square of a length that was computed in float64."""
    return Interval(length.square() * (1 - SLACK), length.square() * (1 + SLACK))


def length_of(square: Interval) -> Interval:
    """The length from its square."""
    return Interval(
        square.low.clamp_min(0).sqrt() * (1 - SLACK), square.high.clamp_min(0).sqrt() * (1 + SLACK)
    )
