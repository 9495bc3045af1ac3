"""A ball that holds every increment of a video, whatever the text: where the net's attention cannot lead out.

The increment depends on the text through the attention weights alone, and those lie in a simplex. After them
come linear maps and two LayerNorms, so the increment is √D W ζ / N + b with ζ = Σ_a weight_a r_a + c σ2. Each
part is bounded over the simplex. `docs/proof.md` has the derivation, with the names used here.

Shapes: O owners of C context tokens each, H heads, A = H × C, D embedding.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from gare.interaction.increment_net import IncrementWeights
from gare.interaction.pair_blocks import centre


def increment_ball(context_OCD: Tensor, mask_OC: Tensor, net: IncrementWeights) -> tuple[Tensor, Tensor]:
    """Centre [O, D] and radius [O] in float64: every increment of an owner is in its ball.

    The centre is the increment at even attention. The radius is infinite where attention can lead to a vector
    of no length, which a LayerNorm cannot bound.
    """
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
    mask_O1C = mask_OC[:, None]

    def at_even(x_OHCD: Tensor) -> Tensor:
        return torch.einsum("oc,ohcd->ohd", even_OC.to(x_OHCD), x_OHCD)

    def largest(x_OHC: Tensor) -> Tensor:
        """Over the simplex of each head, summed over heads."""
        return x_OHC.masked_fill(~mask_O1C, -math.inf).amax(dim=-1).sum(dim=-1)

    def least(x_OHC: Tensor) -> Tensor:
        return -largest(-x_OHC)

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
    return centre_OD, radius_O * (1 + 1e-9) + 1e-9


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
