"""DMAE with TPM-CL (Jiang et al. 2023): token-wise scores; a word's best frame brings its neighbour.

The published method counts content words twice, by a part-of-speech tagger. Features have no tags, so every
word counts once here; `pair_scores` takes other weights.

Shapes: T texts, V videos, F frames, W words, D embedding, B pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gare.interaction.interaction import FastScoring, InteractionConfig
from gare.interaction.peers.peer import Peer, fit, unit
from gare.settings import NonNegativeFloat, PositiveFloat, PositiveInt
from gare.types import PairScores, TextFeatures, VideoFeatures


@dataclass(frozen=True)
class DmaeConfig(InteractionConfig):
    """Token-wise interaction with neighbouring frames."""

    name: Literal["dmae"] = "dmae"
    neighbour_weight: NonNegativeFloat = 0.5
    """How much the frame most like the best one counts."""
    weighting: Literal["learned", "uniform"] = "uniform"
    """How much each token counts: all alike, as in the published scripts, or by a linear layer on each."""
    importance_threshold: PositiveFloat = 0.6
    """The share of importance that training hides."""
    max_frames: PositiveInt = 12
    max_words: PositiveInt = 32
    zero_padding: bool = False
    """Compare padding with a cosine of zero instead of leaving it out."""

    TRAPS: ClassVar[Mapping[str, str]] = {
        "zero_padding": "A padded position compares with cosine 0: a maximum over negative cosines becomes 0 "
        "as soon as one position is padded."
    }


class Dmae(Peer):
    """½ [sentence with frames + words with frames], both directions of each."""

    Config = DmaeConfig
    config: DmaeConfig
    reads_words = True
    fast_scoring: FastScoring = "products"
    published_terms: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "contrastive": {"weight": 0.0},
        "hard_negative": {},
        "partial_margin": {},
    }
    original_names = (
        (r"tis_selector\.thresh", ""),
        (r"(text|video)_weight_fc\.bias", ""),
        (r"text_weight_fc\.", "word_weight."),
        (r"video_weight_fc\.", "frame_weight."),
        (r"t2v_linear_xwp\.q_proj\.", ""),
        (r"t2v_linear_xwp\.k_proj\.", ""),
        (r"v2t_linear_xwp\.q_proj\.", ""),
        (r"v2t_linear_xwp\.k_proj\.", ""),
        (r"t2v_linear_xwp\.qk_proj\.", "frame_importance.mix."),
        (r"t2v_linear_xwp\.attn_proj\.0\.", "frame_importance.norm."),
        (r"t2v_linear_xwp\.attn_proj\.1\.", "frame_importance.hidden."),
        (r"t2v_linear_xwp\.attn_proj\.3\.", "frame_importance.output."),
        (r"v2t_linear_xwp\.qk_proj\.", "word_importance.mix."),
        (r"v2t_linear_xwp\.attn_proj\.0\.", "word_importance.norm."),
        (r"v2t_linear_xwp\.attn_proj\.1\.", "word_importance.hidden."),
        (r"v2t_linear_xwp\.attn_proj\.3\.", "word_importance.output."),
    )

    def __init__(self, config: DmaeConfig, dim: int) -> None:
        super().__init__(config, dim)
        # Only the order of its output is used, so no gradient reaches this net, here or as published.
        self.frame_importance = Importance(dim, 1, config.max_frames).requires_grad_(False)
        self.word_importance = Importance(dim, config.max_frames, config.max_words)
        if config.weighting == "learned":  # without a bias, which the softmax cancels
            self.word_weight, self.frame_weight = (nn.Linear(dim, 1, bias=False) for _ in range(2))

    def score_pairs(self, text: TextFeatures, video: VideoFeatures) -> PairScores:
        text, video = self.prepare(text, video)
        scores_TV = self.pair_scores(text, video, text.mask_TW.to(text.text_TD.dtype))
        parts = self.training_parts(text, video, text.mask_TW) if self.training else {}
        return PairScores(scores_TV, None, parts)

    def pair_scores(self, text: TextFeatures, video: VideoFeatures, word_weight_TW: Tensor) -> Tensor:
        """Scores [T, V]; a word of weight zero is padding."""
        sentence_T1D, words_TWD = unit(text.text_TD)[:, None], unit(text.words_TWD)
        sentence_weight_T1 = (
            word_weight_TW[:, :1] if self.config.zero_padding else torch.ones_like(word_weight_TW[:, :1])
        )
        word_share_TW = word_weight_TW / word_weight_TW.sum(dim=1, keepdim=True)
        if self.config.weighting == "learned":
            word_share_TW = softmax_share(self.word_weight(words_TWD), word_weight_TW > 0)
        one_T1 = torch.ones_like(word_share_TW[:, :1])
        by_sentence_TV = self._level(sentence_T1D, sentence_weight_T1, one_T1, video)
        return (by_sentence_TV + self._level(words_TWD, word_weight_TW, word_share_TW, video)) / 2

    def _level(self, tokens_TWD: Tensor, weight_TW: Tensor, share_TW: Tensor, video: VideoFeatures) -> Tensor:
        """Half of what the tokens find among the frames and half of what the frames find, [T, V]."""
        frames_VFD, mask_VF = unit(video.frames_VFD), video.mask_VF
        is_real_TWVF = (weight_TW > 0)[..., None, None] & mask_VF
        cosines_TWVF = torch.einsum("twd,vfd->twvf", tokens_TWD, frames_VFD)
        padding = 0.0 if self.config.zero_padding else float("-inf")
        masked_TWVF = cosines_TWVF.masked_fill(~is_real_TWVF, padding)
        best_TWV1 = masked_TWVF.argmax(dim=-1, keepdim=True)
        neighbour_VF, likeness_VF = nearest_frames(frames_VFD, mask_VF)
        shape = masked_TWVF.shape[:3]
        own_TWVF = masked_TWVF.masked_fill(~is_real_TWVF, 0)
        second_TWV1 = neighbour_VF.expand(*shape[:2], -1, -1).gather(-1, best_TWV1)
        alike_TWV1 = likeness_VF.expand(*shape[:2], -1, -1).gather(-1, best_TWV1)
        found_TWV1 = own_TWVF.gather(-1, best_TWV1) + self.config.neighbour_weight * alike_TWV1 * (
            own_TWVF.gather(-1, second_TWV1)
        )
        frame_share_VF = mask_VF.to(weight_TW.dtype) / mask_VF.sum(dim=1, keepdim=True)
        if self.config.weighting == "learned":
            frame_share_VF = softmax_share(self.frame_weight(frames_VFD), mask_VF)
        best_TVF = masked_TWVF.amax(dim=1).masked_fill(~mask_VF, 0)
        by_words_TV = torch.einsum("twv,tw->tv", found_TWV1.squeeze(-1), share_TW)
        return (by_words_TV + torch.einsum("tvf,vf->tv", best_TVF, frame_share_VF)) / 2

    def training_parts(
        self, text: TextFeatures, video: VideoFeatures, word_weight_TW: Tensor
    ) -> dict[str, Tensor]:
        """Scores of matched pairs with all tokens and with the important ones hidden, three of each.

        The published code multiplies what the frames find by the weight of the first word, which is one
        without a tagger.
        """
        number = min(len(text), len(video))
        text, video = text[:number], video[:number]
        config = self.config
        words_BWD, _ = fit(unit(text.words_TWD), text.mask_TW, config.max_words, "words")
        frames_BFD, frame_mask = fit(unit(video.frames_VFD), video.mask_VF, config.max_frames, "frames")
        sentence_B1D = unit(text.text_TD)[:, None]
        frame_share_BF = self.frame_importance(sentence_B1D, frames_BFD)
        word_share_BW = self.word_importance(frames_BFD, words_BWD)
        kept_BF = kept_tokens(frame_share_BF, config.importance_threshold)
        kept_BW = kept_tokens(word_share_BW, config.importance_threshold)
        fewer_BFD = frames_BFD * kept_BF[..., None]
        global_BD = (word_share_BW[:, None] @ words_BWD).squeeze(1)
        fewer_global_BD = (word_share_BW[:, None] @ (words_BWD * kept_BW[..., None])).squeeze(1)
        global_BD, sentence_BD = unit(global_BD), sentence_B1D.squeeze(1)
        first_B = word_weight_TW[:number, 0].to(sentence_BD.dtype)
        if not config.zero_padding:
            first_B = torch.ones_like(first_B)
        whole = [
            one_token_score(sentence_BD, frames_BFD, frame_mask, first_B),
            one_token_score(global_BD, frames_BFD, frame_mask, first_B),
            one_token_score(global_BD, frames_BFD, frame_mask, first_B),
        ]
        hidden = [
            one_token_score(sentence_BD, fewer_BFD, frame_mask, first_B),
            one_token_score(global_BD, fewer_BFD, frame_mask, first_B),
            one_token_score(fewer_global_BD, frames_BFD, frame_mask, first_B),
        ]
        return {"whole_3B": torch.stack(whole), "hidden_3B": torch.stack(hidden)}


class Importance(nn.Module):
    """The share of each token in what the other side asks for."""

    def __init__(self, dim: int, num_asking: int, num_tokens: int) -> None:
        super().__init__()
        self.mix = nn.Linear(num_asking, num_tokens, bias=False)
        self.norm = nn.LayerNorm((num_tokens, 2 * dim))
        self.hidden, self.output = (
            nn.Linear(2 * dim, dim // 2, bias=False),
            nn.Linear(dim // 2, 1, bias=False),
        )

    def forward(self, asking_BMD: Tensor, tokens_BND: Tensor) -> Tensor:
        asked_BND = self.mix(asking_BMD.mT).mT
        both_BNE = self.norm(torch.cat([asked_BND, tokens_BND], dim=-1))
        weight_BN = self.output(F.gelu(self.hidden(both_BNE))).squeeze(-1).sigmoid()
        share_BN: Tensor = weight_BN / weight_BN.sum(dim=-1, keepdim=True)
        return share_BN


def softmax_share(logits_ON1: Tensor, mask_ON: Tensor) -> Tensor:
    """The share of each token, [O, N]; zero on padding."""
    return logits_ON1.squeeze(-1).masked_fill(~mask_ON, float("-inf")).softmax(dim=-1)


def nearest_frames(frames_VFD: Tensor, mask_VF: Tensor) -> tuple[Tensor, Tensor]:
    """The other frame of the video most like each frame, and its cosine, [V, F] each."""
    likeness_VFF = frames_VFD @ frames_VFD.mT
    itself_FF = torch.eye(mask_VF.shape[1], dtype=torch.bool, device=mask_VF.device)
    real_VFF = mask_VF[:, None] & mask_VF[..., None]
    likeness_VFF = likeness_VFF.masked_fill(itself_FF | ~real_VFF, 0)
    likeness_VF, neighbour_VF = likeness_VFF.max(dim=-1)
    return neighbour_VF, likeness_VF


def kept_tokens(share_BN: Tensor, threshold: float) -> Tensor:
    """One where a token stays: those whose importance, summed from the largest, stays below are hidden."""
    sorted_BN, order_BN = share_BN.sort(dim=-1, descending=True)
    kept_BN = (sorted_BN.cumsum(dim=-1) >= threshold).to(share_BN.dtype)
    return torch.zeros_like(kept_BN).scatter(-1, order_BN, kept_BN)


def one_token_score(text_BD: Tensor, frames_BFD: Tensor, mask_BF: Tensor, weight_B: Tensor) -> Tensor:
    """Token interaction of one text vector with the frames of its own video, [B]."""
    cosines_BF = (frames_BFD @ text_BD[..., None]).squeeze(-1) * mask_BF
    share_BF = mask_BF.to(cosines_BF.dtype) / mask_BF.sum(dim=1, keepdim=True)
    return (cosines_BF.amax(dim=1) + weight_B * (cosines_BF * share_BF).sum(dim=1)) / 2
