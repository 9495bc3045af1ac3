"""Layers of CLIP's image tower in a training step on a GPU: few kernels, and little kept for backward.

torch.compile fuses what lies between two matrix products, and no more. Here a layer is written out, forward
and backward, so that every tensor is read and written as seldom as can be:

- query, key and value are one product, and so are their gradients;
- a sum between layers is made by the norm that reads it; backward through the norm makes the norm again, for
  the gradient of the product after it, the sum of gradients, and the gradients of three biases;
- backward through attention and activation makes their values again, and the gradients of their biases.

Kept of a layer: its input in float32, and in bfloat16 query, key and value, what attention adds, and the MLP
before its activation: 1.2 GB for 1,536 pictures of ViT-B/32, where autocast keeps 2.2.

Products are in bfloat16, sums between layers and norms in float32, gradients of parameters in float32, as
under autocast.

Shapes: N pictures, P places, E width, H heads; R rows, N × P.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gare.encoders.bfloat16_layers import is_fitting, is_quick_gelu
from gare.encoders.short_attention import MOST_PLACES, MOST_WIDTH, has_triton

_NORM1 = ("layer_norm1.weight", "layer_norm1.bias")
_ATTENTION = tuple(f"self_attn.{name}_proj.{part}" for part in ("weight", "bias") for name in "qkv")
_REST = tuple(
    f"{name}.{part}" for name in ("self_attn.out_proj", "mlp.fc1", "mlp.fc2") for part in ("weight", "bias")
)
_NORM2 = ("layer_norm2.weight", "layer_norm2.bias")
_NAMES = (*_NORM1, *_NORM2, *_ATTENTION, *_REST)


def can_train(tower: Any) -> bool:
    """Whether the layers of an image tower, all but its last, are such as are written out here.

    Their names are CLIP's, nothing in them is frozen or dropped, and attention fits into one block.
    """
    layers = tower.encoder.layers[:-1]
    embeddings = tower.embeddings
    return (
        has_triton()
        and len(layers) > 0
        and all(_is_fitting(layer) for layer in layers)
        and embeddings.position_embedding.num_embeddings <= MOST_PLACES
        and all(parameter.requires_grad for parameter in layers.parameters())
    )


def _is_fitting(layer: Any) -> bool:
    attention = layer.self_attn
    return (
        is_fitting(layer)
        and is_quick_gelu(layer.mlp)
        and not attention.dropout
        and attention.q_proj.out_features // attention.num_heads <= MOST_WIDTH
    )


def run_training_layers(
    layers: Sequence[Any], states_NPE: Tensor, *, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """The layers one after the other, with gradients; states in float32, products in `dtype`."""
    parameters = [layer.get_parameter(name) for layer in layers for name in _NAMES]
    shapes = [
        _Shape(layer.self_attn.num_heads, layer.layer_norm1.eps, layer.layer_norm2.eps, dtype)
        for layer in layers
    ]
    states: Tensor = _Layers.apply(states_NPE, shapes, *parameters)  # type: ignore[no-untyped-call]
    return states


class _Shape(NamedTuple):
    """What is known of a layer besides its parameters."""

    num_heads: int
    eps1: float
    eps2: float
    dtype: torch.dtype


class _Weights(NamedTuple):
    """Weights and biases of the products of a layer, in their precision."""

    qkv: Tensor
    qkv_bias: Tensor
    out: Tensor
    out_bias: Tensor
    fc1: Tensor
    fc1_bias: Tensor
    fc2: Tensor
    fc2_bias: Tensor


class _Kept(NamedTuple):
    """What backward needs of a layer."""

    states_RE: Tensor
    packed_NP3HE: Tensor
    attention_RE: Tensor
    """What attention adds to the states."""
    hidden_RE: Tensor
    """The MLP before its activation."""


class _Layers(torch.autograd.Function):
    """All layers as one node: what passes between two of them is in neither's hands alone."""

    @staticmethod
    def forward(ctx: Any, states_NPE: Tensor, shapes: Sequence[_Shape], *parameters: Tensor) -> Tensor:
        weights = _in_precision(parameters, shapes)
        states_RE = states_NPE.flatten(0, 1)
        branches: tuple[Tensor, ...] = ()
        kept: list[Tensor] = []
        for number, shape in enumerate(shapes):
            norms = parameters[number * len(_NAMES) :][:4]
            of_layer, branches = _forward(states_RE, branches, norms, weights[number], shape, len(states_NPE))
            kept += of_layer
            states_RE = of_layer.states_RE
        ctx.shapes = shapes
        ctx.save_for_backward(*parameters, *(each for layer in weights for each in layer), *kept)
        for branch in branches:
            states_RE = states_RE + branch
        return states_RE.view_as(states_NPE)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        num_layers, saved = len(ctx.shapes), ctx.saved_tensors
        parameters = _split(saved[: num_layers * len(_NAMES)], num_layers)
        saved = saved[num_layers * len(_NAMES) :]
        weights = _split(saved[: num_layers * len(_Weights._fields)], num_layers)
        kept = _split(saved[num_layers * len(_Weights._fields) :], num_layers)
        states_RE = gradients[0].flatten(0, 1).contiguous()
        branch_RE, sum_E = states_RE.to(ctx.shapes[0].dtype), states_RE.sum(dim=0)
        found: list[Tensor] = []
        for number in reversed(range(num_layers)):
            states_RE, branch_RE, next_E, of_layer = _backward(
                states_RE,
                branch_RE,
                parameters[number][:4],
                _Weights(*weights[number]),
                _Kept(*kept[number]),
                ctx.shapes[number],
            )
            found = [*of_layer, sum_E, *found]
            sum_E = next_E
        return states_RE.view_as(gradients[0]), None, *found


