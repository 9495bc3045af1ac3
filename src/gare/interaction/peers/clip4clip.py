"""CLIP4Clip's four heads (Luo et al. 2022): mean, LSTM, transformer, and the tight transformer over a pair.

The first three are a dual encoder: the cosine of the text and the mean of *unit* frames, after nothing, an
LSTM or a transformer over the frames. The tight head reads text and frames together and gives a number.

A model with this head needs no other transformer over frames: set `temporal.num_layers = 0`.

Shapes: T texts, V videos, F frames, D embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from gare.interaction.interaction import Interaction, InteractionConfig, PairVectors
from gare.interaction.peers.peer import Peer, VectorPeer, fit, masked_mean, start_normal, unit
from gare.interaction.score_cards import ScoreCards
from gare.interaction.temporal import LAYER_NORM_EPS, TemporalLayer, TemporalTransformer, default_heads
from gare.settings import PositiveInt, Range
from gare.types import PairScores, TextFeatures, VideoFeatures


@dataclass(frozen=True)
class Clip4ClipConfig(InteractionConfig):
    """One of CLIP4Clip's heads."""

    name: Literal["clip4clip"] = "clip4clip"
    head: Literal["mean", "lstm", "transformer", "tight"] = "transformer"
    num_layers: PositiveInt = 4
    num_heads: PositiveInt | None = None
    """Heads of the transformers; about one for each 64 dimensions if not given."""
    max_frames: PositiveInt = 12
    dropout: Annotated[float, Range(least=0, below=1)] = 0.1
    """On the input of the tight head, while training."""


class Clip4Clip(VectorPeer):
    """The cosine with the mean of unit frames, or the tight head's number."""

    Config = Clip4ClipConfig
    config: Clip4ClipConfig
    original_names = (
        (r"frame_position_embeddings\.weight", "temporal.position"),
        (r"transformerClip\.", "temporal."),
        (r"lstm_visual\.", "lstm."),
        (r"cross\.embeddings\.position_embeddings\.weight", "tight.position"),
        (r"cross\.transformer\.", "tight."),
        (r"cross\.pooler\.ln_pool\.", "tight.norm."),
        (r"cross\.pooler\.dense\.", "tight.dense."),
        (r"similarity_dense\.", "tight.output."),
    )

    def __init__(self, config: Clip4ClipConfig, dim: int) -> None:
        super().__init__(config, dim)
        heads = config.num_heads or default_heads(dim)
        if config.head == "transformer":
            self.temporal = TemporalTransformer(
                dim, num_layers=config.num_layers, num_heads=heads, max_frames=config.max_frames
            )
        elif config.head == "lstm":
            self.lstm = nn.LSTM(dim, dim, batch_first=True)
        elif config.head == "tight":
            self.fast_scoring = "none"
            self.tight = TightHead(
                dim, config.num_layers, heads, max_frames=config.max_frames, dropout=config.dropout
            )

    def score_pairs(self, text: TextFeatures, video: VideoFeatures) -> PairScores:
        if self.config.head != "tight":
            return super().score_pairs(text, video)
        text, video = self.prepare(text, video)
        # Not padded to max_frames: padding would cost as much as real frames, in every pair.
        size = min(video.mask_VF.shape[1], self.config.max_frames)
        frames_VFD, mask_VF = fit(video.frames_VFD, video.mask_VF, size, "frames")
        return PairScores(self.tight(text.text_TD, frames_VFD, mask_VF), None, are_logits=True)

    def score(
        self,
        text: TextFeatures,
        video: VideoFeatures | ScoreCards,
        *,
        text_block: int | None = None,
        video_block: int | None = None,
    ) -> Tensor:
        # All texts at once, as a dual encoder may: for the tight head 476 texts took 12 GB.
        score = Peer.score if self.config.head == "tight" else VectorPeer.score
        return score(self, text, video, text_block=text_block, video_block=video_block)

    def video_vectors(self, video: VideoFeatures) -> Tensor:
        frames_VFD, mask_VF = fit(video.frames_VFD, video.mask_VF, self.config.max_frames, "frames")
        if self.config.head == "transformer":
            frames_VFD = self.temporal(frames_VFD, mask_VF)
        elif self.config.head == "lstm":
            frames_VFD = self._over_real_frames(frames_VFD, mask_VF) + frames_VFD
        return masked_mean(unit(frames_VFD).masked_fill(~mask_VF[..., None], 0), mask_VF)

    def _over_real_frames(self, frames_VFD: Tensor, mask_VF: Tensor) -> Tensor:
        """The LSTM over the real frames in their order; what stands behind them cannot reach them."""
        order_VF = (~mask_VF).int().argsort(dim=1, stable=True)
        index_VFD = order_VF[..., None].expand_as(frames_VFD)
        hidden_VFD, _ = self.lstm(frames_VFD.gather(1, index_VFD))
        return torch.zeros_like(frames_VFD).scatter(1, index_VFD, hidden_VFD)

    def pair_vectors(self, text: TextFeatures, video: VideoFeatures) -> PairVectors:
        if self.config.head == "tight":
            return Interaction.pair_vectors(self, text, video)  # says that there is no single vector
        return super().pair_vectors(text, video)


class TightHead(nn.Module):
    """A transformer over [text, frames] of a pair; its first output becomes one number."""

    def __init__(self, dim: int, num_layers: int, num_heads: int, *, max_frames: int, dropout: float) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.empty(max_frames + 1, dim).normal_(std=0.02))
        self.layers = nn.ModuleList(TemporalLayer(dim, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)
        self.dense, self.output = nn.Linear(dim, dim), nn.Linear(dim, 1)
        self.dropout = nn.Dropout(dropout)
        start_normal(self)

    def forward(self, text_TD: Tensor, frames_VFD: Tensor, mask_VF: Tensor) -> Tensor:
        pairs = (len(text_TD), len(frames_VFD))
        text_TVD = text_TD[:, None, None].expand(-1, pairs[1], 1, -1)
        frames_TVFD = frames_VFD.expand(pairs[0], -1, -1, -1)
        tokens_PND = torch.cat([text_TVD, frames_TVFD], dim=2).flatten(0, 1)
        mask_VN = torch.cat([mask_VF.new_ones(pairs[1], 1), mask_VF], dim=1)
        mask_PN = mask_VN.expand(pairs[0], -1, -1).flatten(0, 1)
        hidden_PND = self.dropout(tokens_PND + self.position[: tokens_PND.shape[1]])
        for layer in self.layers:
            hidden_PND = layer(hidden_PND, mask_PN)
        hidden_PD = self.dense(self.norm(hidden_PND)[:, 0])
        hidden_PD = hidden_PD * torch.sigmoid(1.702 * hidden_PD)
        scores_TV: Tensor = self.output(hidden_PD).view(pairs)
        return scores_TV
