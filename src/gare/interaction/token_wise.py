"""Token-wise interaction: each word finds its frame and each frame its word (WTI; Wang et al. 2022, DRL).

score_ij = ½ Σ_w a_iw max_f cos(word_iw, frame_jf) + ½ Σ_f b_jf max_w cos(word_iw, frame_jf)

with a and b softmax weights from two small layers on each token. Padding takes part in neither maximum nor
softmax. What differs from the paper is in docs/method.md.

Shapes: T texts, V videos, F frames, W words, D embedding; O owners of N tokens each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gare.cpu_products import multiply
from gare.interaction.interaction import FastScoring, Interaction, InteractionConfig
from gare.interaction.pair_blocks import block_budget, each_block, full_precision
from gare.interaction.score_cards import ScoreCards, features_of
from gare.types import FrameWeights, PairScores, TextFeatures, VideoFeatures, block_slices

ZERO_PADDING = (
    "A padded position compares with cosine 0: a maximum over negative cosines becomes 0 as soon as one "
    "position is padded, so the score depends on the amount of padding."
)


@dataclass(frozen=True)
class TokenWiseConfig(InteractionConfig):
    """Words and frames compared one by one."""

    name: Literal["token_wise"] = "token_wise"
    weighting: Literal["learned", "uniform"] = "learned"
    """How much each token counts: by two small layers (WTI), or all alike (TI)."""
    zero_padding: bool = False
    """Compare padding with a cosine of zero, as the published code does, instead of leaving it out."""

    TRAPS: ClassVar[Mapping[str, str]] = {"zero_padding": ZERO_PADDING}


@dataclass(frozen=True)
class TokenCard:
    """The tokens of each owner at length one, and how much each counts."""

    unit_OND: Tensor
    weight_ON: Tensor
    mask_ON: Tensor


@dataclass(frozen=True)
class TokenCards(ScoreCards):
    """Frames as tokens."""

    frames_VFD: Tensor
    mask_VF: Tensor
    tokens: TokenCard

    @property
    def video(self) -> VideoFeatures:
        return VideoFeatures(self.frames_VFD, self.mask_VF)


class TokenWise(Interaction):
    """How well the best matches of words and frames agree, weighted by how much each token counts.

    The last layers have no bias: the softmax over tokens would not see it.
    """

    Config: ClassVar[type[InteractionConfig]] = TokenWiseConfig
    fast_scoring: FastScoring = "products"
    hidden_ratio: ClassVar[int] = 1
    """The width of the hidden layers over D."""
    published_terms: ClassVar[Mapping[str, Mapping[str, Any]]] = {"token_decorrelation": {}}
    original_names: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"(text|video)_weight_fc\.2\.bias", ""),
        (r"text_weight_fc\.0\.", "words_hidden."),
        (r"text_weight_fc\.2\.", "words_output."),
        (r"video_weight_fc\.0\.", "frames_hidden."),
        (r"video_weight_fc\.2\.", "frames_output."),
    )

    def __init__(self, config: Any, dim: int) -> None:
        super().__init__(config, dim)
        if not self.learns_weights:
            return
        width = self.hidden_ratio * dim
        self.words_hidden, self.words_output = nn.Linear(dim, width), nn.Linear(width, 1, bias=False)
        self.frames_hidden, self.frames_output = nn.Linear(dim, width), nn.Linear(width, 1, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    @property
    def learns_weights(self) -> bool:
        return not isinstance(self.config, TokenWiseConfig) or self.config.weighting == "learned"

    @property
    def reads_words(self) -> bool:
        return True

    def score_pairs(self, text: TextFeatures, video: VideoFeatures) -> PairScores:
        """Scores [T, V] with all T × W × V × F cosines at once."""
        self.check(text, video)
        words, frames = self._word_card(text), self._frame_card(video)
        scores_TV = token_scores(words, frames, zero_padding=self.config.zero_padding)
        parts = {"word_weight_TW": words.weight_ON, "frame_weight_VF": frames.weight_ON}
        return PairScores(scores_TV, None, parts if self.training else {})

    def score(
        self,
        text: TextFeatures,
        video: VideoFeatures | ScoreCards,
        *,
        text_block: int | None = None,
        video_block: int | None = None,
    ) -> Tensor:
        """Scores [T, V] in blocks of pairs; only the scores are kept."""
        self.check(text, video)
        default_text, default_video = _block_sizes(text, video)
        text_rows = list(block_slices(len(text), text_block or default_text))

        # Weights are made once; unit words again for every block, so that no second copy of all is held.
        weights = [self._word_weights(text[rows]) for rows in text_rows]

        def column_of_blocks(rows: slice) -> Tensor:
            frames = self._frame_card(video[rows])
            words = (
                TokenCard(unit_tokens(text.words_TWD[r], text.mask_TW[r]), weight_TW, text.mask_TW[r])
                for r, weight_TW in zip(text_rows, weights, strict=True)
            )
            return torch.cat(
                [token_scores(card, frames, zero_padding=self.config.zero_padding) for card in words]
            )

        video_rows = list(block_slices(len(video), video_block or default_video))
        return torch.cat(each_block(column_of_blocks, video_rows), dim=1)

    def cards(self, video: VideoFeatures) -> TokenCards:
        return TokenCards(self.config, video.frames_VFD, video.mask_VF, self._frame_card(video))

    def frame_weights(self, text: TextFeatures, video: VideoFeatures | ScoreCards) -> FrameWeights:
        """What each frame adds to the frame side of the score: its weight times its best cosine."""
        self.check(text, video)
        words, frames = self._word_card(text), self._frame_card(video)
        best_TVF = token_cosines(words, frames).amax(dim=1)
        return FrameWeights((best_TVF * frames.weight_ON).masked_fill(~frames.mask_ON, 0))

    def _word_weights(self, text: TextFeatures) -> Tensor:
        if not self.learns_weights:
            return equal_shares(text.words_TWD, text.mask_TW)
        return importance(text.words_TWD, text.mask_TW, self.words_hidden, self.words_output)

    def _frame_weights(self, video: VideoFeatures) -> Tensor:
        if not self.learns_weights:
            return equal_shares(video.frames_VFD, video.mask_VF)
        return importance(video.frames_VFD, video.mask_VF, self.frames_hidden, self.frames_output)

    def _word_card(self, text: TextFeatures) -> TokenCard:
        unit_TWD = unit_tokens(text.words_TWD, text.mask_TW)
        return TokenCard(unit_TWD, self._word_weights(text), text.mask_TW)

    def _frame_card(self, video: VideoFeatures | ScoreCards) -> TokenCard:
        if isinstance(video, TokenCards):
            return video.tokens
        video = features_of(video)
        unit_VFD = unit_tokens(video.frames_VFD, video.mask_VF)
        return TokenCard(unit_VFD, self._frame_weights(video), video.mask_VF)


def unit_tokens(tokens_OND: Tensor, mask_ON: Tensor) -> Tensor:
    """Tokens of length one; padding of any content becomes zero."""
    return F.normalize(full_precision(tokens_OND.masked_fill(~mask_ON[..., None], 0)), dim=-1)


def equal_shares(tokens_OND: Tensor, mask_ON: Tensor) -> Tensor:
    """The same weight for each real token of an owner, [O, N]."""
    real_ON = mask_ON.to(full_precision(tokens_OND).dtype)
    return real_ON / real_ON.sum(dim=1, keepdim=True)


def importance(tokens_OND: Tensor, mask_ON: Tensor, hidden: nn.Linear, output: nn.Linear) -> Tensor:
    """The weight of each token among those of its owner, [O, N]; zero on padding."""
    tokens_OND = full_precision(tokens_OND.masked_fill(~mask_ON[..., None], 0))
    dtype = tokens_OND.dtype
    hidden_OND = F.linear(tokens_OND, hidden.weight.to(dtype), hidden.bias.to(dtype)).relu()
    logits_ON = F.linear(hidden_OND, output.weight.to(dtype)).squeeze(-1)
    return logits_ON.masked_fill(~mask_ON, float("-inf")).softmax(dim=-1)


def token_scores(words: TokenCard, frames: TokenCard, *, zero_padding: bool = False) -> Tensor:
    """Half of what the words find among the frames and half of what the frames find, [T, V]."""
    cosines_TWVF = token_cosines(words, frames, padding=0.0 if zero_padding else float("-inf"))
    # A padded token's weight is zero, but its maximum is −inf, and the product of the two would be NaN.
    best_TWV = cosines_TWVF.amax(dim=-1).masked_fill(~words.mask_ON[..., None], 0)
    best_TVF = cosines_TWVF.amax(dim=1).masked_fill(~frames.mask_ON, 0)
    text_side_TV = torch.einsum("twv,tw->tv", best_TWV, words.weight_ON)
    video_side_TV = torch.einsum("tvf,vf->tv", best_TVF, frames.weight_ON)
    return ((text_side_TV + video_side_TV) / 2).clamp(-1, 1)


def token_cosines(words: TokenCard, frames: TokenCard, *, padding: float = float("-inf")) -> Tensor:
    """[T, W, V, F]; `padding` where either token is padding."""
    flat_NM = multiply(words.unit_OND.flatten(0, 1), frames.unit_OND.flatten(0, 1))
    cosines_TWVF: Tensor = flat_NM.unflatten(1, frames.mask_ON.shape).unflatten(0, words.mask_ON.shape)
    is_real_TWVF = words.mask_ON[..., None, None] & frames.mask_ON
    return cosines_TWVF.masked_fill(~is_real_TWVF, padding)


def _block_sizes(text: TextFeatures, video: VideoFeatures | ScoreCards) -> tuple[int, int]:
    """Texts and videos a block, about as many of one as of the other."""
    mask_VF = features_of(video).mask_VF
    num_cosines = text.words_TWD.shape[1] * mask_VF.shape[1]
    num_pairs = max(1, block_budget(mask_VF.device) // num_cosines)
    text_block = min(len(text), max(1, int(num_pairs**0.5)))
    return text_block, max(1, num_pairs // text_block)
