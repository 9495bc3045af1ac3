"""GARE: an increment for every pair, predicted from its gap, closes that gap before the cosine is taken.

This file is the reference: every increment is formed, so each line can be read beside the paper, and training
uses it. A pair costs four D×D products, and T×V×D numbers are kept. `score` gives the same numbers by
`gap_aware_factored.py`, by `gap_aware_cuda.py` on a GPU, or by `query_first.py` where there are few texts.

Shapes: T texts, V videos, F frames, W words, D embedding.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gare.interaction import gap_aware_factored as factored
from gare.interaction.fused_cards import can_fuse
from gare.interaction.gap_aware_bounds import GapAwareBounds
from gare.interaction.gap_aware_cards import GapAwareCards, IncrementCard, gap_aware_cards
from gare.interaction.increment_keys import KeyCards
from gare.interaction.increment_net import IncrementNet, multiply_adds
from gare.interaction.interaction import (
    FastScoring,
    Interaction,
    InteractionConfig,
    PairProducts,
    PairVectors,
    cosine,
    products_of,
    score_in_blocks,
)
from gare.interaction.mean_pooling import MeanPooling, MeanPoolingConfig
from gare.interaction.pooled_cosine import PoolCard, PooledCosine, mean_weights, weighted_mean
from gare.interaction.query_first import QueryFirst
from gare.interaction.score_bounds import BoundCards, ScoreBounds
from gare.interaction.score_cards import ScoreCards, features_of
from gare.interaction.text_conditioned import TextConditionedConfig, TextConditionedPooling
from gare.settings import PositiveFloat, PositiveInt, Range
from gare.types import FrameWeights, PairScores, TextFeatures, VideoFeatures

KERNEL_POOLINGS = ("mean", "text_conditioned")
"""What `gap_aware_cuda.py` can pool with. Another pooling is scored by plain torch."""


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def _kernels() -> Any:
    """Imported when first used, for it imports Triton."""
    from gare.interaction import gap_aware_cuda

    return gap_aware_cuda


@dataclass(frozen=True)
class GapAwareConfig(InteractionConfig):
    """GARE's settings; most are ablation axes of the paper."""

    name: Literal["gare"] = "gare"
    corrected_side: Literal["text", "video"] = "text"
    """Which vector the increment is added to."""
    context: Literal["frames", "words"] = "frames"
    """What the increment net attends over: the frames of the video or the words of the text."""
    query: Literal["gap", "text", "paper_text"] = "gap"
    """The query of its attention: the gap, or the text alone. With "paper_text" the net gives a new text,
    and the increment is the unit gap from it to the video times a *learned* length, as the paper displays it.
    With "text" it is the net's own direction times `exp(mean cosine of text and frames)`: our earlier form,
    kept for models saved with it."""
    gap_direction: Literal["video_minus_text", "text_minus_video"] = "video_minus_text"
    """The paper's eta: +1 is video minus text."""
    normalise: bool = False
    """Scale every increment to length one."""
    pooling: Literal["mean", "text_conditioned"] = "mean"
    """How frames become the video vector of the score."""
    pooling_temperature: PositiveFloat = 3.0
    """Temperature of the text-conditioned softmax over frames."""
    mask_frames: bool = True
    """Leave padded frames out of the mean and of the net's attention. The released code does not."""
    num_heads: PositiveInt = 1
    """Attention heads of the increment net."""
    dropout: Annotated[float, Range(least=0, below=1)] = 0.3
    """Dropout of the increment net, while training."""
    max_frames: PositiveInt = 64
    """How many frames the learned length of "paper_text" reads; nothing else depends on it."""
    init: Literal["normal", "zero_output"] = "normal"
    """normal: N(0, 0.02) for every weight, as the released code. zero_output: increments start at zero."""

    COUNTS_PADDING: ClassVar[Mapping[str, bool]] = {"mask_frames": False}

    @property
    def rule(self) -> factored.PairRule:
        """What the fast paths need to know of the settings."""
        query: Literal["gap", "text"] = "gap" if self.query == "gap" else "text"
        return factored.PairRule(self.corrected_side, query, self.gap_direction, self.normalise)


