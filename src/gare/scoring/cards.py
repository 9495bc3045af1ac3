"""What `factored` computes once per video (or per text, when psi attends over words) and may keep.

Step numbers are those of the derivation in `docs/method.md`.
Shapes: V videos, F frames, D embedding, H heads; O owners of C context tokens each, A = H × C atoms.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gare.scoring.pooling import mean_weights, weighted_mean, without_padding
from gare.types import (
    IncrementWeights,
    Interaction,
    PairModule,
    TokenHead,
    TokenWeights,
    VideoFeatures,
)

OWNER_NUMBERS = {"cpu": 2**23, "cuda": 2**28}
"""How many numbers one tensor of a block's cards may hold while they are made: 32 MB on a CPU."""

Card = TypeVar("Card", bound="PoolCard | OwnFrames | IncrementCard | TokenCard | ScoreCards")


@dataclass(frozen=True)
class PoolCard:
    """What pooling and the gap need of each video."""

    frames_VFD: Tensor
    mask_VF: Tensor
    gram_VFF: Tensor
    mean_VD: Tensor
    unit_mean_VD: Tensor
    """Mean of the unit frame vectors: its product with a unit text is their mean cosine."""


@dataclass(frozen=True)
class OwnFrames:
    """Steps 2 and 6: what psi folded into the frames of a video gives with that video's own vectors."""

    key_mean_VA: Tensor
    atom_frames_VAF: Tensor
    scaled_VF: Tensor
    fixed_VF: Tensor


@dataclass(frozen=True)
class IncrementCard:
    """Psi folded into the context tokens of each owner."""

    key_OAD: Tensor
    """Step 2: keys carried back through the query projection and LN1's scale, centred, over sqrt(D / H)."""
    key_bias_OA: Tensor
    mask_OC: Tensor
    gram2_OAA: Tensor
    """Step 3: the variance LN2 divides by, as a quadratic form in the attention weights."""
    gram3_OAA: Tensor
    """Step 4: the same for LN3, with a linear and a constant part."""
    linear3_OA: Tensor
    constant3: Tensor
    atom_OAD: Tensor
    """Step 5: Delta = Σ_a y_a atom_a + scaled / s3 + fixed."""
    scaled_D: Tensor
    fixed_D: Tensor
    gram_OAA: Tensor
    atom_scaled_OA: Tensor
    atom_fixed_OA: Tensor
    num_heads: int
    eps: float
    own: OwnFrames | None = None
    """Products with the owner's own frames; None when the owners are texts, which have none."""


@dataclass(frozen=True)
class TokenCard:
    """Token-wise interaction: the tokens of each owner at length one, and how much each counts."""

    unit_OND: Tensor
    weight_ON: Tensor
    mask_ON: Tensor


@dataclass(frozen=True)
class ScoreCards:
    """Videos made ready for any text; valid as long as the weights and the videos stay the same."""

    pool: PoolCard
    increment: IncrementCard | None
    """None for the baseline, and when psi attends over words: then the atoms belong to the texts."""
    interaction: Interaction
    tokens: TokenCard | None = None
    """Frames as tokens, for pooling "token_wise" alone."""

    def __len__(self) -> int:
        return self.pool.frames_VFD.shape[0]

    def __getitem__(self, rows: slice) -> ScoreCards:
        return map_owners(self, lambda tensor: tensor[rows])

    def to(self, device: torch.device | str) -> ScoreCards:
        return map_tensors(self, lambda tensor: tensor.to(device))


def map_tensors(card: Card, function: Callable[[Tensor], Tensor], *, owners_only: bool = False) -> Card:
    """The same card with every tensor changed; `owners_only` leaves alone what all owners share."""
    changes: dict[str, Any] = {}
    for field in fields(card):
        value = getattr(card, field.name)
        if isinstance(value, Tensor) and (_is_per_owner(field.name) or not owners_only):
            changes[field.name] = function(value)
        elif is_dataclass(value) and not isinstance(value, Interaction):
            changes[field.name] = map_tensors(value, function, owners_only=owners_only)  # type: ignore[type-var]
    return replace(card, **changes)


def map_owners(card: Card, function: Callable[[Tensor], Tensor]) -> Card:
    return map_tensors(card, function, owners_only=True)


