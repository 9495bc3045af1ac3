"""UATVR (Fang et al. 2023): token-wise scores with extra tokens, and samples in training.

A model with this head needs no other transformer over frames: set `temporal.num_layers = 0`.

Shapes: T texts, V videos, F frames, W words, D embedding, O owners of N tokens, E extra tokens, S samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from gare.interaction.interaction import FastScoring, InteractionConfig
from gare.interaction.peers.peer import COUNT_PADDING, Peer, fit, masked_mean, start_normal, unit
from gare.interaction.temporal import TemporalLayer, default_heads
from gare.interaction.token_wise import ZERO_PADDING, TokenCard, importance, token_scores, unit_tokens
from gare.settings import PositiveInt
from gare.types import PairScores, TextFeatures, VideoFeatures


@dataclass(frozen=True)
class UatvrConfig(InteractionConfig):
    """Token-wise interaction with extra tokens on both sides."""

    name: Literal["uatvr"] = "uatvr"
    num_extra: PositiveInt = 2
    """Learned tokens added to each side."""
    num_samples: PositiveInt = 7
    """Samples of each text's and video's distribution, while training."""
    num_layers: PositiveInt = 4
    num_heads: PositiveInt | None = None
    """Heads of the transformer; about one for each 64 dimensions if not given."""
    max_frames: PositiveInt = 12
    max_words: PositiveInt = 32
    zero_padding: bool = False
    """Compare padding with a cosine of zero instead of leaving it out."""
    attend_padding: bool = False
    """Let padding take part in the attention of the distributions."""

    COUNTS_PADDING: ClassVar[Mapping[str, bool]] = {"attend_padding": True}
    TRAPS: ClassVar[Mapping[str, str]] = {
        "zero_padding": ZERO_PADDING,
        "attend_padding": "The nets of mean and spread attend to padding. " + COUNT_PADDING,
    }


class Uatvr(Peer):
    """WTI over words, frames and extra tokens, after one transformer that both sides share."""

    Config = UatvrConfig
    config: UatvrConfig
    reads_words = True
    fast_scoring: FastScoring = "products"
    published_terms: ClassVar[Mapping[str, Mapping[str, Any]]] = {"multi_instance": {}, "sample_kl": {}}
    original_names = (
        (r"(text|video)_weight_fc\.2\.bias", ""),
        (r"frame_position_embeddings\.weight", "video.position"),
        (r"word_position_embeddings\.weight", "text.position"),
        (r"transformerClip\.layers\.", "layers."),
        (r"pie_net_(text|video)\.attention\.w_(\d)\.", r"\1.mean.attention.\2."),
        (r"pie_net_(text|video)\.fc\.", r"\1.mean.project."),
        (r"pie_net_(text|video)\.layer_norm\.", r"\1.mean_norm."),
        (r"uncertain_net_(text|video)\.attention\.w_(\d)\.", r"\1.spread.attention.\2."),
        (r"uncertain_net_(text|video)\.fc\.", r"\1.spread.project."),
        (r"uncertain_net_(text|video)\.fc2\.", r"\1.spread_pooled."),
        (r"(text|video)_weight_fc\.0\.", r"\1.hidden."),
        (r"(text|video)_weight_fc\.2\.", r"\1.output."),
    )

    def __init__(self, config: UatvrConfig, dim: int) -> None:
        super().__init__(config, dim)
        heads = config.num_heads or default_heads(dim)
        self.layers = nn.ModuleList(TemporalLayer(dim, heads) for _ in range(config.num_layers))
        self.text = Side(dim, config.max_words, config.num_extra)
        self.video = Side(dim, config.max_frames, config.num_extra)

    def score_pairs(self, text: TextFeatures, video: VideoFeatures) -> PairScores:
        text, video = self.prepare(text, video)
        noise: tuple[Tensor | None, Tensor | None] = (None, None)
        if self.training:
            noise = (self._noise(text.text_TD), self._noise(video.frames_VFD[:, 0]))
        return self.scores(text, video, *noise)

    def scores(
        self,
        text: TextFeatures,
        video: VideoFeatures,
        text_noise_TSD: Tensor | None = None,
        video_noise_VSD: Tensor | None = None,
    ) -> PairScores:
        """Scores; with noise, the samples of both sides too."""
        words_TND, word_mask = self._encode(self.text, text.words_TWD, text.mask_TW, "words")
        frames_VND, frame_mask = self._encode(self.video, video.frames_VFD, video.mask_VF, "frames")
        zero_padding = self.config.zero_padding
        cards = [
            self._card(side, tokens, mask)
            for side, tokens, mask in (
                (self.text, words_TND, word_mask),
                (self.video, frames_VND, frame_mask),
            )
        ]
        parts: dict[str, Tensor] = {}
        if text_noise_TSD is not None and video_noise_VSD is not None:
            extra = self.config.num_extra
            for side, name, tokens, mask, noise, first in (
                (self.text, "text", words_TND, word_mask, text_noise_TSD, 1),
                (self.video, "video", frames_VND, frame_mask, video_noise_VSD, 0),
            ):
                kept, kept_mask = tokens[:, :-extra], mask[:, :-extra]
                attended = torch.ones_like(kept_mask) if self.config.attend_padding else kept_mask
                mean_OD, spread_OD = side.distribution(kept, kept_mask, attended, first)
                samples_OSD = mean_OD[:, None] + noise * spread_OD.exp()[:, None]
                parts |= {
                    f"{name}_mean": mean_OD,
                    f"{name}_spread": spread_OD,
                    f"{name}_samples": samples_OSD,
                }
        return PairScores(token_scores(*cards, zero_padding=zero_padding), None, parts)

    def _encode(self, side: Side, tokens_OND: Tensor, mask_ON: Tensor, what: str) -> tuple[Tensor, Tensor]:
        """Unit tokens with the extra ones behind them, after the transformer."""
        size = self.config.max_words if what == "words" else self.config.max_frames
        tokens_OND, mask_ON = fit(tokens_OND, mask_ON, size, what)
        extra_OED = side.position[size:].expand(len(tokens_OND), -1, -1)
        hidden_OND = torch.cat([tokens_OND + side.position[:size], extra_OED], dim=1)
        mask_ON = torch.cat([mask_ON, mask_ON.new_ones(extra_OED.shape[:2])], dim=1)
        for layer in self.layers:
            hidden_OND = layer(hidden_OND, mask_ON)
        return unit(torch.cat([hidden_OND[:, :size] + tokens_OND, hidden_OND[:, size:]], dim=1)), mask_ON

    def _card(self, side: Side, tokens_OND: Tensor, mask_ON: Tensor) -> TokenCard:
        weight_ON = importance(tokens_OND, mask_ON, side.hidden, side.output)
        return TokenCard(unit_tokens(tokens_OND, mask_ON), weight_ON, mask_ON)

    def _noise(self, like_OD: Tensor) -> Tensor:
        shape = (len(like_OD), self.config.num_samples, self.dim)
        return torch.randn(shape, dtype=like_OD.dtype, device=like_OD.device)


class Side(nn.Module):
    """What texts and videos each have of their own: positions, token weights, distribution nets."""

    def __init__(self, dim: int, size: int, num_extra: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.empty(size + num_extra, dim).normal_(std=0.02))
        self.hidden, self.output = nn.Linear(dim, dim), nn.Linear(dim, 1, bias=False)
        self.mean, self.spread = AttentionPool(dim), AttentionPool(dim)
        self.mean_norm, self.spread_pooled = nn.LayerNorm(dim), nn.Linear(dim, dim)
        start_normal(self)

    def distribution(
        self, tokens_OND: Tensor, mask_ON: Tensor, attended_ON: Tensor, first: int
    ) -> tuple[Tensor, Tensor]:
        """Mean and log spread, [O, D] each; the pooled vector leaves out what stands before `first`."""
        counted_ON = mask_ON.clone()
        counted_ON[:, :first] = False
        empty_O1 = ~counted_ON.any(dim=1, keepdim=True)
        counted_ON = torch.where(empty_O1, mask_ON, counted_ON)
        pooled_OD = unit(masked_mean(tokens_OND.masked_fill(~mask_ON[..., None], 0), counted_ON))
        mean_OD = unit(self.mean_norm(pooled_OD + self.mean(tokens_OND, attended_ON).sigmoid()))
        spread_OD: Tensor = self.spread(tokens_OND, attended_ON) + self.spread_pooled(pooled_OD)
        return mean_OD, spread_OD


class AttentionPool(nn.Module):
    """Tokens weighted by a small net, then a linear map."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        hidden, output = nn.Linear(dim, dim // 2, bias=False), nn.Linear(dim // 2, 1, bias=False)
        self.attention = nn.ModuleDict({"1": hidden, "2": output})
        self.project = nn.Linear(dim, dim)

    def forward(self, tokens_OND: Tensor, mask_ON: Tensor) -> Tensor:
        logits_ON = self.attention["2"](self.attention["1"](tokens_OND).tanh()).squeeze(-1)
        weights_ON = logits_ON.masked_fill(~mask_ON, float("-inf")).softmax(dim=-1)
        pooled_OD: Tensor = self.project((weights_ON[:, None] @ tokens_OND).squeeze(1))
        return pooled_OD
