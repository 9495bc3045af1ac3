"""Where the increments of a video can be, whatever the text: the net's attention cannot lead out of it.

The increment depends on the text through the attention weights alone, and those lie in a simplex. After them
come linear maps and two LayerNorms, so the increment is √D W ζ / N + b with ζ = Σ_a weight_a r_a + c σ2. Each
part is bounded over the simplex: a ball around the increment at even attention, between which two lengths it
stays, and between which two numbers its product with any vector. `docs/proof.md` has the derivation, with the
names used here.

Shapes: O owners of C context tokens each, H heads, A = H × C, D embedding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gare.interaction.increment_net import IncrementWeights
from gare.interaction.pair_blocks import centre
from gare.interaction.score_bounds import SLACK, Interval


@dataclass(frozen=True)
class IncrementRange:
    """All increments of each owner, in float64: fixed + (Σ_a weight_a atom_a + σ2 scaled) / N."""

    centre_OD: Tensor
    """The increment at even attention."""
    radius_O: Tensor
    """No increment is farther from it; infinite where attention can lead to a vector of no length, which a
    LayerNorm cannot bound."""
    mask_OC: Tensor
    atom_OHCD: Tensor
    scaled_D: Tensor
    fixed_D: Tensor
    sigma2: Interval
    divisor: Interval

    def along(self, vector_OD: Tensor) -> Interval:
        """The product of an increment with a vector of its owner, [O]."""
        free = self._over_divisor(self._towards(vector_OD))
        slack_O = SLACK * vector_OD.norm(dim=-1) * (self.fixed_D.norm() + self._longest() / self.divisor.low)
        fixed_O = vector_OD @ self.fixed_D
        return Interval(free.low + fixed_O - slack_O, free.high + fixed_O + slack_O)

    def square(self) -> Interval:
        """The square of an increment's length, [O]."""
        even_OD = self.centre_OD - self.fixed_D
        shortest_O = self._towards(F.normalize(even_OD, dim=-1)).low.clamp_min(0)
        longest_O, fixed_sq = self._longest(), self.fixed_D.square().sum()
        with_fixed = self._over_divisor(self._towards(self.fixed_D.expand_as(even_OD))).doubled()
        low_O = (shortest_O / self.divisor.high).square() + with_fixed.low + fixed_sq
        high_O = (longest_O / self.divisor.low).square() + with_fixed.high + fixed_sq
        slack_O = SLACK * (self.fixed_D.norm() + longest_O / self.divisor.low).square()
        return Interval((low_O - slack_O).clamp_min(0), high_O + slack_O)

    def _towards(self, vector_OD: Tensor) -> Interval:
        """The product of what is divided by N with a vector: it is linear in the weights and in σ2."""
        product_OHC = torch.einsum("ohcd,od->ohc", self.atom_OHCD, vector_OD)
        scaled = [(vector_OD @ self.scaled_D) * end_O for end_O in (self.sigma2.low, self.sigma2.high)]
        return Interval(
            _least(product_OHC, self.mask_OC) + torch.minimum(*scaled),
            _largest(product_OHC, self.mask_OC) + torch.maximum(*scaled),
        )

    def _longest(self) -> Tensor:
        fixed_O: Tensor = self.scaled_D.norm() * self.sigma2.high
        return _largest(self.atom_OHCD.norm(dim=-1), self.mask_OC) + fixed_O

    def _over_divisor(self, product: Interval) -> Interval:
        ends = self.divisor.low, self.divisor.high
        return Interval(
            torch.minimum(*(product.low / end_O for end_O in ends)),
            torch.maximum(*(product.high / end_O for end_O in ends)),
        )