def _split(tensors: Sequence[Tensor], parts: int) -> list[Sequence[Tensor]]:
    size = len(tensors) // parts
    return [tensors[start : start + size] for start in range(0, len(tensors), size)]


def _in_precision(parameters: Sequence[Tensor], shapes: Sequence[_Shape]) -> list[_Weights]:
    """The weights of all layers, copied at once: a copy of each would take longer to ask for than to make."""
    made: list[_Weights] = []
    sources: list[Tensor] = []
    copies: list[Tensor] = []
    for of_layer, shape in zip(_split(parameters, len(shapes)), shapes, strict=True):
        products = of_layer[4:]
        width = len(products[0])
        qkv = products[0].new_empty(3 * width, width, dtype=shape.dtype)
        qkv_bias = products[0].new_empty(3 * width, dtype=shape.dtype)
        rest = [torch.empty_like(each, dtype=shape.dtype) for each in products[6:]]
        sources += products
        copies += [*qkv.split(width), *qkv_bias.split(width), *rest]
        made.append(_Weights(qkv, qkv_bias, *rest))
    torch._foreach_copy_(copies, sources)
    return made


def _forward(
    states_RE: Tensor,
    branches: Sequence[Tensor],
    norms: Sequence[Tensor],
    weights: _Weights,
    shape: _Shape,
    pictures: int,
) -> tuple[_Kept, tuple[Tensor, Tensor]]:
    """A layer after the sum of states and branches: what is kept, and the two branches that it adds."""
    from gare.encoders import short_attention_cuda
    from gare.encoders.add_norm_cuda import add_norm
    from gare.encoders.quick_gelu_cuda import quick_gelu

    dtype = shape.dtype
    states_RE, normed_RE = add_norm(states_RE, branches, norms[0], norms[1], shape.eps1, dtype=dtype)
    packed = F.linear(normed_RE, weights.qkv, weights.qkv_bias)
    packed_NP3HE = packed.unflatten(1, (3, shape.num_heads, -1)).unflatten(0, (pictures, -1))
    query, key, value = packed_NP3HE.permute(2, 0, 3, 1, 4)
    attended = short_attention_cuda.forward(query, key, value, query.shape[-1] ** -0.5)
    attention_RE = F.linear(attended.flatten(2).flatten(0, 1), weights.out, weights.out_bias)
    _, normed_RE = add_norm(
        states_RE, (attention_RE,), norms[2], norms[3], shape.eps2, dtype=dtype, keeps_sum=False
    )
    hidden_RE = F.linear(normed_RE, weights.fc1, weights.fc1_bias)
    mlp_RE = F.linear(quick_gelu(hidden_RE), weights.fc2, weights.fc2_bias)
    return _Kept(states_RE, packed_NP3HE, attention_RE, hidden_RE), (attention_RE, mlp_RE)


def _backward(
    states_G: Tensor,
    branch_G: Tensor,
    norms: Sequence[Tensor],
    weights: _Weights,
    kept: _Kept,
    shape: _Shape,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """The gradient of the states before a layer, in two precisions and summed; those of its parameters.

    Of these the last is missing, the bias of the MLP's second product: it is the sum of `states_G`.
    """
    from gare.encoders.add_norm_cuda import add_norm_backward
    from gare.encoders.quick_gelu_cuda import quick_gelu_backward
    from gare.encoders.short_attention_cuda import packed_backward

    states_RE, packed_NP3HE, attention_RE, hidden_RE = kept
    hidden_G, fc1_bias, active_RE = quick_gelu_backward(branch_G @ weights.fc2, hidden_RE)
    fc2 = branch_G.mT @ active_RE
    del active_RE
    second = add_norm_backward(
        hidden_G @ weights.fc1, states_G, states_RE, attention_RE, (norms[2], norms[3], shape.eps2)
    )
    fc1 = hidden_G.mT @ second.normed_RE
    del hidden_G
    pictures, places, _, heads, width = packed_NP3HE.shape
    attended_G = (second.branch_RE @ weights.out).view(pictures, places, heads, width)
    packed_G, qkv_bias, attended = packed_backward(attended_G, packed_NP3HE, width**-0.5)
    packed_G = packed_G.flatten(2).flatten(0, 1)
    out = second.branch_RE.mT @ attended.flatten(2).flatten(0, 1)
    first = add_norm_backward(
        packed_G @ weights.qkv, second.states_RE, states_RE, None, (norms[0], norms[1], shape.eps1)
    )
    qkv = packed_G.mT @ first.normed_RE
    found = [
        *(first.weight_E, first.bias_E, second.weight_E, second.bias_E),
        *qkv.float().chunk(3),
        *qkv_bias.flatten(1),
        *(out.float(), second.sum_E, fc1.float(), fc1_bias, fc2.float()),
    ]
    return first.states_RE, first.branch_RE, first.sum_E, found