def score_cards(video: VideoFeatures, psi: PairModule | None, interaction: Interaction) -> ScoreCards:
    """Precompute what scoring needs of each video: 2·H·F + F vectors of D numbers and a few F×F matrices.

    For token-wise interaction these are the frames at length one, with their weights.

    Works through the videos in blocks, so that no more than the cards themselves is ever held.
    """
    num_frames, dim = video.frames_VFD.shape[1:]
    weights = None if psi is None else psi.weights()
    num_atoms = num_frames * (weights.num_heads if isinstance(weights, IncrementWeights) else 1)
    size = owners_per_block(num_atoms, dim, video.frames_VFD.device)
    if len(video) <= size or torch.is_grad_enabled():
        return _score_cards(video, weights, interaction)
    whole: ScoreCards | None = None
    for start in range(0, len(video), size):
        part = _score_cards(video[start : start + size], weights, interaction)
        if whole is None:
            whole = map_owners(part, lambda tensor: tensor.new_empty(len(video), *tensor.shape[1:]))
        _copy_owners(part, whole, start)
    assert whole is not None
    return whole


def owners_per_block(num_atoms: int, dim: int, device: torch.device) -> int:
    """How many owners' cards are made at a time: their tensors hold num_atoms × dim numbers an owner."""
    budget = OWNER_NUMBERS.get(device.type, OWNER_NUMBERS["cpu"])
    return max(1, budget // (num_atoms * max(dim, num_atoms)))


def _copy_owners(part: Any, whole: Any, start: int) -> None:
    """Put the rows of a block's cards into their place."""
    for field in fields(part):
        value, target = getattr(part, field.name), getattr(whole, field.name)
        if _is_per_owner(field.name):
            target[start : start + len(value)] = value
        elif is_dataclass(value) and not isinstance(value, Interaction):
            _copy_owners(value, target, start)


def _is_per_owner(name: str) -> bool:
    """The shape in a field's name begins with O or V where there is a row for each owner."""
    return re.search(r"_[OV][A-Z]*$", name) is not None


def _score_cards(
    video: VideoFeatures, psi: IncrementWeights | TokenWeights | None, interaction: Interaction
) -> ScoreCards:
    pool = pool_card(video, interaction)
    if isinstance(psi, TokenWeights):
        return ScoreCards(pool, None, interaction, token_card(video.frames_VFD, video.mask_VF, psi.frames))
    if psi is None or interaction.context == "words":
        return ScoreCards(pool, None, interaction)
    attended_VF = video.mask_VF if interaction.mask_frames else torch.ones_like(video.mask_VF)
    card = increment_card(video.frames_VFD, attended_VF, psi)
    frames_VFD = full_precision(pool.frames_VFD)
    own = OwnFrames(
        key_mean_VA=(full_precision(card.key_OAD) @ pool.mean_VD[..., None]).squeeze(-1),
        atom_frames_VAF=full_precision(card.atom_OAD) @ frames_VFD.mT,
        scaled_VF=frames_VFD @ card.scaled_D,
        fixed_VF=frames_VFD @ card.fixed_D,
    )
    return ScoreCards(pool, replace(card, own=own), interaction)


def pool_card(video: VideoFeatures, interaction: Interaction) -> PoolCard:
    kept_VFD = without_padding(video.frames_VFD, video.mask_VF, mask_frames=interaction.mask_frames)
    frames_VFD = full_precision(kept_VFD)
    mean_VF = mean_weights(video.mask_VF, mask_frames=interaction.mask_frames, dtype=frames_VFD.dtype)
    return PoolCard(
        frames_VFD=kept_VFD,
        mask_VF=video.mask_VF,
        gram_VFF=frames_VFD @ frames_VFD.mT,
        mean_VD=weighted_mean(frames_VFD, mean_VF),
        unit_mean_VD=weighted_mean(F.normalize(frames_VFD, dim=-1), mean_VF),
    )


def increment_card(context_OCD: Tensor, mask_OC: Tensor, psi: IncrementWeights) -> IncrementCard:
    """Fold psi into context tokens. Large vectors are kept in the tokens' own precision, the rest in full."""
    stored = context_OCD.dtype
    context_OCD = full_precision(context_OCD.masked_fill(~mask_OC[..., None], 0))
    psi = psi.to(context_OCD.dtype)
    dim, num_heads = context_OCD.shape[-1], psi.num_heads
    normed_OCD = F.layer_norm(context_OCD, (dim,), psi.norm1_weight, psi.norm1_bias, psi.eps)

    def project_by_head(weight: Tensor, tokens_OCD: Tensor) -> Tensor:
        """Each head's slice of `tokens` through its rows of `weight`, [O, H·C, D]."""
        num_owners, num_tokens = tokens_OCD.shape[:2]
        # Heads first: one product a head, instead of a copy of the weights for every owner.
        tokens_HNd = tokens_OCD.reshape(num_owners * num_tokens, num_heads, -1).transpose(0, 1)
        projected_HND = tokens_HNd @ weight.view(num_heads, -1, dim)
        projected_HOCD = projected_HND.view(num_heads, num_owners, num_tokens, dim)
        return projected_HOCD.transpose(0, 1).flatten(1, 2)

    key_OCD = F.linear(normed_OCD, psi.key_weight, psi.key_bias) / math.sqrt(dim / num_heads)
    folded_OAD = project_by_head(psi.query_weight, key_OCD)
    query_bias = F.linear(psi.norm1_bias, psi.query_weight, psi.query_bias)
    key_bias_OAd = (key_OCD * query_bias).unflatten(-1, (num_heads, -1)).transpose(1, 2).flatten(1, 2)

    value_OCD = F.linear(normed_OCD, psi.value_weight, psi.value_bias)
    # Attention weights sum to one in each head, so the output bias may be shared out over the heads.
    mixed_OAD = centre(project_by_head(psi.out_weight.mT.contiguous(), value_OCD) + psi.out_bias / num_heads)

    residual = (
        torch.eye(dim, dtype=psi.residual_weight.dtype, device=context_OCD.device) + psi.residual_weight
    )
    residual_OAD = centre(F.linear(mixed_OAD * psi.norm2_weight, residual))
    constant_D = centre(F.linear(psi.norm2_bias, residual, psi.residual_bias))

    atom_OAD = F.linear(residual_OAD * psi.norm3_weight, psi.output_weight)
    scaled_D = F.linear(constant_D * psi.norm3_weight, psi.output_weight)
    fixed_D = F.linear(psi.norm3_bias, psi.output_weight, psi.output_bias)
    return IncrementCard(
        key_OAD=centre(folded_OAD * psi.norm1_weight).to(stored),
        key_bias_OA=key_bias_OAd.sum(dim=-1),
        mask_OC=mask_OC,
        gram2_OAA=mixed_OAD @ mixed_OAD.mT / dim,
        gram3_OAA=residual_OAD @ residual_OAD.mT / dim,
        linear3_OA=2 * residual_OAD @ constant_D / dim,
        constant3=constant_D @ constant_D / dim,
        atom_OAD=atom_OAD.to(stored),
        scaled_D=scaled_D,
        fixed_D=fixed_D,
        gram_OAA=atom_OAD @ atom_OAD.mT,
        atom_scaled_OA=atom_OAD @ scaled_D,
        atom_fixed_OA=atom_OAD @ fixed_D,
        num_heads=num_heads,
        eps=psi.eps,
    )


def token_card(tokens_OND: Tensor, mask_ON: Tensor, head: TokenHead) -> TokenCard:
    return TokenCard(unit_tokens(tokens_OND, mask_ON), importance(tokens_OND, mask_ON, head), mask_ON)


def unit_tokens(tokens_OND: Tensor, mask_ON: Tensor) -> Tensor:
    """Tokens of length one; padding of any content becomes zero."""
    return F.normalize(full_precision(tokens_OND.masked_fill(~mask_ON[..., None], 0)), dim=-1)


def importance(tokens_OND: Tensor, mask_ON: Tensor, head: TokenHead) -> Tensor:
    """The weight of each token among those of its owner, [O, N]; zero on padding."""
    tokens_OND = full_precision(tokens_OND.masked_fill(~mask_ON[..., None], 0))
    head = head.to(tokens_OND.dtype)
    hidden_OND = F.linear(tokens_OND, head.hidden_weight, head.hidden_bias).relu()
    logits_ON = F.linear(hidden_OND, head.output_weight).squeeze(-1)
    return logits_ON.masked_fill(~mask_ON, float("-inf")).softmax(dim=-1)


def full_precision(x: Tensor) -> Tensor:
    """Half precision is widened to float32; float32 and float64 are left alone."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def centre(x: Tensor) -> Tensor:
    return x - x.mean(dim=-1, keepdim=True)
