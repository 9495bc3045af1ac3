"""HBI (Jin et al. 2023): token-wise scores, trained on three levels of merged tokens.

Scoring is token-wise interaction on the tokens. Training adds the same on tokens merged once and twice, and
on each level an estimator of Banzhaf interactions that follows a frozen teacher. The teacher is random until
its weights are loaded, as in the published code without its file, or until it is taught: `Hbi.teacher_loss`.

Shapes: T texts, V videos, F frames, W words, D embedding, B pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from gare.interaction.interaction import InteractionConfig
from gare.interaction.peers.banzhaf_game import DRAWS, banzhaf_interactions
from gare.interaction.peers.peer import unit, words_without_padding
from gare.interaction.peers.token_merging import MergeStage, stage_names
from gare.interaction.token_wise import (
    ZERO_PADDING,
    TokenCard,
    TokenWise,
    importance,
    token_scores,
    unit_tokens,
)
from gare.settings import PositiveInt
from gare.types import PairScores, TextFeatures, VideoFeatures

RATIOS = (1 / 4, 1 / 2)
XAVIER_GAIN = 1.414


@dataclass(frozen=True)
class HbiConfig(InteractionConfig):
    """Token-wise interaction trained on three levels."""

    name: Literal["hbi"] = "hbi"
    estimator_width: PositiveInt = 64
    zero_padding: bool = False
    """Compare padding with a cosine of zero instead of leaving it out."""
    leaky_padding: bool = False
    """Let padded tokens reach their neighbours when tokens are merged."""

    COUNTS_PADDING: ClassVar[Mapping[str, bool]] = {"leaky_padding": True}
    TRAPS: ClassVar[Mapping[str, str]] = {
        "zero_padding": ZERO_PADDING,
        "leaky_padding": "Padded tokens reach their neighbours when tokens are merged: training depends on "
        "what padding holds.",
    }


class Hbi(TokenWise):
    """WTI with hidden layers of 2 D."""

    Config = HbiConfig
    hidden_ratio = 2
    published_terms: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "levels": {},
        "banzhaf": {},
        "hierarchy": {},
    }
    original_names = (
        *TokenWise.original_names,
        (r"(text|video)_weight_fc(\d)\.2\.bias", ""),
        (r"text_weight_fc(\d)\.0\.", r"levels.\1.words_hidden."),
        (r"text_weight_fc(\d)\.2\.", r"levels.\1.words_output."),
        (r"video_weight_fc(\d)\.0\.", r"levels.\1.frames_hidden."),
        (r"video_weight_fc(\d)\.2\.", r"levels.\1.frames_output."),
        (r"banzhafmodel\.", "estimators.0."),
        (r"banzhafmodel0\.", "estimators.1."),
        (r"banzhafmodel1\.", "estimators.2."),
        (r"banzhafteacher\.", "teacher."),
        *stage_names("t_ctm0", "t_block0", "levels.0.text_stage"),
        *stage_names("t_ctm1", "t_block1", "levels.1.text_stage"),
        *stage_names("v_ctm0", "v_block0", "levels.0.video_stage"),
        *stage_names("v_ctm1", "v_block1", "levels.1.video_stage"),
    )

    def __init__(self, config: HbiConfig, dim: int) -> None:
        super().__init__(config, dim)
        leaky = config.leaky_padding
        self.levels: Any = nn.ModuleList(MergedLevel(dim, ratio, leaky_padding=leaky) for ratio in RATIOS)
        self.estimators = nn.ModuleList(BanzhafEstimator(config.estimator_width) for _ in range(3))
        self.teacher = BanzhafEstimator(config.estimator_width).requires_grad_(False)

    def score_pairs(self, text: TextFeatures, video: VideoFeatures) -> PairScores:
        pairs = super().score_pairs(text, video)
        if not self.training:
            return pairs
        return PairScores(pairs.scores_TV, None, {**pairs.parts, **self.training_parts(text, video)})

    def training_parts(self, text: TextFeatures, video: VideoFeatures) -> dict[str, Tensor]:
        """Scores of both merged levels, and what estimators and teacher say of the matched pairs."""
        if not self.config.leaky_padding:
            text, video = words_without_padding(text), video.without_padding()
        number = min(len(text), len(video))
        words, frames = (text.words_TWD, text.mask_TW), (video.frames_VFD, video.mask_VF)
        parts = self._interactions(0, words[0][:number], frames[0][:number], (words[1], frames[1]))
        text_tokens, video_tokens = self.levels[0].merge(words[0], frames[0], words[1], frames[1])
        for index, name in ((0, "middle"), (1, "top")):
            level = self.levels[index]
            if index:
                text_tokens, video_tokens = level.merge(text_tokens, video_tokens)
            parts[f"scores:{name}"] = level.scores(text_tokens, video_tokens)
            parts |= self._interactions(index + 1, text_tokens[:number], video_tokens[:number])
        return parts

    def teacher_loss(
        self,
        text: TextFeatures,
        video: VideoFeatures,
        *,
        draws: int = DRAWS,
        published: bool = False,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The teacher's squared error against the game of matched pairs.

        Training HBI leaves the teacher alone: call `teacher.requires_grad_()` to teach it, beforehand.

        Args:
            draws: random coalitions for each word and frame.
            published: play the game of the published code (`single_cell`), with weights in place of logits.
        """
        text, video = words_without_padding(text), video.without_padding()
        words, frames = self._word_card(text), self._frame_card(video)
        cosines_BWF = words.unit_OND @ frames.unit_OND.mT
        logits = [card.weight_ON.log() for card in (words, frames)]
        if published:
            logits = [card.weight_ON.masked_fill(~card.mask_ON, float("-inf")) for card in (words, frames)]
        wanted_BWF = banzhaf_interactions(
            cosines_BWF, *logits, draws=draws, single_cell=published, generator=generator
        )
        real_BWF = words.mask_ON[..., None] & frames.mask_ON[:, None]
        error_BWF = (self.teacher(cosines_BWF.detach()) - wanted_BWF).masked_fill(~real_BWF, 0)
        loss: Tensor = error_BWF.square().sum() / real_BWF.sum()
        return loss

    def _interactions(
        self, index: int, text_BWD: Tensor, video_BFD: Tensor, masks: tuple[Tensor, Tensor] | None = None
    ) -> dict[str, Tensor]:
        cosines_BWF = unit(text_BWD) @ unit(video_BFD).mT
        real_BWF = torch.ones_like(cosines_BWF)
        if masks is not None:
            number = len(cosines_BWF)
            real_BWF = (masks[0][:number, :, None] & masks[1][:number, None]).to(cosines_BWF.dtype)
        cosines_BWF = cosines_BWF * real_BWF
        with torch.no_grad():
            wanted_BWF = self.teacher(cosines_BWF) * real_BWF
        found_BWF = self.estimators[index](cosines_BWF) * real_BWF
        return {f"banzhaf:{index}": found_BWF, f"banzhaf_teacher:{index}": wanted_BWF}


