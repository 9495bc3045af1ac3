"""MiniLM-L6, a small BERT: the text tower of the mini encoder.

Own code, because importing transformers' BERT takes seconds, ten searches' worth. Modules have BERT's names,
so its checkpoints load as they are. Shapes: T texts, W words, E width, H heads.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, arange, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 384
NUM_LAYERS, NUM_HEADS, HIDDEN = 6, 12, 1536
VOCABULARY, MAX_WORDS = 30_522, 512
EPS = 1e-12


class Embeddings(nn.Module):
    """Word, position and token-type embeddings, summed and normalised."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.word_embeddings = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.position_embeddings = nn.Embedding(MAX_WORDS, WIDTH)
        self.token_type_embeddings = nn.Embedding(2, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH, eps=EPS)

    def forward(self, token_ids_TW: Tensor) -> Tensor:
        positions_W = arange(token_ids_TW.shape[1], device=token_ids_TW.device)
        place_WE = self.position_embeddings(positions_W) + self.token_type_embeddings.weight[0]
        embedded_TWE: Tensor = self.dropout(self.LayerNorm(self.word_embeddings(token_ids_TW) + place_WE))
        return embedded_TWE


class Projections(nn.Module):
    """The query, key and value maps of an attention layer."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)


class AddAndNorm(nn.Module):
    """A linear map, the shortcut, and a LayerNorm after both."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.dense = nn.Linear(width, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.LayerNorm = nn.LayerNorm(WIDTH, eps=EPS)

    def forward(self, hidden: Tensor, shortcut: Tensor) -> Tensor:
        summed: Tensor = self.LayerNorm(self.dropout(self.dense(hidden)) + shortcut)
        return summed


class Attention(nn.Module):
    """Multi-head self-attention with its shortcut and LayerNorm."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.self = Projections()
        self.output = AddAndNorm(WIDTH, dropout)

    def forward(self, states_TWE: Tensor, mask_T11W: Tensor | None) -> Tensor:
        projections = (self.self.query, self.self.key, self.self.value)
        query, key, value = (
            project(states_TWE).unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2) for project in projections
        )
        attended_THWe = F.scaled_dot_product_attention(query, key, value, attn_mask=mask_T11W)
        attended: Tensor = self.output(attended_THWe.transpose(1, 2).flatten(2), states_TWE)
        return attended


class Intermediate(nn.Module):
    """The first map of the MLP, which widens its input."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, HIDDEN)


class Layer(nn.Module):
    """Self-attention, then an MLP."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(dropout)
        self.intermediate = Intermediate()
        self.output = AddAndNorm(HIDDEN, dropout)

    def forward(self, states_TWE: Tensor, mask_T11W: Tensor | None) -> Tensor:
        states_TWE = self.attention(states_TWE, mask_T11W)
        output: Tensor = self.output(F.gelu(self.intermediate.dense(states_TWE)), states_TWE)
        return output


class Encoder(nn.Module):
    """The stack of layers."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(dropout) for _ in range(NUM_LAYERS))


class MiniLM(nn.Module):
    """Token ids [T, W] to states [T, W, E]; `mask_TW` is true where a token is real."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embeddings = Embeddings(dropout)
        self.encoder = Encoder(dropout)
        self._checkpoints = False

    def forward(self, token_ids_TW: Tensor, mask_TW: Tensor) -> Tensor:
        states_TWE: Tensor = self.embeddings(token_ids_TW)
        mask_T11W = mask_TW[:, None, None]
        for layer in self.encoder.layer:
            if self._checkpoints and self.training:
                states_TWE = checkpoint(layer, states_TWE, mask_T11W, use_reentrant=False)
            else:
                states_TWE = layer(states_TWE, mask_T11W)
        return states_TWE

    def gradient_checkpointing_enable(self, _options: object = None) -> None:
        """Layers are computed again in backward instead of kept; named as in transformers."""
        self._checkpoints = True
