"""GARE's score cards as `gap_aware_cuda.py` reads them: the small numbers of a video side by side, padded.

Shapes: V videos, F frames, H heads, A = H × F atoms, D embedding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from gare.interaction.pair_blocks import centre, full_precision

if TYPE_CHECKING:
    from gare.interaction.gap_aware_cards import GapAwareCards

FEW_TEXTS = 16
"""The fewest rows that tensor cores multiply: fewer texts cost as much."""
MOST_ATOMS = 128
_LEAST_FRAMES = 16


@dataclass(frozen=True)
class FusedCards:
    """Rows and matrices of each video, its frames padded to a power of two."""

    rows_VR: Tensor
    """float32. Over the atoms: bias of the logit to base two (−∞ where nothing is attended), key·mean, the
    linear part of LN3, atom·scaled, atom·fixed. Over the frames: bias of the pooling logit, weight in the
    mean, one if real, frame·scaled, frame·fixed, weight in the mean of unit frames. Then the variance of the
    mean frame, the mean of its numbers, and what the five matrices were divided by."""
    forms_VG: Tensor
    """For LN2, for LN3, of the atoms, atoms × frames, of the frames: each divided by its largest number, in
    half precision where the vectors are."""
    shared_2D: Tensor
    constants_K: Tensor
    num_frames: int
    """Padded."""
    num_atoms: int
    """Padded."""


def can_fuse(num_frames: int, num_heads: int) -> bool:
    """Whether the atoms of a video fit into one tile of the kernel, whose sides are powers of two.

    >>> can_fuse(12, 8), can_fuse(17, 8), can_fuse(12, 3)
    (True, False, False)
    """
    num_atoms = _padded(num_frames) * num_heads
    return num_atoms <= MOST_ATOMS and num_atoms & (num_atoms - 1) == 0


def fuse(cards: GapAwareCards) -> FusedCards:
    """The small parts of score cards, packed."""
    pool, owner = cards.pool, cards.increment
    assert owner is not None
    assert owner.own is not None
    num_videos, num_frames = pool.mask_VF.shape
    num_heads, size = owner.num_heads, _padded(num_frames)
    masks_padding = bool(getattr(cards.config, "mask_frames", True))

    def frames_row(row_VF: Tensor, value: float = 0.0) -> Tensor:
        return F.pad(row_VF.float(), (0, size - num_frames), value=value)

    def atoms_row(row_VA: Tensor, value: float = 0.0) -> Tensor:
        return frames_row(row_VA.unflatten(1, (num_heads, -1)), value).flatten(1)

    def matrix(form_VXY: Tensor, heads: tuple[int, int]) -> Tensor:
        """Both sides padded head by head."""
        form_VXY = form_VXY.float().unflatten(2, (heads[1], -1)).unflatten(1, (heads[0], -1))
        missing = size - num_frames
        form_VXY = F.pad(form_VXY, (0, missing, 0, 0, 0, missing)).flatten(3, 4).flatten(1, 2)
        return form_VXY.flatten(1)

    attended_VA = owner.mask_OC[:, None].expand(-1, num_heads, -1).flatten(1)
    counted_VF = (pool.mask_VF if masks_padding else torch.ones_like(pool.mask_VF)).float()
    mean_weight_VF = counted_VF / counted_VF.sum(dim=1, keepdim=True)
    length_VF = full_precision(pool.frames_VFD).norm(dim=-1).clamp_min(1e-12)
    mean_VD = full_precision(pool.mean_VD)
    forms = [
        matrix(form, (num_heads, num_heads)) for form in (owner.gram2_OAA, owner.gram3_OAA, owner.gram_OAA)
    ]
    forms += [matrix(owner.own.atom_frames_VAF, (num_heads, 1)), matrix(pool.gram_VFF, (1, 1))]
    largest = [form_VG.abs().amax(dim=1, keepdim=True).clamp_min(1e-30) for form_VG in forms]
    stored = torch.float16 if owner.key_OAD.dtype in (torch.float16, torch.bfloat16) else torch.float32
    rows = [
        atoms_row(owner.key_bias_OA.masked_fill(~attended_VA, -torch.inf) * math.log2(math.e), -torch.inf),
        atoms_row(owner.own.key_mean_VA),
        atoms_row(owner.linear3_OA),
        atoms_row(owner.atom_scaled_OA),
        atoms_row(owner.atom_fixed_OA),
        frames_row(torch.zeros_like(counted_VF).masked_fill(counted_VF == 0, -torch.inf), -torch.inf),
        frames_row(mean_weight_VF),
        frames_row(pool.mask_VF),
        frames_row(owner.own.linear_VKF[:, 0]),
        frames_row(owner.own.linear_VKF[:, 1]),
        frames_row(mean_weight_VF / length_VF),
        centre(mean_VD).square().mean(dim=-1, keepdim=True).float(),
        mean_VD.mean(dim=-1, keepdim=True).float(),
        *largest,
        mean_VD.new_zeros(num_videos, 1, dtype=torch.float32),
    ]
    scaled_D, fixed_D = owner.scaled_D, owner.fixed_D
    constants = [owner.constant3, scaled_D @ scaled_D, scaled_D @ fixed_D, fixed_D @ fixed_D]
    return FusedCards(
        rows_VR=torch.cat(rows, dim=1),
        forms_VG=torch.cat([(form / by).to(stored) for form, by in zip(forms, largest, strict=True)], dim=1),
        shared_2D=torch.stack([scaled_D, fixed_D]).float(),
        constants_K=torch.stack(constants).float(),
        num_frames=size,
        num_atoms=size * num_heads,
    )


def _padded(num_frames: int) -> int:
    return max(_LEAST_FRAMES, 1 << (num_frames - 1).bit_length())
