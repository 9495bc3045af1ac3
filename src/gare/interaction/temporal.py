"""A transformer over the frame vectors of a video, so that each frame is encoded with its neighbours.

Shapes: V videos, F frames, D embedding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gare.encoders.training_layers import LayerParts, can_train, is_bfloat16_step, run_training_layers

LAYER_NORM_EPS = 1e-12  # as in the released code; CLIP's own towers use 1e-5


class TemporalTransformer(nn.Module):
    """frames + transformer(frames + positions): pre-norm layers, padding masked out of the attention."""

    trains_by_kernels = True
    """Whether a training step in bfloat16 on a GPU is by `encoders/training_layers.py`, where it can."""

    def __init__(self, dim: int, *, num_layers: int, num_heads: int, max_frames: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.empty(max_frames, dim).normal_(std=0.01))
        self.layers = nn.ModuleList(TemporalLayer(dim, num_heads) for _ in range(num_layers))

    def forward(self, frames_VFD: Tensor, mask_VF: Tensor) -> Tensor:
        num_frames, max_frames = frames_VFD.shape[1], self.position.shape[0]
        if num_frames > max_frames:
            raise ValueError(
                f"videos of {num_frames} frames, but there are positions for {max_frames}; "
                f"sample fewer frames or build the model with temporal.max_frames={num_frames}"
            )
        hidden_VFD = frames_VFD + self.position[:num_frames]
        if self._is_for_kernels(hidden_VFD, mask_VF):
            return frames_VFD + self.train_by_kernels(hidden_VFD, mask_VF)
        for layer in self.layers:
            hidden_VFD = layer(hidden_VFD, mask_VF)
        return frames_VFD + hidden_VFD

    def _is_for_kernels(self, hidden_VFD: Tensor, mask_VF: Tensor) -> bool:
        return (
            self.trains_by_kernels
            and hidden_VFD.is_cuda
            and is_bfloat16_step()
            and mask_VF.ndim == 2
            and hidden_VFD.dtype == torch.float32
            and can_train(self._parts(), hidden_VFD.shape[1])
        )

    def train_by_kernels(
        self, hidden_VFD: Tensor, mask_VF: Tensor, *, dtype: torch.dtype = torch.bfloat16
    ) -> Tensor:
        """All layers, with gradients, by the kernels of `encoders/training_layers.py`."""
        return run_training_layers(self._parts(), hidden_VFD, dtype=dtype, mask_NP=mask_VF)

    def _parts(self) -> list[LayerParts]:
        layers: Any = self.layers
        return [layer.parts() for layer in layers]


class TemporalLayer(nn.Module):
    """Attention and a four-fold MLP, laid out as in CLIP so that its text layers can be copied in."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(
                f"the embedding has {dim} dimensions, which {num_heads} temporal heads do not divide"
            )
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)
        self.attention_in = nn.Linear(dim, 3 * dim)
        self.attention_out = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)
        self.expand = nn.Linear(dim, 4 * dim)
        self.contract = nn.Linear(4 * dim, dim)
        for linear in (self.attention_in, self.attention_out, self.expand, self.contract):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)

    def forward(self, x_VFD: Tensor, mask_VF: Tensor) -> Tensor:
        """`mask_VF` is true where a frame is real; [V, F, F] says which frame sees which."""
        mask_VHFF = mask_VF[:, None, None] if mask_VF.ndim == 2 else mask_VF[:, None]
        query, key, value = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.attention_in(self.norm1(x_VFD)).chunk(3, dim=-1)
        )
        attended_VHFd = F.scaled_dot_product_attention(query, key, value, attn_mask=mask_VHFF)
        x_VFD = x_VFD + self.attention_out(attended_VHFd.transpose(1, 2).flatten(2))
        hidden = self.expand(self.norm2(x_VFD))
        contracted: Tensor = self.contract(hidden * torch.sigmoid(1.702 * hidden))  # CLIP's quick GELU
        return x_VFD + contracted

    def parts(self) -> LayerParts:
        """What the layer is made of."""
        norm1, norm2, out = self.norm1, self.norm2, self.attention_out
        parameters = [
            *(norm1.weight, norm1.bias, norm2.weight, norm2.bias),
            *(*self.attention_in.weight.chunk(3), *self.attention_in.bias.chunk(3)),
            *(out.weight, out.bias, self.expand.weight, self.expand.bias),
            *(self.contract.weight, self.contract.bias),
        ]
        return LayerParts(parameters, self.num_heads, norm1.eps, norm2.eps)


def default_heads(dim: int) -> int:
    """About one head per 64 dimensions, as CLIP has; fewer where that does not divide them.

    >>> default_heads(512), default_heads(200), default_heads(16)
    (8, 2, 1)
    """
    return next(heads for heads in range(max(1, dim // 64), 0, -1) if dim % heads == 0)