class MergedLevel(nn.Module):
    """Both sides merged by one stage, and token-wise scores of what is left."""

    def __init__(self, dim: int, ratio: float, *, leaky_padding: bool) -> None:
        super().__init__()
        self.text_stage = MergeStage(dim, ratio, leaky_padding=leaky_padding)
        self.video_stage = MergeStage(dim, ratio, leaky_padding=leaky_padding)
        self.words_hidden, self.words_output = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, 1, bias=False)
        self.frames_hidden, self.frames_output = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, 1, bias=False)
        for linear in (self.words_hidden, self.words_output, self.frames_hidden, self.frames_output):
            nn.init.normal_(linear.weight, std=0.02)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def merge(
        self, text: Tensor, video: Tensor, text_mask: Tensor | None = None, video_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return self.text_stage(text, text_mask), self.video_stage(video, video_mask)

    def scores(self, text_TWD: Tensor, video_VFD: Tensor) -> Tensor:
        cards = []
        for tokens, hidden, output in (
            (text_TWD, self.words_hidden, self.words_output),
            (video_VFD, self.frames_hidden, self.frames_output),
        ):
            every = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
            cards.append(
                TokenCard(unit_tokens(tokens, every), importance(tokens, every, hidden, output), every)
            )
        return token_scores(*cards)


class BanzhafEstimator(nn.Module):
    """Convolution, attention over all cells, convolution: an interaction for each word and frame."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cnn1 = nn.Conv2d(1, width, 3, padding=1)
        self.cnn2 = nn.Conv2d(width, 1, 3, padding=1)
        self.Q, self.K, self.V = (nn.Parameter(torch.empty(width, width)) for _ in range(3))
        for parameter in (self.Q, self.K, self.V):
            nn.init.xavier_uniform_(parameter, gain=XAVIER_GAIN)

    def forward(self, cosines_BWF: Tensor) -> Tensor:
        hidden_BCWF = self.cnn1(cosines_BWF[:, None]).relu()
        cells_BNC = hidden_BCWF.flatten(2).mT
        weights_BNN = ((cells_BNC @ self.Q) @ (cells_BNC @ self.K).mT).softmax(dim=-1)
        cells_BNC = cells_BNC + weights_BNN @ (cells_BNC @ self.V)
        estimated: Tensor = self.cnn2(cells_BNC.mT.unflatten(2, cosines_BWF.shape[1:])).squeeze(1)
        return estimated
