"""Token merging (NeighborRetr, HBI): tokens near a few dense ones are averaged, then attend to all of them.

Which tokens are centres carries no gradient; the averages do.

Shapes: O owners of N tokens, C centres, D embedding, H heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from gare.interaction.temporal import default_heads

NEAREST = 3
FLOOR = 1e-6


class MergeStage(nn.Module):
    """One stage: N tokens become ⌈N · ratio⌉, at least one.

    Args:
        ratio: how many of the tokens are left.
        leaky_padding: as the published code, let padded tokens reach their neighbours in the convolution.
    """

    def __init__(self, dim: int, ratio: float, *, leaky_padding: bool = False) -> None:
        super().__init__()
        self.ratio, self.leaky_padding = ratio, leaky_padding
        self.num_heads = 8 if dim % 8 == 0 else default_heads(dim)
        self.conv = nn.Conv1d(dim, dim, 3, padding=1, bias=False)
        # Without a bias: it would cancel in the averages and in the softmax.
        self.norm, self.score = nn.LayerNorm(dim), nn.Linear(dim, 1, bias=False)
        self.attention_norm = nn.LayerNorm(dim)
        self.query, self.key_value = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.project = nn.Linear(dim, dim)
        for linear in (self.query, self.key_value, self.project):
            nn.init.trunc_normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)

    def forward(self, tokens_OND: Tensor, mask_ON: Tensor | None = None) -> Tensor:
        """The merged tokens [O, C, D]; without a mask every token is real."""
        if mask_ON is not None and not self.leaky_padding:
            tokens_OND = tokens_OND.masked_fill(~mask_ON[..., None], 0)
        tokens_OND = self.norm(tokens_OND + self.conv(tokens_OND.mT).mT)
        score_ON = self.score(tokens_OND).squeeze(-1)
        if mask_ON is not None:
            score_ON = score_ON.masked_fill(~mask_ON, float("-inf"))
        num_centres = max(math.ceil(tokens_OND.shape[1] * self.ratio), 1)
        centre_of_ON = assign_centres(tokens_OND.detach(), mask_ON, num_centres)
        member_OCN = centre_of_ON[:, None] == torch.arange(num_centres, device=score_ON.device)[:, None]
        weight_OCN = member_OCN * score_ON.exp()[:, None]
        merged_OCD = weight_OCN @ tokens_OND / (weight_OCN.sum(dim=-1, keepdim=True) + FLOOR)
        return self._attend(merged_OCD, tokens_OND, score_ON)

    def _attend(self, merged_OCD: Tensor, tokens_OND: Tensor, score_ON: Tensor) -> Tensor:
        query = self._by_head(self.query(self.attention_norm(merged_OCD)))
        key, value = map(self._by_head, self.key_value(self.attention_norm(tokens_OND)).chunk(2, dim=-1))
        logits_OHCN = query @ key.mT / math.sqrt(query.shape[-1]) + score_ON[:, None, None]
        attended_OCD = (logits_OHCN.softmax(dim=-1) @ value).transpose(1, 2).flatten(2)
        merged: Tensor = merged_OCD + self.project(attended_OCD)
        return merged

    def _by_head(self, x_OND: Tensor) -> Tensor:
        x_ONHd: Tensor = x_OND.unflatten(-1, (self.num_heads, -1))
        return x_ONHd.transpose(1, 2)


@torch.no_grad()
def assign_centres(tokens_OND: Tensor, mask_ON: Tensor | None, num_centres: int) -> Tensor:
    """Which of the centres each token joins, [O, N]: dense tokens that are far from denser ones.

    The published code adds noise of 1e-6 to the density to break ties; here the first token wins.
    """
    num_tokens = tokens_OND.shape[1]
    distance_ONN = torch.cdist(tokens_OND, tokens_OND) / math.sqrt(tokens_OND.shape[-1])
    if mask_ON is not None:
        distance_ONN = torch.where(mask_ON[:, None], distance_ONN, distance_ONN.max() + 1)
    nearest_ONk = distance_ONN.topk(min(NEAREST, num_tokens), dim=-1, largest=False).values
    density_ON = (-nearest_ONk.square().mean(dim=-1)).exp()
    if mask_ON is not None:
        density_ON = density_ON * mask_ON
    is_denser_ONN = density_ON[:, None] > density_ON[..., None]
    furthest_O11 = distance_ONN.flatten(1).amax(dim=1)[:, None, None]
    peak_ON = torch.where(is_denser_ONN, distance_ONN, furthest_O11).amin(dim=-1)
    centre_OC = (peak_ON * density_ON).topk(num_centres, dim=-1).indices
    to_centres_OCN = distance_ONN.gather(1, centre_OC[..., None].expand(-1, -1, num_tokens))
    centre_of_ON = to_centres_OCN.argmin(dim=1)
    places_OC = torch.arange(num_centres, device=centre_OC.device).expand_as(centre_OC)
    return centre_of_ON.scatter(1, centre_OC, places_OC)


MERGE_NAMES = (
    (r"conv\.conv\.", "conv."),
    (r"norm\.", "norm."),
    (r"score\.bias", ""),
    (r"score\.", "score."),
)
"""The merging half of a stage in the published code."""

ATTENTION_NAMES = (
    (r"norm1\.", "attention_norm."),
    (r"attn\.q\.", "query."),
    (r"attn\.kv\.", "key_value."),
    (r"attn\.proj\.", "project."),
)
"""The attention half of a stage in the published code."""


def stage_names(merge: str, block: str, here: str) -> tuple[tuple[str, str], ...]:
    """The names of a stage whose halves the published code calls `merge` and `block`."""
    return (
        *((merge + r"\." + old, f"{here}.{new}" if new else "") for old, new in MERGE_NAMES),
        *((block + r"\." + old, f"{here}.{new}") for old, new in ATTENTION_NAMES),
    )