def increment_range(context_OCD: Tensor, mask_OC: Tensor, net: IncrementWeights) -> IncrementRange:
    """Where every increment over these context tokens lies."""
    context_OCD = context_OCD.double().masked_fill(~mask_OC[..., None], 0)
    net = net.to(torch.float64)
    dim = context_OCD.shape[-1]
    residual_DD = torch.eye(dim).to(net.residual_weight) + net.residual_weight
    mixed_OHCD = _mixed(context_OCD, net)
    r_OHCD = centre(F.linear(mixed_OHCD * net.norm2_weight, residual_DD))
    c_D = centre(F.linear(net.norm2_bias, residual_DD, net.residual_bias))

    def after(z: Tensor) -> Tensor:
        """W: LayerNorm 3's scale, then the output layer."""
        return F.linear(z * net.norm3_weight, net.output_weight)

    even_OC = mask_OC / mask_OC.sum(dim=1, keepdim=True)

    def at_even(x_OHCD: Tensor) -> Tensor:
        return torch.einsum("oc,ohcd->ohd", even_OC.to(x_OHCD), x_OHCD)

    def largest(x_OHC: Tensor) -> Tensor:
        return _largest(x_OHC, mask_OC)

    def least(x_OHC: Tensor) -> Tensor:
        return _least(x_OHC, mask_OC)

    # σ2, what LayerNorm 2 divides by: between `low2` and `high2`.
    x0_OD = at_even(mixed_OHCD).sum(dim=1)
    towards_x0_OHC = torch.einsum("ohcd,od->ohc", mixed_OHCD, F.normalize(x0_OD, dim=-1))
    high2_O = _sigma(largest(mixed_OHCD.norm(dim=-1)), dim, net.eps)
    low2_O = _sigma(least(towards_x0_OHC).clamp_min(0), dim, net.eps)
    even2_O = _sigma(x0_OD.norm(dim=-1), dim, net.eps)
    off2_O = torch.maximum(high2_O - even2_O, even2_O - low2_O)

    # ζ and its image under W.
    r0_OHD = at_even(r_OHCD)
    zeta0_OD = r0_OHD.sum(dim=1) + c_D * even2_O[:, None]
    image_OHCD, image_c_D = after(r_OHCD), after(c_D)
    even_image_OHD = at_even(image_OHCD)
    image0_OD = even_image_OHD.sum(dim=1) + image_c_D * even2_O[:, None]
    image_off_O = largest((image_OHCD - even_image_OHD[:, :, None]).norm(dim=-1)) + image_c_D.norm() * off2_O

    # N, what LayerNorm 3 divides by, times σ2 √D.
    unit0_OD = F.normalize(zeta0_OD, dim=-1)
    towards_c_O = unit0_OD @ c_D
    shortest_O = least(torch.einsum("ohcd,od->ohc", r_OHCD, unit0_OD)) + torch.minimum(
        towards_c_O * low2_O, towards_c_O * high2_O
    )
    longest_O = torch.minimum(
        largest(r_OHCD.norm(dim=-1)) + c_D.norm() * high2_O,
        zeta0_OD.norm(dim=-1) + largest((r_OHCD - r0_OHD[:, :, None]).norm(dim=-1)) + c_D.norm() * off2_O,
    )
    low_O = _n(shortest_O.clamp_min(0), low2_O, dim, net.eps)
    high_O = _n(longest_O, high2_O, dim, net.eps)
    even_O = _n(zeta0_OD.norm(dim=-1), even2_O, dim, net.eps)

    root = math.sqrt(dim)
    fixed_D = F.linear(net.norm3_bias, net.output_weight, net.output_bias)
    centre_OD = fixed_D + root * image0_OD / even_O[:, None]
    off_O = torch.maximum(1 / low_O - 1 / even_O, 1 / even_O - 1 / high_O)
    radius_O = root * (image_off_O / low_O + image0_OD.norm(dim=-1) * off_O)
    return IncrementRange(
        centre_OD=centre_OD,
        radius_O=radius_O * (1 + SLACK) + SLACK,
        mask_OC=mask_OC,
        atom_OHCD=root * image_OHCD,
        scaled_D=root * image_c_D,
        fixed_D=fixed_D,
        sigma2=Interval(low2_O * (1 - SLACK), high2_O * (1 + SLACK)),
        divisor=Interval(low_O * (1 - SLACK), high_O * (1 + SLACK)),
    )


def _largest(x_OHC: Tensor, mask_OC: Tensor) -> Tensor:
    """Over the simplex of each head, summed over heads, [O]."""
    return x_OHC.masked_fill(~mask_OC[:, None], -math.inf).amax(dim=-1).sum(dim=-1)


def _least(x_OHC: Tensor, mask_OC: Tensor) -> Tensor:
    return -_largest(-x_OHC, mask_OC)


def _mixed(context_OCD: Tensor, net: IncrementWeights) -> Tensor:
    """What each head adds for each token before LayerNorm 2, centred, [O, H, C, D]."""
    dim, num_heads = context_OCD.shape[-1], net.num_heads
    normed_OCD = F.layer_norm(context_OCD, (dim,), net.norm1_weight, net.norm1_bias, net.eps)
    value_OCHd = F.linear(normed_OCD, net.value_weight, net.value_bias).unflatten(-1, (num_heads, -1))
    out_HDd = net.out_weight.unflatten(-1, (num_heads, -1)).transpose(0, 1)
    # Attention weights sum to one in each head, so the output bias may be shared out over the heads.
    return centre(torch.einsum("ochi,hdi->ohcd", value_OCHd, out_HDd) + net.out_bias / num_heads)


def _sigma(length_O: Tensor, dim: int, eps: float) -> Tensor:
    """The divisor of a LayerNorm for a centred vector of this length."""
    return (length_O.square() / dim + eps).sqrt()


def _n(length_O: Tensor, sigma2_O: Tensor, dim: int, eps: float) -> Tensor:
    return (length_O.square() + dim * eps * sigma2_O.square()).sqrt()
