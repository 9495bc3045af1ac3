"""The two parts of CLIP's image tower that are computed otherwise than transformers does it: the embedding of
patches, and the last layer. Their parameters keep their names and places.

Shapes: N pictures, C colours, H and W of a picture, P places, X numbers of a patch, E width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gare.encoders.bfloat16_layers import is_on
from gare.encoders.encoder import ImageFormat
from gare.encoders.short_attention import has_triton
from gare.errors import ConfigError


class PatchEmbedding(nn.Conv2d):
    """A convolution whose patches do not overlap, as the matrix product it is.

    cuDNN's kernels for this shape took 29 of 138 ms of a training step on an H200; the product takes 2.
    """

    @classmethod
    def of(cls, convolution: nn.Conv2d) -> PatchEmbedding:
        """The same parameters; only how they are applied changes."""
        if convolution.stride != convolution.kernel_size or convolution.padding not in ((0, 0), "valid"):
            raise ConfigError(
                "image towers whose patches overlap are not supported; use a CLIP or SigLIP model"
            )
        convolution.__class__ = cls
        assert isinstance(convolution, cls)
        return convolution

    def patches_of(self, bytes_NCHW: Tensor) -> Tensor:
        """Every byte less 128, which is a bfloat16 without rounding: a row for each patch [N, P, X]."""
        if bytes_NCHW.is_cuda and has_triton() and self.kernel_size[0] == self.kernel_size[1]:
            from gare.encoders.patches_cuda import patches_of_bytes

            return patches_of_bytes(bytes_NCHW, self.kernel_size[0])
        patches = self._patches(bytes_NCHW).flatten(3).flatten(1, 2)
        return patches.bfloat16() - 128

    def for_bytes(self, image_format: ImageFormat) -> tuple[Tensor, Tensor]:
        """Weights [E, X] for such rows, and what is then added [E]: normalising is part of both."""
        channels = self.weight.unbind(dim=1)
        constants = list(zip(channels, image_format.mean, image_format.std, strict=True))
        weight_EX = torch.cat([weight.flatten(1) / (255 * std) for weight, _, std in constants], dim=1)
        moved = [weight.sum(dim=(1, 2)) * ((128 / 255 - mean) / std) for weight, mean, std in constants]
        shift_E = torch.stack(moved).sum(dim=0)
        return weight_EX, shift_E if self.bias is None else shift_E + self.bias

    def _patches(self, pixels_NCHW: Tensor) -> Tensor:
        """[N, rows, columns, C, height, width]"""
        height, width = self.kernel_size
        rows, columns = pixels_NCHW.shape[2] // height, pixels_NCHW.shape[3] // width
        patches = pixels_NCHW[:, :, : rows * height, : columns * width]
        patches = patches.unflatten(3, (columns, width)).unflatten(2, (rows, height))
        ordered: Tensor = patches.permute(0, 2, 4, 1, 3, 5)
        return ordered

    def forward(self, pixels_NCHW: Tensor) -> Tensor:
        patches = self._patches(pixels_NCHW).flatten(3)
        weight, bias = self.weight.flatten(1), self.bias
        if not (pixels_NCHW.is_cuda and is_on()):
            return nn.functional.linear(patches, weight, bias).permute(0, 3, 1, 2)
        # In float32 it would take a quarter of the time of the whole tower.
        bias = None if bias is None else bias.bfloat16()
        embedded = nn.functional.linear(patches.bfloat16(), weight.bfloat16(), bias)
        return embedded.to(pixels_NCHW.dtype).permute(0, 3, 1, 2)


class FirstPlaceLayer(nn.Module):
    """What is put before the class of a tower's last layer: a picture's vector is that of its first place, so
    no other is computed. The layer gives [N, 1, E]; the keys and values of all places are part of it.
    """

    GIVES_FIRST_PLACE = True
    layer_norm1: nn.LayerNorm
    layer_norm2: nn.LayerNorm
    self_attn: Any
    mlp: Any

    @staticmethod
    def make(layer: nn.Module) -> None:
        """Make a layer such a one; its parameters and their names stay as they are."""
        kind = type(layer)
        layer.__class__ = type(f"FirstPlace{kind.__name__}", (FirstPlaceLayer, kind), {})

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.finish(hidden_states[:, :1], self.layer_norm1(hidden_states))

    def finish(self, first_N1E: Tensor, normed_NPE: Tensor) -> Tensor:
        """The layer, from the first place of its input and the norm of all."""
        attention = self.self_attn

        def heads_of(x_NPE: Tensor) -> Tensor:
            x_NHPE: Tensor = x_NPE.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
            return x_NHPE

        query_NH1E = heads_of(attention.q_proj(normed_NPE[:, :1]))
        key_NHPE, value_NHPE = heads_of(attention.k_proj(normed_NPE)), heads_of(attention.v_proj(normed_NPE))
        dropout = attention.dropout if self.training else 0.0
        # Kernels for many queries take four times as long for one as what torch.compile makes.
        if not dropout and normed_NPE.is_cuda and torch.compiler.is_compiling():
            attended_NH1E = attend_by_sums(query_NH1E, key_NHPE, value_NHPE)
        else:
            attended_NH1E = nn.functional.scaled_dot_product_attention(
                query_NH1E, key_NHPE, value_NHPE, dropout_p=dropout
            )
        states_N1E = first_N1E + attention.out_proj(attended_NH1E.transpose(1, 2).flatten(2))
        features_N1E: Tensor = states_N1E + self.mlp(self.layer_norm2(states_N1E))
        return features_N1E


def attend_by_sums(query_NH1E: Tensor, key_NHPE: Tensor, value_NHPE: Tensor) -> Tensor:
    """Attention of one query, [N, H, 1, E], as sums over what is read once: for torch.compile."""
    scale = query_NH1E.shape[-1] ** -0.5
    logits_NHP = (query_NH1E.float() * key_NHPE.float()).sum(dim=-1) * scale
    weights_NHP1 = logits_NHP.softmax(dim=-1)[..., None]
    attended_NH1E: Tensor = (weights_NHP1 * value_NHPE.float()).sum(dim=-2, keepdim=True)
    return attended_NH1E.to(value_NHPE.dtype)
