"""Psi for a few texts: the question is taken to the frames, not every frame made ready for any question.

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

from gare.types import IncrementWeights


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
    """The same function as the module these weights are of, in another order of products."""

    psi: IncrementWeights
    folded: Folded | None = None

    @classmethod
    def fold(cls, psi: IncrementWeights) -> QueryFirst:
        """For many searches with the same weights: a pair then costs four products instead of six."""
        if psi.num_heads > 1:
            return cls(psi)
        key_DD = psi.key_weight.mT / math.sqrt(len(psi.key_weight))
        identity_DD = torch.eye(len(psi.residual_weight)).to(psi.residual_weight)
        return cls(
            psi,
            Folded(
                query_weight=key_DD @ psi.query_weight,
                query_bias=key_DD @ psi.query_bias,
                out_weight=psi.out_weight @ psi.value_weight,
                out_bias=F.linear(psi.value_bias, psi.out_weight, psi.out_bias),
                residual_weight=identity_DD + psi.residual_weight,
            ),
        )

    def weights(self) -> IncrementWeights:
        return self.psi

    def __call__(self, query_BQD: Tensor, context_BCD: Tensor, mask_BC: Tensor) -> Tensor:
        psi, num_heads = self.psi, self.psi.num_heads
        shape = (query_BQD.shape[-1],)
        normed_BQD = F.layer_norm(query_BQD, shape, psi.norm1_weight, psi.norm1_bias, psi.eps)
        normed_BCD = F.layer_norm(context_BCD, shape, psi.norm1_weight, psi.norm1_bias, psi.eps)
        # Queries in the space of the context. The key bias adds the same to every token of a query, which
        # softmax does not see.
        folded_BQHD = self._query(normed_BQD)
        logits_BNC = folded_BQHD.flatten(1, 2) @ normed_BCD.mT
        weights_BNC = logits_BNC.masked_fill(~mask_BC[:, None], float("-inf")).softmax(dim=-1)
        mixed_BQHD = (weights_BNC @ normed_BCD).unflatten(1, (-1, num_heads))
        hidden_BQD = self._out(mixed_BQHD)
        hidden_BQD = F.layer_norm(hidden_BQD, shape, psi.norm2_weight, psi.norm2_bias, psi.eps)
        hidden_BQD = self._residual(hidden_BQD)
        hidden_BQD = F.layer_norm(hidden_BQD, shape, psi.norm3_weight, psi.norm3_bias, psi.eps)
        return F.linear(hidden_BQD, psi.output_weight, psi.output_bias)

    def _query(self, normed_BQD: Tensor) -> Tensor:
        if self.folded is not None:
            return F.linear(normed_BQD, self.folded.query_weight, self.folded.query_bias)[:, :, None]
        psi, num_heads = self.psi, self.psi.num_heads
        query_BQHd = F.linear(normed_BQD, psi.query_weight, psi.query_bias).unflatten(-1, (num_heads, -1))
        key_HdD = psi.key_weight.unflatten(0, (num_heads, -1))
        return _each_head(query_BQHd / math.sqrt(key_HdD.shape[1]), key_HdD)

    def _out(self, mixed_BQHD: Tensor) -> Tensor:
        if self.folded is not None:
            return F.linear(mixed_BQHD.flatten(2), self.folded.out_weight, self.folded.out_bias)
        value_HDd = self.psi.value_weight.unflatten(0, (self.psi.num_heads, -1)).mT
        attended_BQD = _each_head(mixed_BQHD, value_HDd).flatten(2) + self.psi.value_bias
        return F.linear(attended_BQD, self.psi.out_weight, self.psi.out_bias)

    def _residual(self, hidden_BQD: Tensor) -> Tensor:
        if self.folded is not None:
            return F.linear(hidden_BQD, self.folded.residual_weight, self.psi.residual_bias)
        return hidden_BQD + F.linear(hidden_BQD, self.psi.residual_weight, self.psi.residual_bias)


def _each_head(x_BQHi: Tensor, weight_Hio: Tensor) -> Tensor:
    """Each head's vectors through that head's matrix, [B, Q, H, o]: one product over all pairs a head."""
    x_HNi = x_BQHi.flatten(0, 1).transpose(0, 1)
    y_BQHo: Tensor = (x_HNi @ weight_Hio).transpose(0, 1).unflatten(0, x_BQHi.shape[:2])
    return y_BQHo
