"""From frames to one vector per video, or one per text–video pair. No parameters, so it lives with scoring.

Shapes: T texts, V videos, F frames, D embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gare.types import Interaction


def mean_weights(mask_VF: Tensor, *, mask_frames: bool, dtype: torch.dtype) -> Tensor:
    """Weights [V, F] of the plain mean: one over the number of real frames, zero on padding.

    >>> mean_weights(torch.tensor([[True, True, False]]), mask_frames=True, dtype=torch.float32)
    tensor([[0.5000, 0.5000, 0.0000]])
    """
    counted_VF = (mask_VF if mask_frames else torch.ones_like(mask_VF)).to(dtype)
    return counted_VF / counted_VF.sum(dim=1, keepdim=True)


def weighted_mean(frames_VFD: Tensor, weights_VF: Tensor) -> Tensor:
    """One vector per video, [V, D]."""
    return (weights_VF[:, None] @ frames_VFD).squeeze(1)


def text_conditioned_weights(
    logits_VFT: Tensor, mask_VF: Tensor, *, temperature: float, mask_frames: bool
) -> Tensor:
    """Softmax over the frames of t·f / temperature, [V, F, T].

    The released code masks after the softmax, so its weights do not sum to one on padded videos.
    """
    padding_VF1 = ~mask_VF[..., None]
    if mask_frames:
        return (logits_VFT / temperature).masked_fill(padding_VF1, float("-inf")).softmax(dim=1)
    return (logits_VFT / temperature).softmax(dim=1).masked_fill(padding_VF1, 0)


def pool_weights(logits_VFT: Tensor, mask_VF: Tensor, interaction: Interaction) -> Tensor:
    """The weight of each frame in the video vector of each pair, [V, F, T]; `logits_VFT` is t·f."""
    if interaction.pooling == "mean":
        weights_VF = mean_weights(mask_VF, mask_frames=interaction.mask_frames, dtype=logits_VFT.dtype)
        return weights_VF[..., None].expand_as(logits_VFT)
    if interaction.pooling != "text_conditioned":
        raise ValueError(f"pooling '{interaction.pooling}' has weights of its own: score with its module")
    return text_conditioned_weights(
        logits_VFT, mask_VF, temperature=interaction.pooling_temperature, mask_frames=interaction.mask_frames
    )


def without_padding(frames_VFD: Tensor, mask_VF: Tensor, *, mask_frames: bool) -> Tensor:
    """Frames with padding set to zero, whatever it holds; untouched under the released rule."""
    if not mask_frames or (not mask_VF.is_cuda and bool(mask_VF.all())):  # nothing to copy
        return frames_VFD
    return frames_VFD.masked_fill(~mask_VF[..., None], 0)
