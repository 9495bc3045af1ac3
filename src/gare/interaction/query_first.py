"""The increment net for a few texts: the query goes to the frames; no frame is made ready for any query.

Score cards cost six D×D products a frame and are then good for any number of texts. A search has one text:
here a pair costs six such products and a frame none, so with fewer texts than frames this is the cheaper way.

Shapes: B owners of a context, Q queries each, C context tokens, D embedding, H heads of d = D / H.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gare.cpu_products import multiply
from gare.interaction.increment_net import IncrementWeights


@dataclass(frozen=True)
class Folded:
    """What a single head allows to be multiplied out once: keyᵀ·query / sqrt(D), out·value, 1 + residual."""

    query_weight: Tensor
    query_bias: Tensor
    out_weight: Tensor
    out_bias: Tensor
    residual_weight: Tensor


@dataclass(frozen=True)
class QueryFirst:
    """The increment net with its products in another order: the same values, cheaper for few texts."""

    net: IncrementWeights
    folded: Folded | None = None

    @classmethod
    def fold(cls, net: IncrementWeights) -> QueryFirst:
        """Multiply the weights out once, for many searches: a pair then costs four products, not six."""
        if net.num_heads > 1:
            return cls(net)
        key_DD = net.key_weight.mT / math.sqrt(len(net.key_weight))
        identity_DD = torch.eye(len(net.residual_weight)).to(net.residual_weight)
        return cls(
            net,
            Folded(
                query_weight=key_DD @ net.query_weight,
                query_bias=key_DD @ net.query_bias,
                out_weight=net.out_weight @ net.value_weight,
                out_bias=F.linear(net.value_bias, net.out_weight, net.out_bias),
                residual_weight=identity_DD + net.residual_weight,
            ),
        )

    def weights(self) -> IncrementWeights:
        """The weights it was made from."""
        return self.net

    def __call__(self, query_BQD: Tensor, context_BCD: Tensor, mask_BC: Tensor) -> Tensor:
        net, num_heads = self.net, self.net.num_heads
        shape = (query_BQD.shape[-1],)
        normed_BQD = F.layer_norm(query_BQD, shape, net.norm1_weight, net.norm1_bias, net.eps)
        normed_BCD = F.layer_norm(context_BCD, shape, net.norm1_weight, net.norm1_bias, net.eps)
        folded_BQHD = self.query(normed_BQD)
        logits_BNC = folded_BQHD.flatten(1, 2) @ normed_BCD.mT
        weights_BNC = logits_BNC.masked_fill(~mask_BC[:, None], float("-inf")).softmax(dim=-1)
        return self.after_attention((weights_BNC @ normed_BCD).unflatten(1, (-1, num_heads)))

    def query(self, normed_BQD: Tensor) -> Tensor:
        """Queries of each head in the space of the context, [B, Q, H, D], ready for products with it.

        The key bias adds the same to every token of a query, which softmax does not see.
        """
        if self.folded is not None:
            return multiply(normed_BQD, self.folded.query_weight, self.folded.query_bias)[:, :, None]
        net, num_heads = self.net, self.net.num_heads
        query_BQHd = multiply(normed_BQD, net.query_weight, net.query_bias).unflatten(-1, (num_heads, -1))
        key_HdD = net.key_weight.unflatten(0, (num_heads, -1))
        return _each_head(query_BQHd / math.sqrt(key_HdD.shape[1]), key_HdD)

    def after_attention(self, mixed_BQHD: Tensor) -> Tensor:
        """What the net gives, [B, Q, D], from the context as each head mixed it."""
        net, shape = self.net, (mixed_BQHD.shape[-1],)
        hidden_BQD = self._out(mixed_BQHD)
        hidden_BQD = F.layer_norm(hidden_BQD, shape, net.norm2_weight, net.norm2_bias, net.eps)
        hidden_BQD = self._residual(hidden_BQD)
        hidden_BQD = F.layer_norm(hidden_BQD, shape, net.norm3_weight, net.norm3_bias, net.eps)
        return multiply(hidden_BQD, net.output_weight, net.output_bias)

    def _out(self, mixed_BQHD: Tensor) -> Tensor:
        if self.folded is not None:
            return multiply(mixed_BQHD.flatten(2), self.folded.out_weight, self.folded.out_bias)
        value_HDd = self.net.value_weight.unflatten(0, (self.net.num_heads, -1)).mT
        attended_BQD = _each_head(mixed_BQHD, value_HDd).flatten(2) + self.net.value_bias
        return multiply(attended_BQD, self.net.out_weight, self.net.out_bias)

    def _residual(self, hidden_BQD: Tensor) -> Tensor:
        if self.folded is not None:
            return multiply(hidden_BQD, self.folded.residual_weight, self.net.residual_bias)
        return hidden_BQD + multiply(hidden_BQD, self.net.residual_weight, self.net.residual_bias)


def _each_head(x_BQHi: Tensor, weight_Hio: Tensor) -> Tensor:
    """Each head's vectors through that head's matrix, [B, Q, H, o]: one product over all pairs a head."""
    x_HNi = x_BQHi.flatten(0, 1).transpose(0, 1)
    y_BQHo: Tensor = (x_HNi @ weight_Hio).transpose(0, 1).unflatten(0, x_BQHi.shape[:2])
    return y_BQHo
