"""Baselines whose pooling has weights of its own: X-Pool's cross-attention and DRL's token-wise interaction.

What they compute is in `scoring/dense.py` and `scoring/token_wise.py`; what differs from the papers is in
`docs/method.md`. Shapes: D embedding.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from gare.model.increment import CrossAttention
from gare.types import IncrementWeights, TokenHead, TokenWeights


class CrossAttentionPool(CrossAttention):
    """The text asks the frames; what comes back is the video vector of that pair (Gorti et al. 2022).

    It starts from identity maps and zero biases, as the authors' code does: at first the text only weighs the
    normalised frames.
    """

    def __init__(self, dim: int, *, num_heads: int = 1, dropout: float = 0.3) -> None:
        super().__init__(dim, num_heads=num_heads, dropout=dropout)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.eye_(module.weight)
                nn.init.zeros_(module.bias)

    def weights(self) -> IncrementWeights:
        """The parameters as plain tensors, for `gare.scoring.factored`; the last layer changes nothing."""
        like = self.out.weight
        identity = torch.eye(like.shape[0], dtype=like.dtype, device=like.device)
        return self._with_output(identity, like.new_zeros(like.shape[0]))


class TokenWeighting(nn.Module):
    """How much each word and each frame counts: two layers a side (Wang et al. 2022).

    The last layers have no bias: the softmax over tokens would not see it.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.words_hidden, self.words_output = nn.Linear(dim, dim), nn.Linear(dim, 1, bias=False)
        self.frames_hidden, self.frames_output = nn.Linear(dim, dim), nn.Linear(dim, 1, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def weights(self) -> TokenWeights:
        """The parameters as plain tensors, for `gare.scoring.token_wise`."""
        words, frames = self.words_hidden, self.frames_hidden
        return TokenWeights(
            words=TokenHead(words.weight, words.bias, self.words_output.weight),
            frames=TokenHead(frames.weight, frames.bias, self.frames_output.weight),
        )


PoolingNet = CrossAttentionPool | TokenWeighting


def build_pooling(
    pooling: Literal["mean", "text_conditioned", "cross_attention", "token_wise"],
    dim: int,
    *,
    num_heads: int,
    dropout: float,
) -> PoolingNet | None:
    """The module of a pooling that has weights; None for those that have none."""
    if pooling == "cross_attention":
        return CrossAttentionPool(dim, num_heads=num_heads, dropout=dropout)
    return TokenWeighting(dim) if pooling == "token_wise" else None
