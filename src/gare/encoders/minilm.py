"""MiniLM-L6, a small BERT: the text tower of the mini encoder.

Own code, because importing transformers' BERT takes seconds, ten searches' worth. Modules have BERT's names,
so its checkpoints load as they are. On a CPU, a tower that is asked again and again packs its weights once
(`PackedTower`): a query then takes three fifths of the processor time.

Shapes: T texts, W words, E width, H heads.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, arange, nn
from torch.utils.checkpoint import checkpoint

from gare.cpu_products import PackedMap, can_use_onednn

WIDTH = 384
NUM_LAYERS, NUM_HEADS, HIDDEN = 6, 12, 1536
VOCABULARY, MAX_WORDS = 30_522, 512
EPS = 1e-12
_CALLS_BEFORE_PACKING = 2  # a command that encodes one text would lose more than it gains
_TYPICAL_WORDS = 16  # what packed weights are laid out for; any other number works as well


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
        self._num_calls = 0

    def forward(self, token_ids_TW: Tensor, mask_TW: Tensor) -> Tensor:
        states_TWE: Tensor = self.embeddings(token_ids_TW)
        if (packed := self._packed()) is not None:
            return packed(states_TWE, mask_TW)
        mask_T11W = mask_TW[:, None, None]
        for layer in self.encoder.layer:
            if self._checkpoints and self.training:
                states_TWE = checkpoint(layer, states_TWE, mask_T11W, use_reentrant=False)
            else:
                states_TWE = layer(states_TWE, mask_T11W)
        return states_TWE

    def _packed(self) -> PackedTower | None:
        """The layers for this CPU, where no gradient is wanted; None where they are not worth it."""
        if torch.is_grad_enabled() or self.training or not can_use_onednn(self.embeddings.LayerNorm.weight):
            return None
        self._num_calls += 1
        if self._num_calls <= _CALLS_BEFORE_PACKING:
            return None
        known = _PACKED.get(self)
        if known is None or known.state != _state(self.encoder):
            known = _PACKED[self] = PackedTower(self.encoder)
        return known

    def gradient_checkpointing_enable(self, _options: object = None) -> None:
        """Layers are computed again in backward instead of kept; named as in transformers."""
        self._checkpoints = True


# --- the same on a CPU, with packed weights -----------------------------------------------------------------


class PackedTower:
    """The layers with their weights in the order in which oneDNN multiplies them.

    A query has ten words, so a product reads far more weights than it computes. The ordinary one rearranges
    them every time. Results differ from the layers' own by rounding, some 1e-6 of a state.

    Args:
        encoder: its weights are copied, 42 MB; `state` tells whether they have changed since.
    """

    def __init__(self, encoder: Encoder) -> None:
        self.state = _state(encoder)
        self._layers = [_PackedLayer(layer) for layer in encoder.layer]

    def __call__(self, states_TWE: Tensor, mask_TW: Tensor) -> Tensor:
        shape, mask_T11W = states_TWE.shape, mask_TW[:, None, None]
        for layer in self._layers:
            heads = layer.projections(states_TWE).view(*shape[:2], 3, NUM_HEADS, -1).transpose(1, 3)
            query, key, value = heads.unbind(dim=2)
            attended_THWe = F.scaled_dot_product_attention(query, key, value, attn_mask=mask_T11W)
            attended_TWE = layer.attended(attended_THWe.transpose(1, 2).reshape(shape))
            states_TWE = layer.norm1(attended_TWE + states_TWE)
            states_TWE = layer.norm2(layer.narrow(F.gelu(layer.widen(states_TWE))) + states_TWE)
        return states_TWE


def _packed_map(*maps: nn.Linear) -> PackedMap:
    """One or several linear maps of the same input, side by side."""
    weight = torch.cat([one.weight.detach() for one in maps])
    bias = torch.cat([one.bias.detach() for one in maps])
    return PackedMap(weight, bias, typical_rows=_TYPICAL_WORDS)


class _PackedLayer:
    """One layer of the tower."""

    def __init__(self, layer: nn.Module) -> None:
        assert isinstance(layer, Layer)
        own, attended = layer.attention.self, layer.attention.output
        self.projections = _packed_map(own.query, own.key, own.value)
        self.attended, self.norm1 = _packed_map(attended.dense), attended.LayerNorm
        self.widen = _packed_map(layer.intermediate.dense)
        self.narrow, self.norm2 = _packed_map(layer.output.dense), layer.output.LayerNorm


_PACKED: WeakKeyDictionary[MiniLM, PackedTower] = WeakKeyDictionary()  # not in the tower: nothing saves it


def _state(encoder: Encoder) -> tuple[tuple[int, int], ...]:
    """Changes whenever a weight does."""
    return tuple((weight.data_ptr(), weight._version) for weight in encoder.parameters())
