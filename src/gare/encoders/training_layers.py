"""Layers of CLIP's towers and of the temporal transformer in a training step on a GPU: few kernels, and
little kept for backward.

torch.compile fuses what lies between two matrix products, and no more. Here a layer is written out, forward
and backward, so that every tensor is read and written as seldom as can be:

- query, key and value are one product, and so are their gradients;
- a sum between layers is made by the norm that reads it; backward through the norm makes the norm again, for
  the gradient of the product after it, the sum of gradients, and the gradients of three biases;
- backward through attention and activation makes their values again, and the gradients of their biases.

Kept of a layer: its input and two numbers a row and norm in float32, and in bfloat16 query, key and value,
what attention adds, and the MLP before its activation: 1.2 GB for 1,536 pictures of ViT-B/32, where autocast
keeps 2.2.

Products are in bfloat16, sums between layers and norms in float32, gradients of parameters in float32, as
under autocast.

Shapes: N pictures or texts, P places, E width, H heads; R rows, N × P.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gare.encoders.bfloat16_layers import is_fitting, is_quick_gelu
from gare.encoders.short_attention import MOST_PLACES, MOST_WIDTH, has_triton


class LayerParts(NamedTuple):
    """What a layer is made of."""

    parameters: Sequence[Tensor]
    """Weight and bias of both norms; weights of query, key and value, their biases; weight and bias of the
    product after attention, and of both of the MLP."""
    num_heads: int
    eps1: float
    eps2: float


def parts_of(layer: Any) -> LayerParts:
    """What a layer named as CLIP's is made of. By attributes: by name it would take five times as long."""
    attention, mlp = layer.self_attn, layer.mlp
    query, key, value = attention.q_proj, attention.k_proj, attention.v_proj
    out, fc1, fc2 = attention.out_proj, mlp.fc1, mlp.fc2
    first, second = layer.layer_norm1, layer.layer_norm2
    parameters = [
        *(first.weight, first.bias, second.weight, second.bias),
        *(query.weight, key.weight, value.weight, query.bias, key.bias, value.bias),
        *(out.weight, out.bias, fc1.weight, fc1.bias, fc2.weight, fc2.bias),
    ]
    return LayerParts(parameters, attention.num_heads, first.eps, second.eps)


def is_bfloat16_step() -> bool:
    """Whether gradients are wanted, and products in bfloat16: what these layers are for."""
    return (
        not torch.compiler.is_compiling()
        and torch.is_grad_enabled()
        and torch.is_autocast_enabled("cuda")
        and torch.get_autocast_dtype("cuda") == torch.bfloat16
    )


def trainable_parts(layers: Sequence[Any], places: int) -> list[LayerParts] | None:
    """What layers of a tower are made of; None unless they are such as are written out here.

    Their names are CLIP's, nothing in them is frozen or dropped, and attention of so many places fits into
    one block.
    """
    if not all(_is_fitting(layer) for layer in layers):
        return None
    parts = [parts_of(layer) for layer in layers]
    return parts if can_train(parts, places) else None


def can_train(parts: Sequence[LayerParts], places: int) -> bool:
    """Whether kernels take layers of these parts, for so many places."""
    return (
        has_triton()
        and len(parts) > 0
        and places <= MOST_PLACES
        and all(len(layer.parameters[0]) <= layer.num_heads * MOST_WIDTH for layer in parts)
        and all(parameter.requires_grad for layer in parts for parameter in layer.parameters)
    )


def _is_fitting(layer: Any) -> bool:
    # What a layer is made of does not change; asking takes as long as a product of the layer.
    if layer not in _FITTING and is_fitting(layer) and is_quick_gelu(layer.mlp):
        _FITTING.add(layer)
    return layer in _FITTING and not layer.self_attn.dropout


_FITTING: WeakSet[Any] = WeakSet()
_NUM_PARAMETERS = 16


