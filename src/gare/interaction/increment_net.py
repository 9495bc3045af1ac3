"""The increment net (psi in the paper): cross-attention from a query, the gap, to context tokens, the frames.

`CrossAttention` is the net without its output layer, and what X-Pool pools frames with (`xpool.py`).

Shapes: B owners of a context, Q queries each, C context tokens, D embedding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor, nn

IncrementInit = Literal["normal", "zero_output"]


@dataclass(frozen=True)
class IncrementWeights:
    """The parameters of the increment net as plain tensors, for scoring without the module."""

    norm1_weight: Tensor
    norm1_bias: Tensor
    query_weight: Tensor
    query_bias: Tensor
    key_weight: Tensor
    key_bias: Tensor
    value_weight: Tensor
    value_bias: Tensor
    out_weight: Tensor
    out_bias: Tensor
    norm2_weight: Tensor
    norm2_bias: Tensor
    residual_weight: Tensor
    residual_bias: Tensor
    norm3_weight: Tensor
    norm3_bias: Tensor
    output_weight: Tensor
    output_bias: Tensor
    num_heads: int
    eps: float

    def to(self, target: torch.dtype | torch.device) -> IncrementWeights:
        """The same weights in another precision, or on another device."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("num_heads", "eps")}
        return replace(self, **{name: tensor.to(target) for name, tensor in tensors.items()})


class CrossAttention(nn.Module):
    """One pre-norm cross-attention layer with a linear residual; weights are left as torch starts them.

    Query and context share their first LayerNorm. Attention, LayerNorms and linear maps are all of it: no
    activation, which is why `gap_aware_factored.py` can score without forming its output.

    Args:
        dim: D, the width of the encoder's embedding.
        num_heads: attention heads; must divide `dim`.
        dropout: on the residual branch, while training.
    """

    def __init__(self, dim: int, *, num_heads: int = 1, dropout: float = 0.3) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"the embedding has {dim} dimensions, which {num_heads} heads do not divide")
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(dim)
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.residual = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)
        self.norm3 = nn.LayerNorm(dim)

    def forward(self, query_BQD: Tensor, context_BCD: Tensor, mask_BC: Tensor) -> Tensor:
        """One vector a query, [B, Q, D]; `mask_BC` is true where a context token is real."""
        query_BQD, context_BCD = self.norm1(query_BQD), self.norm1(context_BCD)
        query_BHQd, key_BHCd = self._by_head(self.query(query_BQD)), self._by_head(self.key(context_BCD))
        logits_BHQC = query_BHQd @ key_BHCd.mT / math.sqrt(query_BHQd.shape[-1])
        weights_BHQC = logits_BHQC.masked_fill(~mask_BC[:, None, None], float("-inf")).softmax(dim=-1)
        attended_BHQd = weights_BHQC @ self._by_head(self.value(context_BCD))
        hidden_BQD = self.norm2(self.out(attended_BHQd.transpose(1, 2).flatten(2)))
        attended_BQD: Tensor = self.norm3(hidden_BQD + self.dropout(self.residual(hidden_BQD)))
        return attended_BQD

    def _with_output(self, weight: Tensor, bias: Tensor) -> IncrementWeights:
        """The parameters as plain tensors, for `gap_aware_factored.py`, before this last layer."""
        return IncrementWeights(
            norm1_weight=self.norm1.weight,
            norm1_bias=self.norm1.bias,
            query_weight=self.query.weight,
            query_bias=self.query.bias,
            key_weight=self.key.weight,
            key_bias=self.key.bias,
            value_weight=self.value.weight,
            value_bias=self.value.bias,
            out_weight=self.out.weight,
            out_bias=self.out.bias,
            norm2_weight=self.norm2.weight,
            norm2_bias=self.norm2.bias,
            residual_weight=self.residual.weight,
            residual_bias=self.residual.bias,
            norm3_weight=self.norm3.weight,
            norm3_bias=self.norm3.bias,
            output_weight=weight,
            output_bias=bias,
            num_heads=self.num_heads,
            eps=self.norm1.eps,
        )

    def _by_head(self, x_BND: Tensor) -> Tensor:
        x_BNHd: Tensor = x_BND.unflatten(-1, (self.num_heads, -1))
        return x_BNHd.transpose(1, 2)


class IncrementNet(CrossAttention):
    """Psi in the paper: cross-attention and a linear head; 1,579,008 parameters at D = 512.

    Args:
        dim, num_heads, dropout: as in `CrossAttention`.
        init: "normal" is N(0, 0.02) for every weight, as the released code ends up with (|Delta| ≈ 10 at
            D = 512); "zero_output" starts from increments of zero, that is from the baseline.
    """

    def __init__(
        self, dim: int, *, num_heads: int = 1, dropout: float = 0.3, init: IncrementInit = "normal"
    ) -> None:
        super().__init__(dim, num_heads=num_heads, dropout=dropout)
        self.output = nn.Linear(dim, dim)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        if init == "zero_output":
            nn.init.zeros_(self.output.weight)

    def forward(self, query_BQD: Tensor, context_BCD: Tensor, mask_BC: Tensor) -> Tensor:
        """Increments [B, Q, D]; `mask_BC` is true where a context token is real."""
        increment_BQD: Tensor = self.output(super().forward(query_BQD, context_BCD, mask_BC))
        return increment_BQD

    def weights(self) -> IncrementWeights:
        """The parameters as plain tensors, for `gap_aware_factored.py`."""
        return self._with_output(self.output.weight, self.output.bias)


def multiply_adds(dim: int, *, pairs: int, owners: int, tokens: int) -> int:
    """What the dense net costs: four maps and the attention a pair, keys and values a context token."""
    return pairs * (4 * dim**2 + 2 * tokens * dim) + owners * tokens * 2 * dim**2
