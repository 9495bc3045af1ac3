"""PIG, the Hybrid-Tower's pseudo-query (Lan et al. 2025): a generator guesses the text of a video.

The guess attends to the video as X-Pool's text does, before any text is known: at search time it is a plain
dual encoder. The published generator is a copy of CLIP's text encoder; here it is a causal transformer of the
same kind, started at random. It reads the frames, and the chosen patches where features have them.

Shapes: T texts, V videos, F frames, D embedding, N tokens of a video.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from gare.interaction.interaction import InteractionConfig
from gare.interaction.peers.peer import POOLER_NAMES, VectorPeer, cosines, fit
from gare.interaction.temporal import TemporalLayer, default_heads
from gare.interaction.xpool import CrossAttentionPool
from gare.settings import PositiveInt, Range
from gare.types import PairScores, TextFeatures, VideoFeatures


@dataclass(frozen=True)
class PigConfig(InteractionConfig):
    """Pseudo-queries."""

    name: Literal["pig"] = "pig"
    num_layers: PositiveInt = 4
    """Layers of the generator."""
    num_heads: PositiveInt = 1
    """Heads of the cross-attention; must divide the embedding, as the generator's own do."""
    max_frames: PositiveInt = 12
    dropout: Annotated[float, Range(least=0, below=1)] = 0.1


class Pig(VectorPeer):
    """The cosine of the text and the frames as the pseudo-query attends to them."""

    Config = PigConfig
    config: PigConfig
    published_terms: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "contrastive": {"weight": 2.0},
        "pseudo_query": {},
    }
    original_names = tuple((old, "fusion." + new) for old, new in POOLER_NAMES)

    def __init__(self, config: PigConfig, dim: int) -> None:
        super().__init__(config, dim)
        self.generator = QueryGenerator(dim, config.num_layers, max_tokens=config.max_frames)
        self.fusion = CrossAttentionPool(dim, num_heads=config.num_heads, dropout=config.dropout)

    def score_pairs(self, text: TextFeatures, video: VideoFeatures) -> PairScores:
        text, video = self.prepare(text, video)
        query_VD = self.pseudo_queries(video)
        parts = {"pseudo_query_VD": query_VD} if self.training else {}
        return PairScores(cosines(text.text_TD, self.fuse(query_VD, video)), None, parts)

    def video_vectors(self, video: VideoFeatures) -> Tensor:
        return self.fuse(self.pseudo_queries(video), video)

    def pseudo_queries(self, video: VideoFeatures) -> Tensor:
        """What the text of each video might be, [V, D]."""
        frames_VFD, mask_VF = fit(video.frames_VFD, video.mask_VF, self.config.max_frames, "frames")
        query_VD: Tensor = self.generator(frames_VFD, mask_VF)
        return query_VD

    def fuse(self, query_VD: Tensor, video: VideoFeatures) -> Tensor:
        """The frames as each query attends to them, [V, D]."""
        fused_V1D: Tensor = self.fusion(query_VD[:, None], video.frames_VFD, video.mask_VF)
        return fused_V1D.squeeze(1)


class QueryGenerator(nn.Module):
    """[tokens, end] through causal layers; the output at the end, projected."""

    def __init__(self, dim: int, num_layers: int, *, max_tokens: int) -> None:
        super().__init__()
        self.enter = nn.Linear(dim, dim)
        self.end = nn.Parameter(torch.empty(dim).normal_(std=0.02))
        self.position = nn.Parameter(torch.empty(max_tokens + 1, dim).normal_(std=0.01))
        self.layers = nn.ModuleList(TemporalLayer(dim, default_heads(dim)) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.project = nn.Linear(dim, dim, bias=False)

    def forward(self, tokens_VND: Tensor, mask_VN: Tensor) -> Tensor:
        end_V1D = self.end.expand(len(tokens_VND), 1, -1)
        hidden_VND = torch.cat([self.enter(tokens_VND), end_V1D], dim=1) + self.position
        mask_VN = torch.cat([mask_VN, mask_VN.new_ones(len(mask_VN), 1)], dim=1)
        size = mask_VN.shape[1]
        causal_NN = torch.ones(size, size, dtype=torch.bool, device=mask_VN.device).tril()
        # A padded token sees itself, so that no row is empty; nothing sees it.
        itself_NN = torch.eye(size, dtype=torch.bool, device=mask_VN.device)
        seen_VNN = (causal_NN & mask_VN[:, None]) | itself_NN
        for layer in self.layers:
            hidden_VND = layer(hidden_VND, seen_VNN)
        query_VD: Tensor = self.project(self.norm(hidden_VND[:, -1]))
        return query_VD


def chosen_tokens(
    tokens_VND: Tensor, attention_VHNN: Tensor, *, num_global: int, num_frames: int, number: int
) -> tuple[Tensor, Tensor]:
    """The special tokens of each video, and those with the patches that CLS attends to most behind them.

    Tokens are CLS, added global ones, then for each frame its token and its patches, as in CLIP-ViP.
    """
    total, first = tokens_VND.shape[1], 1 + num_global
    per_frame = (total - first) // num_frames
    frame_tokens = torch.arange(first, total, per_frame, device=tokens_VND.device)
    special = torch.cat([torch.arange(first, device=tokens_VND.device), frame_tokens])
    attention_VN = attention_VHNN[:, :, 0].amax(dim=1).clone()
    attention_VN[:, special] = float("-inf")
    best_VK = attention_VN.topk(number, dim=1).indices
    patches_VKD = tokens_VND.gather(1, best_VK[..., None].expand(-1, -1, tokens_VND.shape[-1]))
    special_VMD = tokens_VND[:, special]
    return special_VMD, torch.cat([special_VMD, patches_VKD], dim=1)