class GapAware(Interaction):
    """cos(t + Delta, v), or cos(t, v + Delta), with Delta from the increment net."""

    Config = GapAwareConfig
    config: GapAwareConfig
    has_increments = True
    fast_scoring: FastScoring = "products"
    published_terms: ClassVar[Mapping[str, Mapping[str, Any]]] = {"kl": {}, "radius": {}, "direction": {}}

    def __init__(self, config: GapAwareConfig, dim: int) -> None:
        super().__init__(config, dim)
        self.increment_net = IncrementNet(
            dim, num_heads=config.num_heads, dropout=config.dropout, init=config.init
        )
        self.pooling = _build_pooling(config, dim)
        self._folded: QueryFirst | None = None
        if config.query == "paper_text":
            self.fast_scoring = "none"
            if not config.normalise:  # increments of length one need no other
                self.length = nn.Linear(config.max_frames, 1)
                nn.init.normal_(self.length.weight, std=0.02)
                nn.init.zeros_(self.length.bias)

    @property
    def reads_words(self) -> bool:
        return self.config.context == "words"

    @property
    def corrected_side(self) -> str:
        return self.config.corrected_side

    # --- the reference --------------------------------------------------------------------------------------

    def score_pairs(self, text: TextFeatures, video: VideoFeatures) -> PairScores:
        self.check(text, video)
        return self._score_pairs(text, video, self.increment_net)

    def _score_pairs(
        self, text: TextFeatures, video: VideoFeatures, net: IncrementNet | QueryFirst
    ) -> PairScores:
        video = self.pooling.without_padding(video)
        text_TVD = text.text_TD[:, None].expand(-1, len(video), -1)
        video_pooled_TVD = self.pooling.pool(text.text_TD, video)
        increment_TVD = self._increments(text, video, net)
        if self.config.corrected_side == "text":
            shifted_text_TVD = text_TVD + increment_TVD
            return PairScores(cosine(shifted_text_TVD, video_pooled_TVD), increment_TVD)
        return PairScores(cosine(text_TVD, video_pooled_TVD + increment_TVD), increment_TVD)

    def increments(self, text: TextFeatures, video: VideoFeatures) -> Tensor:
        """Delta_ij for every pair, [T, V, D]."""
        return self._increments(text, self.pooling.without_padding(video), self.increment_net)

    def _increments(self, text: TextFeatures, video: VideoFeatures, net: IncrementNet | QueryFirst) -> Tensor:
        config = self.config
        text_TVD = text.text_TD[:, None].expand(-1, len(video), -1)
        mean_VF = mean_weights(video.mask_VF, mask_frames=config.mask_frames, dtype=video.frames_VFD.dtype)
        video_mean_VD = weighted_mean(video.frames_VFD, mean_VF)
        sign = 1 if config.gap_direction == "video_minus_text" else -1
        query_TVD = sign * (video_mean_VD - text_TVD) if config.query == "gap" else text_TVD

        if config.context == "frames":
            attended_VF = video.mask_VF if config.mask_frames else torch.ones_like(video.mask_VF)
            increment_TVD = net(query_TVD.transpose(0, 1), video.frames_VFD, attended_VF).transpose(0, 1)
        else:
            words_TWD = text.words_TWD.masked_fill(~text.mask_TW[..., None], 0)
            increment_TVD = net(query_TVD, words_TWD, text.mask_TW)

        if config.query == "paper_text":
            updated_text_TVD = increment_TVD
            increment_TVD = F.normalize(sign * (video_mean_VD - updated_text_TVD), dim=-1)
            return increment_TVD if config.normalise else increment_TVD * self._lengths(text, video)
        if config.normalise:
            return F.normalize(increment_TVD, dim=-1)
        if config.query == "text":
            unit_VD = weighted_mean(F.normalize(video.frames_VFD, dim=-1), mean_VF)
            length_TV = (F.normalize(text.text_TD, dim=-1) @ unit_VD.mT).exp()
            return F.normalize(increment_TVD, dim=-1) * length_TV[..., None]
        return increment_TVD

    def _lengths(self, text: TextFeatures, video: VideoFeatures) -> Tensor:
        """exp of a learned linear map of the cosines of text and frames, [T, V, 1]."""
        text_TD, frames_VFD = F.normalize(text.text_TD, dim=-1), F.normalize(video.frames_VFD, dim=-1)
        cosines_TVF = torch.einsum("td,vfd->tvf", text_TD, frames_VFD)
        missing = self.config.max_frames - cosines_TVF.shape[-1]
        if missing < 0:
            if cosines_TVF[..., missing:].any():
                raise ValueError(
                    f"videos of {cosines_TVF.shape[-1]} frames, but the learned length reads "
                    f"{self.config.max_frames}; build the model with interaction.max_frames="
                    f"{cosines_TVF.shape[-1]}"
                )
            cosines_TVF = cosines_TVF[..., :missing]
        cosines_TVF = F.pad(cosines_TVF, (0, max(missing, 0)))
        weight, bias = self.length.weight.to(cosines_TVF.dtype), self.length.bias.to(cosines_TVF.dtype)
        return F.linear(cosines_TVF, weight, bias).exp()

    # --- the same, fast -------------------------------------------------------------------------------------

    def score(
        self,
        text: TextFeatures,
        video: VideoFeatures | ScoreCards,
        *,
        text_block: int | None = None,
        video_block: int | None = None,
    ) -> Tensor:
        """Equal to `score_pairs` up to rounding whatever the blocks; half precision in float32.

        Pass `cards(video)` instead of videos to pay for them once.
        """
        self.check(text, video)
        if isinstance(video, GapAwareCards) and self._kernel_fits(text, video):
            return self._score_fused(text, video)  # whose memory does not grow with the pairs, but for scores
        over_words = self.config.context == "words"
        is_plain = self.config.query == "paper_text"  # it has no factored form
        if is_plain:
            video = features_of(video)
        if isinstance(video, VideoFeatures) and (
            is_plain or (not over_words and factored.is_few(text, video))
        ):
            text, video = factored.in_full_precision(text, video)
            net = self._folded or QueryFirst(self.increment_net.weights())
            return score_in_blocks(
                lambda texts, videos: self._score_pairs(texts, videos, net),
                text,
                video,
                text_block=text_block,
                video_block=video_block or factored.FEW_VIDEOS_PER_BLOCK,
            )

        def score_block(texts: TextFeatures, owner: IncrementCard, pool: PoolCard) -> Tensor:
            pairs = factored.pair_products(texts, owner, pool, self.pooling, self.config.rule)
            return factored.cosine_of_products(pairs, self.config.corrected_side)

        def score_video_block(texts: TextFeatures, cards: GapAwareCards) -> Tensor:
            assert cards.increment is not None
            if self._kernel_fits(texts, cards):
                return self._score_fused(texts, cards).mT
            return score_block(texts, cards.increment, cards.pool)

        weights = self.increment_net.weights()
        if over_words:
            return factored.map_text_blocks(
                score_block, text, video, weights, self.pooling, text_block, video_block
            )
        return factored.map_video_blocks(
            score_video_block, text, video, self.cards, weights.num_heads, text_block, video_block
        )

    def cards(self, video: VideoFeatures) -> GapAwareCards:
        weights = None if self.config.context == "words" else self.increment_net.weights()
        return gap_aware_cards(video, self.config, self.pooling, weights, fused=self._has_kernel(video))

    def _has_kernel(self, video: VideoFeatures) -> bool:
        """Whether `gap_aware_cuda.py` can score such videos; if not, plain torch gives the same numbers."""
        config, frames_VFD = self.config, video.frames_VFD
        return (
            frames_VFD.is_cuda
            and frames_VFD.dtype != torch.float64
            and config.context == "frames"
            and config.query != "paper_text"
            and config.pooling in KERNEL_POOLINGS
            and can_fuse(frames_VFD.shape[1], config.num_heads)
            and _has_triton()
        )

    def _kernel_fits(self, text: TextFeatures, cards: GapAwareCards) -> bool:
        """Whether the kernel can score this block, which no gradient is wanted of."""
        needs_grad = text.text_TD.requires_grad or cards.pool.gram_VFF.requires_grad
        if needs_grad and torch.is_grad_enabled():
            return False
        is_ready = cards.fused is not None and cards.pool.frames_VFD.is_cuda
        return is_ready or self._has_kernel(cards.video)

    def _score_fused(self, text: TextFeatures, cards: GapAwareCards) -> Tensor:
        scores_TV: Tensor = _kernels().score(text.text_TD, cards)
        return scores_TV

    def for_search(self) -> GapAware:
        """The same interaction with the net's matrices multiplied out: four products a pair, not six."""
        ready = copy.copy(self)
        ready._folded = QueryFirst.fold(self.increment_net.weights())
        return ready

    def without_increments(self) -> PooledCosine:
        return self.pooling

    @torch.no_grad()
    def radii(self, text: TextFeatures, video: VideoFeatures | ScoreCards) -> Tensor:
        """The length of every increment, |Delta_ij|, [T, V], without forming it."""
        self.check(text, video)
        if self.config.query == "paper_text":

            def radius_pairs(texts: TextFeatures, videos: VideoFeatures) -> PairScores:
                return PairScores(self.increments(texts, videos).norm(dim=-1), None)

            return score_in_blocks(radius_pairs, text, features_of(video))

        def radius_block(texts: TextFeatures, owner: IncrementCard, pool: PoolCard) -> Tensor:
            pairs = factored.pair_products(texts, owner, pool, self.pooling, self.config.rule)
            return pairs.increment_sq.sqrt()

        weights = self.increment_net.weights()
        if self.config.context == "words":
            return factored.map_text_blocks(radius_block, text, video, weights, self.pooling, None, None)

        def video_radius_block(texts: TextFeatures, cards: GapAwareCards) -> Tensor:
            assert cards.increment is not None
            return radius_block(texts, cards.increment, cards.pool)

        return factored.map_video_blocks(
            video_radius_block, text, video, self.cards, weights.num_heads, None, None
        )

    def frame_weights(self, text: TextFeatures, video: VideoFeatures | ScoreCards) -> FrameWeights:
        """The weights of the pooling, and those inside the net where it attends over frames."""
        self.check(text, video)
        if isinstance(video, VideoFeatures):
            video = self.cards(video)
        assert isinstance(video, GapAwareCards)
        pool_VFT = self.pooling.pool_products(text.text_TD, video.pool)[2]
        attention_TVHF = None
        if video.increment is not None:
            attention_TVHF = factored.frame_attention(text, video, self.config.rule)
        return FrameWeights(pool_VFT.permute(2, 0, 1), attention_TVHF)

    def stage1_slope(self, text: TextFeatures, video: VideoFeatures) -> Tensor:
        """The unit mean frame, shifted or scaled as the average increment of typical texts does it."""
        increment_VD = self.increments(text, video).mean(dim=0)
        if self.config.corrected_side == "video":
            return F.normalize(video.mean() + increment_VD, dim=-1)
        text_T1D = text.text_TD[:, None]
        shifted_TV = (text_T1D + increment_VD).norm(dim=-1).clamp_min(1e-8)
        ratio_V: Tensor = (text_T1D.norm(dim=-1) / shifted_TV).mean(dim=0)
        return F.normalize(video.mean(), dim=-1) * ratio_V[:, None]

    # --- bounds ---------------------------------------------------------------------------------------------

    def bound_cards(self, video: VideoFeatures, dtype: torch.dtype = torch.float32) -> BoundCards | None:
        if self.config.query != "gap":
            return None  # the length of an increment is then a function of the pair that was not bounded
        return self.bound_rules.ball_cards(video, dtype)

    def bounds(self, text: TextFeatures, cards: BoundCards) -> ScoreBounds:
        return (
            super().bounds(text, cards)
            if self.config.query != "gap"
            else self.bound_rules.by_ball(text, cards)
        )

    @property
    def has_keys(self) -> bool:
        return self.config.query == "gap"

    def key_cards(
        self, video: VideoFeatures, cards: BoundCards, dtype: torch.dtype = torch.float32
    ) -> KeyCards | None:
        return self.bound_rules.key_cards(video, cards, dtype) if self.has_keys else None

    def key_bounds(self, text: TextFeatures, cards: BoundCards, keys: KeyCards) -> ScoreBounds:
        return self.bound_rules.by_keys(text, cards, keys)

    @property
    def bound_rules(self) -> GapAwareBounds:
        """How the scores of this interaction are bounded."""
        return GapAwareBounds(self.config, self.pooling, self.increment_net.weights())

    @torch.no_grad()
    def score_each(self, text: TextFeatures, video: VideoFeatures) -> Tensor:
        """The score of each text with the video of its own place, [P]: what is left of a search, at once."""
        video = self.pooling.without_padding(video)
        frames_PFD, config = video.frames_VFD, self.config
        weights_PF1 = self.pooling.weights(frames_PFD @ text.text_TD[..., None], video.mask_VF)
        pooled_PD = (weights_PF1.mT @ frames_PFD).squeeze(1)
        mean_PF = mean_weights(video.mask_VF, mask_frames=config.mask_frames, dtype=frames_PFD.dtype)
        sign = 1 if config.gap_direction == "video_minus_text" else -1
        gap_P1D = sign * (weighted_mean(frames_PFD, mean_PF) - text.text_TD)[:, None]
        attended_PF = video.mask_VF if config.mask_frames else torch.ones_like(video.mask_VF)
        net = self._folded or QueryFirst(self.increment_net.weights())
        increment_PD = net(gap_P1D, frames_PFD, attended_PF).squeeze(1)
        if config.corrected_side == "text":
            return cosine(text.text_TD + increment_PD, pooled_PD)
        return cosine(text.text_TD, pooled_PD + increment_PD)

    # --- analysis -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def pair_vectors(self, text: TextFeatures, video: VideoFeatures) -> PairVectors:
        video = self.pooling.without_padding(video)
        text_TVD = text.text_TD[:, None].expand(-1, len(video), -1)
        pooled_TVD = self.pooling.pool(text.text_TD, video)
        net = QueryFirst(self.increment_net.weights().to(video.frames_VFD.dtype))
        increment_TVD = self._increments(text, video, net)
        if self.config.corrected_side == "text":
            return PairVectors(text_TVD, pooled_TVD, increment_TVD, "text")
        return PairVectors(pooled_TVD, text_TVD, increment_TVD, "video")

    @torch.no_grad()
    def pair_products(self, text: TextFeatures, video: VideoFeatures) -> PairProducts:
        if self.config.query == "paper_text":
            return products_of(self.pair_vectors(text, video))
        cards, over_words = self.cards(video), self.config.context == "words"
        owner = cards.increment
        if owner is None:
            owner = factored.word_card(text, self.increment_net.weights())
        found = factored.pair_products(text, owner, cards.pool, self.pooling, self.config.rule)
        shape = (len(text), len(video)) if over_words else (len(video), len(text))
        full = {name: value.expand(shape) for name, value in vars(found).items()}
        pairs = {name: value if over_words else value.mT for name, value in full.items()}
        own, other = ("text", "pooled") if self.config.corrected_side == "text" else ("pooled", "text")
        return PairProducts(
            own_sq=pairs[f"{own}_sq"],
            other_sq=pairs[f"{other}_sq"],
            own_other=pairs["text_pooled"],
            increment_sq=pairs["increment_sq"],
            own_increment=pairs[f"{own}_increment"],
            other_increment=pairs[f"{other}_increment"],
        )

    def flops(self, *, texts: int, videos: int, frames: int, words: int) -> float:
        owners, tokens = (texts, words) if self.config.context == "words" else (videos, frames)
        return 2.0 * multiply_adds(self.dim, pairs=texts * videos, owners=owners, tokens=tokens)


def _build_pooling(config: GapAwareConfig, dim: int) -> PooledCosine:
    if config.pooling == "mean":
        return MeanPooling(MeanPoolingConfig(mask_frames=config.mask_frames), dim)
    return TextConditionedPooling(
        TextConditionedConfig(mask_frames=config.mask_frames, pooling_temperature=config.pooling_temperature),
        dim,
    )
