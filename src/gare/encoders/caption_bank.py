"""A bank of captions that every picture is compared with, so that pictures near all of them come first less.

Some pictures are near any text (hubs). A picture's level is the soft maximum of its cosines with typical
captions, τ log mean exp(cos / τ). Taken off a score, what is left is how likely the text is for this picture
rather than how near both are. The level depends on the picture alone: no other video and no other query is
needed, and it is part of the vector, so that stores, increments and every fast path stay as they are.

One dimension of the embedding carries it: all texts have the same value there, in proportion to their length,
and pictures have their level. The two multiply into an offset of the cosine.

Shapes: K captions, T texts, N pictures (any leading dimensions), D embedding.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LIFT = 0.3
"""The value of a text of length one in the dimension that carries the level. Recalls with 0.15 and 0.6 are
within 0.1 points."""


class CaptionBank(nn.Module):
    """Captions as unit vectors, and the usual level of a picture among them.

    Args:
        num_captions: how many are kept.
        dim: of the embedding.
        dimension: which one carries the level; what a model had there is lost.
        share: how much of the level is taken off a score.
        temperature: τ of the soft maximum.
    """

    captions_KD: Tensor
    usual_level: Tensor
    carries_D: Tensor

    def __init__(
        self, num_captions: int, dim: int, *, dimension: int, share: float, temperature: float
    ) -> None:
        super().__init__()
        self.share, self.temperature = share, temperature
        self.register_buffer("captions_KD", torch.zeros(num_captions, dim))
        self.register_buffer("usual_level", torch.zeros(()))
        self.register_buffer("carries_D", torch.arange(dim) == dimension, persistent=False)

    def lift_text(self, text_TD: Tensor) -> Tensor:
        """Texts with the same value, for their length, in the dimension that carries the level."""
        plain_TD = self._plain(text_TD)
        return torch.where(self.carries_D, _LIFT * plain_TD.norm(dim=-1, keepdim=True), plain_TD)

    def lower_pictures(self, vectors_ND: Tensor) -> Tensor:
        """Pictures with their level in the dimension that carries it: below zero where they are hubs."""
        plain_ND = self._plain(vectors_ND)
        height_N = self.share * (self.levels(plain_ND) - self.usual_level) / _LIFT
        lowered_ND = -height_N[..., None] * plain_ND.norm(dim=-1, keepdim=True)
        return torch.where(self.carries_D, lowered_ND.to(plain_ND.dtype), plain_ND)

    def levels(self, vectors_ND: Tensor) -> Tensor:
        """τ log mean exp(cos / τ) over the captions of the bank."""
        with torch.autocast(vectors_ND.device.type, enabled=False):  # small differences of large sums
            unit_ND = F.normalize(self._plain(vectors_ND).float(), dim=-1)
            logits_NK = unit_ND @ self.captions_KD.float().mT / self.temperature
            return self.temperature * (logits_NK.logsumexp(dim=-1) - math.log(len(self.captions_KD)))

    @torch.no_grad()
    def fill(self, text_KD: Tensor, vectors_ND: Tensor) -> None:
        """Take captions, and from some pictures the usual level, as the towers give both without a bank."""
        self.captions_KD.copy_(F.normalize(self._plain(text_KD), dim=-1))
        self.usual_level.copy_(self.levels(vectors_ND).mean())

    def _plain(self, vectors_ND: Tensor) -> Tensor:
        return vectors_ND.masked_fill(self.carries_D, 0)


def least_used_dimension(text_KD: Tensor, vectors_ND: Tensor) -> int:
    """Where texts times pictures vary least: the dimension whose loss changes scores least.

    >>> least_used_dimension(torch.tensor([[3.0, 1.0], [-3.0, 1.0]]), torch.tensor([[2.0, 2.0], [2.0, -2.0]]))
    1
    """
    text_KD, vectors_ND = F.normalize(text_KD, dim=-1), F.normalize(vectors_ND, dim=-1)
    # Of every pair: the mean square of the product, so that a dimension with a common value counts too.
    use_D = text_KD.square().mean(dim=0) * vectors_ND.square().mean(dim=0)
    return int((use_D - (text_KD.mean(dim=0) * vectors_ND.mean(dim=0)).square()).argmin())
