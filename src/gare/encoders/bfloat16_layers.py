"""Large image towers in inference: products in bfloat16, the sums between layers and the norms in float32.

A processor with products of its own for bfloat16 (AVX-512 BF16, AMX) does them two to three times as fast as
those in float32, a GPU ten times, and nine tenths of the work of a ViT are such products. transformers' own
`bfloat16` rounds the sums too. Here they stay exact, so that vectors differ from those in float32 by 1e-5 in
cosine or less. On a GPU a sum and the norm after it are one kernel, and so are attention of few places, and a
product with CLIP's activation. There the states of a whole tower are kept in float16 from one kernel to the
next: a sum is made in float32, and what is added to it has eight times the rounding error (bfloat16).

It is for layers named as in CLIP and SigLIP, without a mask, and where a tower is large: small ones gain
little, and are exact. `GARE_CPU_PRECISION=float32` and `GARE_GPU_PRECISION=float32` turn it off.

Shapes: N images, P places, E width, H heads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gare.encoders.short_attention import (
    attend_once,
    has_triton,
    is_one_query,
    is_short,
    short_attention,
)

VARIABLES = {"cpu": "GARE_CPU_PRECISION", "cuda": "GARE_GPU_PRECISION"}
"""Set to float32, they turn it off on such devices."""
LEAST_PARAMETERS = 60_000_000
"""A tower with fewer stays in float32: it is quick as it is, and scores are those of transformers to 1e-5.
ViT-B/32 has 85 million in its layers."""
_QUICK_GELU = 1.702

_IS_ON: ContextVar[bool] = ContextVar("is_on", default=False)


@cache
def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether this processor or GPU multiplies matrices faster in bfloat16."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # torch has no public name for them
    return torch.backends.mkldnn.is_available() and any(
        getattr(torch.cpu, name, lambda: False)() for name in checks
    )


def is_wanted(device: torch.device) -> bool:
    """Whether large towers are to be fast there: the device gains by it, and nobody said no."""
    variable = VARIABLES.get(device.type)
    return variable is not None and os.environ.get(variable) != "float32" and has_fast_bfloat16(device)


def is_on() -> bool:
    """Whether products are to be in bfloat16 now; torch.compile has its own ways, and cannot ask."""
    return not torch.compiler.is_compiling() and not torch.is_grad_enabled() and _IS_ON.get()


def prepare(tower: nn.Module) -> bool:
    """Make the layers of a tower ready; False where there is nothing to gain, or they have other names.

    Parameters and their names stay as they are. What is computed changes within `bfloat16_products` alone.
    """
    layers = [module for module in tower.modules() if is_fitting(module)]
    if sum(p.numel() for layer in layers for p in layer.parameters()) < LEAST_PARAMETERS:
        return False
    for layer in layers:
        if not isinstance(layer, _Bfloat16Layer):
            layer.__class__ = _faster(type(layer))
    return True


@contextmanager
def bfloat16_products(*, on: bool) -> Iterator[None]:
    """Within it, layers that were prepared multiply in bfloat16, without gradients."""
    token = _IS_ON.set(on)
    try:
        yield
    finally:
        _IS_ON.reset(token)


def is_fitting(module: Any) -> bool:
    """Whether a module is a layer with the names of CLIP's and SigLIP's."""
    attention, mlp = getattr(module, "self_attn", None), getattr(module, "mlp", None)
    linear = [getattr(attention, f"{name}_proj", None) for name in ("q", "k", "v", "out")]
    linear += [getattr(mlp, name, None) for name in ("fc1", "fc2")]
    norms = [getattr(module, name, None) for name in ("layer_norm1", "layer_norm2")]
    return (
        all(isinstance(each, nn.Linear) and each.bias is not None for each in linear)
        and all(isinstance(each, nn.LayerNorm) for each in norms)
        and callable(getattr(mlp, "activation_fn", None))
        and isinstance(getattr(attention, "num_heads", None), int)
    )


class _Bfloat16Layer(nn.Module):
    """What is put before the class of a layer: attention and MLP, each after a norm, with shortcuts."""

    layer_norm1: nn.LayerNorm
    layer_norm2: nn.LayerNorm
    self_attn: Any
    mlp: Any

    def forward(self, hidden_states: Tensor, *more: Any, **named: Any) -> Any:
        mask = [each for each in (*more, named.get("attention_mask")) if each is not None]
        if not is_on() or mask or hidden_states.dtype != torch.float32:
            return super().forward(hidden_states, *more, **named)
        return _sum(*self.advance(hidden_states, ()))

    def advance(
        self, states_NPE: Tensor, branches: Branches, normed_NPE: Tensor | None = None
    ) -> tuple[Tensor, Branches]:
        """The layer after the sum of states and branches; its result is such a sum again.

        Where the norm of the states is known, it is given, and there are no branches.
        """
        heads, weights = self.self_attn.num_heads, _weights(self)
        if normed_NPE is None:
            states_NPE, branches, normed_NPE = _add_norm(states_NPE, branches, self.layer_norm1)
        if getattr(self, "GIVES_FIRST_PLACE", False):
            states_NPE, width = states_NPE[:, :1], normed_NPE.shape[-1]
            # Rows far apart are one product as a matrix; with a dimension more they are a product each.
            query = F.linear(normed_NPE[:, 0], weights["qkv"][:width], weights["qkv_bias"][:width])[:, None]
            both = F.linear(normed_NPE, weights["qkv"][width:], weights["qkv_bias"][width:])
            query = query.unflatten(-1, (heads, -1)).transpose(1, 2)
            key, value = both.unflatten(-1, (2, heads, -1)).permute(2, 0, 3, 1, 4)
        else:
            both = F.linear(normed_NPE, weights["qkv"], weights["qkv_bias"])
            query, key, value = both.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)  # [N, H, P, E / H]
        attended_NPE = _attend(query, key, value).flatten(2)
        branch_NPE = F.linear(attended_NPE, weights["out"], weights["out_bias"])
        states_NPE, branches, normed_NPE = _add_norm(
            states_NPE, (*branches, branch_NPE), self.layer_norm2, keeps_sum=False
        )
        hidden = _activated(normed_NPE, weights["fc1"], weights["fc1_bias"], self.mlp)
        return states_NPE, (*branches, F.linear(hidden, weights["fc2"], weights["fc2_bias"]))


Branches = tuple[Tensor, ...]
"""What is still to be added to the states: in bfloat16, at most two."""


def run_layers(layers: Iterable[Any], states_NPE: Tensor, normed_NPE: Tensor | None = None) -> Tensor:
    """Layers that were prepared, one after the other: each sum is made by the norm that reads it.

    The first layer's first norm may be given. States come in float32, or in float16 where `has_kernel`; their
    last sum is in float32.
    """
    branches: Branches = ()
    for layer in layers:
        states_NPE, branches = layer.advance(states_NPE, branches, normed_NPE)
        normed_NPE = None
    return _sum(states_NPE, branches)


def _sum(states_NPE: Tensor, branches: Branches) -> Tensor:
    states_NPE = states_NPE.float()
    for branch_NPE in branches:
        states_NPE = states_NPE + branch_NPE
    return states_NPE


def _activated(normed_NPE: Tensor, weight: Tensor, bias: Tensor, mlp: Any) -> Tensor:
    """The first product of an MLP and its activation."""
    if not is_quick_gelu(mlp):
        activated: Tensor = mlp.activation_fn(F.linear(normed_NPE, weight, bias))
        return activated
    if has_active_product(normed_NPE, weight):
        from gare.encoders.active_product_cuda import active_product

        return active_product(normed_NPE, weight, bias)
    return F.silu(F.linear(normed_NPE, weight, bias), inplace=True)


def has_active_product(x: Tensor, weight: Tensor) -> bool:
    """Whether a product and the activation after it are one kernel there."""
    if not has_kernel(x):
        return False
    from gare.encoders.active_product_cuda import takes

    return takes(x, weight)


def _attend(query_NHPE: Tensor, key_NHPE: Tensor, value_NHPE: Tensor) -> Tensor:
    """Attended values [N, P, H, E]."""
    scale = query_NHPE.shape[-1] ** -0.5
    if is_one_query(query_NHPE, key_NHPE):
        return attend_once(query_NHPE, key_NHPE, value_NHPE, scale)
    if is_short(query_NHPE, key_NHPE):
        attended_NPHE: Tensor = short_attention(query_NHPE, key_NHPE, value_NHPE, scale)
        return attended_NPHE
    return F.scaled_dot_product_attention(query_NHPE, key_NHPE, value_NHPE).transpose(1, 2)


def _add_norm(
    states: Tensor, branches: Branches, norm: nn.LayerNorm, *, keeps_sum: bool = True
) -> tuple[Tensor, Branches, Tensor]:
    """States and branches of the same sum, and its norm in bfloat16.

    A sum that the next norm can make again need not be kept: on a GPU, writing it takes time.
    """
    if has_kernel(states):
        from gare.encoders.add_norm_cuda import add_norm

        sums, normed = add_norm(states, branches, norm.weight, norm.bias, norm.eps, keeps_sum=keeps_sum)
        return sums, () if keeps_sum else branches, normed
    states = _sum(states, branches)
    return states, (), norm(states).bfloat16()


def has_kernel(states: Tensor) -> bool:
    """Whether a sum and its norm are one kernel there."""
    return states.is_cuda and has_triton()


_FASTER: dict[type[nn.Module], type[nn.Module]] = {}


def _faster(layer_class: type[nn.Module]) -> type[nn.Module]:
    if layer_class not in _FASTER:
        name = f"Bfloat16{layer_class.__name__}"
        _FASTER[layer_class] = type(name, (_Bfloat16Layer, layer_class), {})
    return _FASTER[layer_class]


def is_quick_gelu(mlp: Any) -> bool:
    """Whether its activation is CLIP's: x · sigmoid(1.702 x)."""
    return type(mlp.activation_fn).__name__ == "QuickGELUActivation"


