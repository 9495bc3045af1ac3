"""The one large matrix product behind a block of pairs. Shapes: O owners, A atoms, P others, D dims."""

from __future__ import annotations

import torch
from torch import Tensor

from gare.scoring.cards import full_precision


def products(rows_OAD: Tensor, other_PD: Tensor) -> Tensor:
    """All dot products [O, A, P] at once; half precision is multiplied as such and summed in float32."""
    flat_ND, other_DP = rows_OAD.flatten(0, 1), other_PD.mT
    if flat_ND.dtype == full_precision(flat_ND).dtype:
        product_NP = flat_ND @ other_DP.to(flat_ND.dtype)
    elif flat_ND.is_cuda and not torch.is_grad_enabled():
        product_NP = torch.mm(flat_ND, other_DP.to(flat_ND.dtype), out_dtype=torch.float32)
    else:
        product_NP = flat_ND.float() @ other_DP.float()
    return product_NP.view(*rows_OAD.shape[:2], -1)