def run_training_layers(
    parts: Sequence[LayerParts],
    states_NPE: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    mask_NP: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """The layers one after the other, with gradients; states in float32, products in `dtype`.

    Args:
        parts: of each layer, such as `can_train` accepts.
        states_NPE: before the first.
        dtype: of the products.
        mask_NP: true where a place is seen; all of them unless told.
        is_causal: whether a place sees itself and what is before it alone.
    """
    return _run(parts, states_NPE, None, dtype, mask_NP, is_causal)[0]


def run_up_to_norm(
    parts: Sequence[LayerParts],
    states_NPE: Tensor,
    norm: nn.LayerNorm,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """The states [N, 1, E] of the first place after these layers, and the norm of all of them in `dtype`.

    What a last layer needs that gives the first place alone.
    """
    first_NE, normed_NPE = _run(parts, states_NPE, norm, dtype, None, False)
    return first_NE[:, None], normed_NPE


def _run(
    parts: Sequence[LayerParts],
    states_NPE: Tensor,
    norm: nn.LayerNorm | None,
    dtype: torch.dtype,
    mask_NP: Tensor | None,
    is_causal: bool,
) -> tuple[Tensor, ...]:
    parameters = [each for layer in parts for each in layer.parameters]
    shapes = [_Shape(layer.num_heads, layer.eps1, layer.eps2, dtype, is_causal) for layer in parts]
    last_eps = None if norm is None else norm.eps
    parameters += [] if norm is None else [norm.weight, norm.bias]
    found: Any = _Layers.apply(states_NPE, mask_NP, shapes, last_eps, *parameters)  # type: ignore[no-untyped-call]
    return found if isinstance(found, tuple) else (found,)


class _Shape(NamedTuple):
    """What is known of a layer besides its parameters."""

    num_heads: int
    eps1: float
    eps2: float
    dtype: torch.dtype
    is_causal: bool


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
    statistics_2R2: Tensor
    """What backward needs of both norms: of each row its mean, and one over its standard deviation."""


class _Layers(torch.autograd.Function):
    """All layers as one node: what passes between two of them is in neither's hands alone.

    Its output is the states; or, if a norm follows, the states of each first place, and that norm of all.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states_NPE: Tensor,
        mask_NP: Tensor | None,
        shapes: Sequence[_Shape],
        last_eps: float | None,
        *parameters: Tensor,
    ) -> Tensor | tuple[Tensor, Tensor]:
        from gare.encoders.add_norm_cuda import add_norm

        of_layers = parameters[: len(shapes) * _NUM_PARAMETERS]
        weights = _in_precision(of_layers, shapes)
        states_RE = states_NPE.flatten(0, 1)
        branches: tuple[Tensor, ...] = ()
        kept: list[Tensor] = []
        for number, shape in enumerate(shapes):
            norms = parameters[number * _NUM_PARAMETERS :][:4]
            of_layer, branches = _forward(
                states_RE, branches, norms, weights[number], shape, len(states_NPE), mask_NP
            )
            kept += of_layer
            states_RE = of_layer.states_RE
        last: tuple[Tensor, ...] = ()
        if last_eps is not None:
            statistics_R2 = states_RE.new_empty(len(states_RE), 2)
            _, normed_RE = add_norm(
                states_RE,
                branches,
                parameters[-2],
                parameters[-1],
                last_eps,
                dtype=shapes[-1].dtype,
                keeps_sum=False,
                statistics_R2=statistics_R2,
            )
            last = (branches[1], statistics_R2)
        ctx.shapes, ctx.has_norm, ctx.mask_NP = shapes, last_eps is not None, mask_NP
        of_weights = [each for layer in weights for each in layer]
        ctx.save_for_backward(*last, *parameters, *of_weights, *kept)
        if last_eps is None:
            for branch in branches:
                states_RE = states_RE + branch
            return states_RE.view_as(states_NPE)
        first_NE = states_RE.view_as(states_NPE)[:, 0]
        for branch in branches:
            first_NE = first_NE + branch.view_as(states_NPE)[:, 0]
        return first_NE, normed_RE.view_as(states_NPE)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from gare.encoders.add_norm_cuda import add_norm_backward

        num_layers, saved = len(ctx.shapes), list(ctx.saved_tensors)
        last = [saved.pop(0) for _ in range(2 * ctx.has_norm)]
        parameters = _split(_take(saved, num_layers * _NUM_PARAMETERS), num_layers)
        last_norm = _take(saved, 2 * ctx.has_norm)
        weights = _split(_take(saved, num_layers * len(_Weights._fields)), num_layers)
        kept = _split(saved, num_layers)
        del saved
        found: list[Tensor] = []
        if ctx.has_norm:
            below = _Kept(*kept[-1])
            sums = add_norm_backward(
                gradients[1].flatten(0, 1).contiguous(),
                gradients[0].contiguous(),
                below.states_RE,
                (below.attention_RE, last[0]),
                last[1],
                (last_norm[0], last_norm[1]),
            )
            found = [sums.weight_E, sums.bias_E]
            states_RE, branch_RE, sum_E = sums.states_RE, sums.branch_RE, sums.sum_E
            del sums, last
        else:
            states_RE = gradients[0].flatten(0, 1).contiguous()
            branch_RE, sum_E = states_RE.to(ctx.shapes[0].dtype), states_RE.sum(dim=0)
        for number in reversed(range(num_layers)):
            states_RE, branch_RE, next_E, of_layer = _backward(
                states_RE,
                branch_RE,
                parameters[number][:4],
                _Weights(*weights[number]),
                _Kept(*kept[number]),
                ctx.shapes[number],
                ctx.mask_NP,
            )
            found = [*of_layer, sum_E, *found]
            sum_E = next_E
        pictures = len(gradients[0])
        return states_RE.unflatten(0, (pictures, -1)), None, None, None, *found


def _take(tensors: list[Tensor], number: int) -> list[Tensor]:
    """The first so many, which are no longer in the list."""
    taken, tensors[:] = tensors[:number], tensors[number:]
    return taken


def _split(tensors: Sequence[Tensor], parts: int) -> list[Sequence[Tensor]]:
    size = len(tensors) // parts
    return [tensors[start : start + size] for start in range(0, len(tensors), size)]


def _in_precision(parameters: Sequence[Tensor], shapes: Sequence[_Shape]) -> list[_Weights]:
    """The weights of all layers, copied at once and into one piece of memory.

    A copy of each, or memory for each, would take longer to ask for than to make.
    """
    layers = _split(parameters, len(shapes))
    sizes = [_in_order(each.numel() for each in layer[4:]) for layer in layers]
    memory = parameters[0].new_empty(sum(map(sum, sizes)), dtype=shapes[0].dtype)
    pieces = iter(memory.split([size for of_layer in sizes for size in of_layer]))
    made: list[_Weights] = []
    sources: list[Tensor] = []
    copies: list[Tensor] = []
    for layer in layers:
        qkv, qkv_bias, out, out_bias, fc1, fc1_bias, fc2, fc2_bias = (next(pieces) for _ in range(8))
        width = len(layer[0])
        weights = _Weights(
            *(qkv.view(-1, width), qkv_bias, out.view(width, -1), out_bias),
            *(fc1.view(-1, width), fc1_bias, fc2.view(width, -1), fc2_bias),
        )
        made.append(weights)
        sources += layer[4:]
        copies += [*weights.qkv.chunk(3), *qkv_bias.chunk(3), *weights[2:]]
    torch._foreach_copy_(copies, sources)
    return made


def _in_order(sizes: Iterable[int]) -> list[int]:
    """Numbers of a layer's products, query, key and value as one."""
    query, key, value, query_bias, key_bias, value_bias, *rest = sizes
    return [query + key + value, query_bias + key_bias + value_bias, *rest]


def _forward(
    states_RE: Tensor,
    branches: Sequence[Tensor],
    norms: Sequence[Tensor],
    weights: _Weights,
    shape: _Shape,
    pictures: int,
    mask_NP: Tensor | None,
) -> tuple[_Kept, tuple[Tensor, Tensor]]:
    """A layer after the sum of states and branches: what is kept, and the two branches that it adds."""
    from gare.encoders import short_attention_cuda
    from gare.encoders.add_norm_cuda import add_norm
    from gare.encoders.quick_gelu_cuda import quick_gelu

    dtype = shape.dtype
    statistics_2R2 = states_RE.new_empty(2, len(states_RE), 2)
    states_RE, normed_RE = add_norm(
        states_RE,
        branches,
        norms[0],
        norms[1],
        shape.eps1,
        dtype=dtype,
        statistics_R2=statistics_2R2[0],
    )
    packed = F.linear(normed_RE, weights.qkv, weights.qkv_bias)
    packed_NP3HE = packed.unflatten(1, (3, shape.num_heads, -1)).unflatten(0, (pictures, -1))
    query, key, value = packed_NP3HE.permute(2, 0, 3, 1, 4)
    attended = short_attention_cuda.forward(
        query, key, value, query.shape[-1] ** -0.5, mask_NP=mask_NP, is_causal=shape.is_causal
    )
    attention_RE = F.linear(attended.flatten(2).flatten(0, 1), weights.out, weights.out_bias)
    _, normed_RE = add_norm(
        states_RE,
        (attention_RE,),
        norms[2],
        norms[3],
        shape.eps2,
        dtype=dtype,
        keeps_sum=False,
        statistics_R2=statistics_2R2[1],
    )
    hidden_RE = F.linear(normed_RE, weights.fc1, weights.fc1_bias)
    mlp_RE = F.linear(quick_gelu(hidden_RE), weights.fc2, weights.fc2_bias)
    return _Kept(states_RE, packed_NP3HE, attention_RE, hidden_RE, statistics_2R2), (attention_RE, mlp_RE)


def _backward(
    states_G: Tensor,
    branch_G: Tensor,
    norms: Sequence[Tensor],
    weights: _Weights,
    kept: _Kept,
    shape: _Shape,
    mask_NP: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """The gradient of the states before a layer, in two precisions and summed; those of its parameters.

    Of these the last is missing, the bias of the MLP's second product: it is the sum of `states_G`.
    """
    from gare.encoders.add_norm_cuda import add_norm_backward
    from gare.encoders.quick_gelu_cuda import quick_gelu_backward
    from gare.encoders.short_attention_cuda import packed_backward

    states_RE, packed_NP3HE, attention_RE, hidden_RE, statistics_2R2 = kept
    hidden_G, fc1_bias, active_RE = quick_gelu_backward(branch_G @ weights.fc2, hidden_RE)
    fc2 = _product_of_rows(branch_G, active_RE)
    del active_RE
    second = add_norm_backward(
        hidden_G @ weights.fc1,
        states_G,
        states_RE,
        (attention_RE,),
        statistics_2R2[1],
        (norms[2], norms[3]),
    )
    fc1 = _product_of_rows(hidden_G, second.normed_RE)
    del hidden_G
    pictures, places, _, heads, width = packed_NP3HE.shape
    attended_G = (second.branch_RE @ weights.out).view(pictures, places, heads, width)
    packed_G, qkv_bias, attended = packed_backward(
        attended_G, packed_NP3HE, width**-0.5, mask_NP=mask_NP, is_causal=shape.is_causal
    )
    packed_G = packed_G.flatten(2).flatten(0, 1)
    out = _product_of_rows(second.branch_RE, attended.flatten(2).flatten(0, 1))
    first = add_norm_backward(
        packed_G @ weights.qkv, second.states_RE, states_RE, (), statistics_2R2[0], (norms[0], norms[1])
    )
    qkv = _product_of_rows(packed_G, first.normed_RE)
    found = [
        *(first.weight_E, first.bias_E, second.weight_E, second.bias_E),
        *qkv.chunk(3),
        *qkv_bias.flatten(1),
        *(out, second.sum_E, fc1, fc1_bias, fc2),
    ]
    return first.states_RE, first.branch_RE, first.sum_E, found


def _product_of_rows(gradient_RO: Tensor, input_RE: Tensor) -> Tensor:
    """The gradient of a weight [O, E] in float32: the product of what came and went in, over all rows."""
    # A product with bfloat16 on one side and float32 on the other: torch 2.8 and later, on a GPU alone.
    mixed = getattr(torch.ops.aten.mm, "dtype", None)
    is_bfloat16 = gradient_RO.is_cuda and gradient_RO.dtype == torch.bfloat16
    if mixed is None or not is_bfloat16:
        return (gradient_RO.mT @ input_RE).float()
    product: Tensor = mixed(gradient_RO.mT, input_RE, torch.float32)
    return product