def _weights(layer: Any) -> dict[str, Tensor]:
    """The weights in bfloat16: made when they are first needed, and again when they have changed."""
    attention, mlp = layer.self_attn, layer.mlp
    parts = (attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj, mlp.fc1, mlp.fc2)
    version = tuple((part.weight.data_ptr(), part.weight._version, part.bias._version) for part in parts)
    kept = layer.__dict__.get("_bfloat16")
    if kept is not None and kept[0] == version:
        weights: dict[str, Tensor] = kept[1]
        return weights
    q, k, v, out, fc1, fc2 = parts
    # x · sigmoid(1.702 x) is silu(1.702 x) / 1.702: one pass over the widest tensor instead of three.
    scale = _QUICK_GELU if is_quick_gelu(mlp) else 1.0
    made = {
        "qkv": torch.cat([q.weight, k.weight, v.weight]),
        "qkv_bias": torch.cat([q.bias, k.bias, v.bias]),
        "out": out.weight,
        "out_bias": out.bias,
        "fc1": scale * fc1.weight,
        "fc1_bias": scale * fc1.bias,
        "fc2": fc2.weight / scale,
        "fc2_bias": fc2.bias,
    }
    weights = {name: tensor.detach().bfloat16() for name, tensor in made.items()}
    layer.__dict__["_bfloat16"] = (version, weights)
    return weights
