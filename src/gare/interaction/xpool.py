"""X-Pool: the text attends to the frames (Gorti et al. 2022). docs/method.md lists what differs.

The pooled vector is what the increment net would give for the text as its query, at length one, so its fast
path is that of the increment net (`gap_aware_factored.py`).

Shapes: T texts, V videos, F frames, H heads, D embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gare.interaction import gap_aware_factored as factored
from gare.interaction.gap_aware_cards import GapAwareCards, gap_aware_cards
from gare.interaction.increment_net import CrossAttention, IncrementWeights
from gare.interaction.interaction import (
    SQUARE_FLOOR,
    FastScoring,
    Interaction,
    InteractionConfig,
    PairProducts,
    PairVectors,
    cosine,
    score_in_blocks,
)
from gare.interaction.mean_pooling import MeanPooling, MeanPoolingConfig
from gare.interaction.query_first import QueryFirst
from gare.interaction.score_cards import ScoreCards, features_of
from gare.settings import PositiveInt, Range
from gare.types import FrameWeights, PairScores, TextFeatures, VideoFeatures

TEXT_ASKS = factored.PairRule(query="text", normalise=True)
"""Cross-attention pooling is the increment net with the text as its query: its output is the video vector."""


@dataclass(frozen=True)
class XPoolConfig(InteractionConfig):
    """Cross-attention from the text to the frames."""

    name: Literal["xpool"] = "xpool"
    num_heads: PositiveInt = 1
    dropout: Annotated[float, Range(least=0, below=1)] = 0.3


class CrossAttentionPool(CrossAttention):
    """Cross-attention from the text to the frames: its output is the video vector of the pair.

    It starts from identity maps and zero biases, as the authors' code does: at first the text only weighs the
    normalised frames.
    """

    def __init__(self, dim: int, *, num_heads: int = 1, dropout: float = 0.3) -> None:
        super().__init__(dim, num_heads=num_heads, dropout=dropout)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.eye_(module.weight)
                nn.init.zeros_(module.bias)

    def weights(self) -> IncrementWeights:
        """The parameters as plain tensors; the last layer changes nothing."""
        like = self.out.weight
        identity = torch.eye(like.shape[0], dtype=like.dtype, device=like.device)
        return self._with_output(identity, like.new_zeros(like.shape[0]))


class XPool(Interaction):
    """The cosine of the text and the frames it attended to; a baseline without increments."""

    Config = XPoolConfig
    config: XPoolConfig
    fast_scoring: FastScoring = "products"
    original_names = (
        (r"cross_attn\.q_proj\.", "attention.query."),
        (r"cross_attn\.k_proj\.", "attention.key."),
        (r"cross_attn\.v_proj\.", "attention.value."),
        (r"cross_attn\.out_proj\.", "attention.out."),
        (r"linear_proj\.", "attention.residual."),
        (r"layer_norm(\d)\.", r"attention.norm\1."),
    )

    def __init__(self, config: XPoolConfig, dim: int) -> None:
        super().__init__(config, dim)
        self.attention = CrossAttentionPool(dim, num_heads=config.num_heads, dropout=config.dropout)
        self._mean = MeanPooling(MeanPoolingConfig(), dim)

    def score_pairs(self, text: TextFeatures, video: VideoFeatures) -> PairScores:
        self.check(text, video)
        return self._score_pairs(text, video, self.attention)

    def _score_pairs(
        self, text: TextFeatures, video: VideoFeatures, net: CrossAttention | QueryFirst
    ) -> PairScores:
        text_TVD = text.text_TD[:, None].expand(-1, len(video), -1)
        return PairScores(cosine(text_TVD, self._pool(net, text_TVD, video)), None)

    def score(
        self,
        text: TextFeatures,
        video: VideoFeatures | ScoreCards,
        *,
        text_block: int | None = None,
        video_block: int | None = None,
    ) -> Tensor:
        self.check(text, video)
        weights = self.attention.weights()
        if isinstance(video, VideoFeatures) and factored.is_few(text, video):
            text, video = factored.in_full_precision(text, video)
            net = QueryFirst(weights)
            return score_in_blocks(
                lambda texts, videos: self._score_pairs(texts, videos, net),
                text,
                video,
                text_block=text_block,
                video_block=video_block or factored.FEW_VIDEOS_PER_BLOCK,
            )

        def score_block(texts: TextFeatures, cards: GapAwareCards) -> Tensor:
            assert cards.increment is not None
            pairs = factored.pair_products(texts, cards.increment, cards.pool, self._mean, TEXT_ASKS)
            return (pairs.text_increment * pairs.text_sq.clamp_min(SQUARE_FLOOR).rsqrt()).clamp(-1, 1)

        return factored.map_video_blocks(
            score_block, text, video, self.cards, weights.num_heads, text_block, video_block
        )

    def cards(self, video: VideoFeatures) -> GapAwareCards:
        return gap_aware_cards(video, self.config, self._mean, self.attention.weights())

    def frame_weights(self, text: TextFeatures, video: VideoFeatures | ScoreCards) -> FrameWeights:
        """The attention of each head, and its mean over the heads."""
        self.check(text, video)
        cards = video if isinstance(video, GapAwareCards) else self.cards(features_of(video))
        attention_TVHF = factored.frame_attention(text, cards, TEXT_ASKS)
        return FrameWeights(attention_TVHF.mean(dim=2), attention_TVHF)

    @torch.no_grad()
    def pair_vectors(self, text: TextFeatures, video: VideoFeatures) -> PairVectors:
        """The video vector at length one: the cosine does not see how long LayerNorm makes it."""
        text_TVD = text.text_TD[:, None].expand(-1, len(video), -1)
        pooled_TVD = self._pool(QueryFirst(self.attention.weights().to(text_TVD.dtype)), text_TVD, video)
        return PairVectors(text_TVD, F.normalize(pooled_TVD, dim=-1), torch.zeros_like(text_TVD))

    @torch.no_grad()
    def pair_products(self, text: TextFeatures, video: VideoFeatures) -> PairProducts:
        cards = self.cards(video)
        assert cards.increment is not None
        pairs = factored.pair_products(text, cards.increment, cards.pool, self._mean, TEXT_ASKS)
        text_pooled_TV = pairs.text_increment.mT
        zero_TV = torch.zeros_like(text_pooled_TV)
        text_sq_TV = pairs.text_sq[:, None].expand_as(zero_TV)
        return PairProducts(text_sq_TV, torch.ones_like(zero_TV), text_pooled_TV, zero_TV, zero_TV, zero_TV)

    def _pool(self, net: CrossAttention | QueryFirst, text_TVD: Tensor, video: VideoFeatures) -> Tensor:
        video = self._mean.without_padding(video)
        pooled_VTD: Tensor = net(text_TVD.transpose(0, 1), video.frames_VFD, video.mask_VF)
        return pooled_VTD.transpose(0, 1)
