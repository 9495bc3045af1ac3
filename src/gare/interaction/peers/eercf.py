"""EERCF (Tian et al. 2024): scores of a video, its frames and its patches, coarse to fine.

Every score is a cosine; at evaluation they are added with the weights of the published re-ranking. The
published two-stage evaluation adds 100 to the best 50: `gare.evaluate.method_rescoring.coarse_to_fine`.

A model with this head needs no other transformer over frames: set `temporal.num_layers = 0`.

Shapes: T texts, V videos, F frames, P patches of a frame, N patches of a video, D embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from gare.interaction.interaction import InteractionConfig
from gare.interaction.peers.peer import COUNT_PADDING, Peer, fit, masked_mean, unit
from gare.interaction.temporal import TemporalTransformer, default_heads
from gare.settings import PositiveFloat, PositiveInt
from gare.types import PairScores, TextFeatures, VideoFeatures

TRAINING_WEIGHTS = {"video": 0.5, "frame_weak": 0.5, "patch_weak": 0.05}
EVALUATION_WEIGHTS = {"frame_weak": 0.8, "frame_strong": 0.2, "patch_weak": 0.2, "video": 0.5}


@dataclass(frozen=True)
class EercfConfig(InteractionConfig):
    """Video, frame and patch scores."""

    name: Literal["eercf"] = "eercf"
    weak_temperature: PositiveFloat = 0.01
    strong_temperature: PositiveFloat = 0.1
    patch_temperature: PositiveFloat = 0.01
    num_layers: PositiveInt = 4
    num_heads: PositiveInt | None = None
    """Heads of the transformer; about one for each 64 dimensions if not given."""
    max_frames: PositiveInt = 12
    count_padding: bool = False
    """Let padded frames and their patches take part in the frame and patch scores."""

    COUNTS_PADDING: ClassVar[Mapping[str, bool]] = {"count_padding": True}
    TRAPS: ClassVar[Mapping[str, str]] = {"count_padding": COUNT_PADDING}


class Eercf(Peer):
    """0.5 video + 0.8 frame + 0.2 strong frame + 0.2 patch scores."""

    Config = EercfConfig
    config: EercfConfig
    published_terms: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "contrastive": {"weight": 0.8},
        "levels": {"weight": 0.2},
        "feature_decorrelation": {"weight": 0.001},
    }
    original_names = (
        (r"global_mat_weight", "bilinear_DD"),
        (r"frame_logit_weight", "frame_mix_FF"),
        (r"frame_position_embeddings\.weight", "temporal.position"),
        (r"transformerClip\.", "temporal."),
    )

    def __init__(self, config: EercfConfig, dim: int) -> None:
        super().__init__(config, dim)
        self.bilinear_DD = nn.Parameter(torch.eye(dim))
        self.frame_mix_FF = nn.Parameter(torch.eye(config.max_frames))
        self.temporal = TemporalTransformer(
            dim,
            num_layers=config.num_layers,
            num_heads=config.num_heads or default_heads(dim),
            max_frames=config.max_frames,
        )

    def score_pairs(self, text: TextFeatures, video: VideoFeatures) -> PairScores:
        text, video = self.prepare(text, video)
        levels = self.levels(text, video)
        if not self.training:
            return PairScores(weighted_sum(levels, EVALUATION_WEIGHTS), None)
        parts = {
            "scores:frame_strong": levels["frame_strong"],
            "decorrelated_text": levels["text"],
            "decorrelated:video": levels["video_vector"],
            "decorrelated:frame": levels["frame_vector"],
        }
        return PairScores(weighted_sum(levels, TRAINING_WEIGHTS), None, parts)

    def levels(self, text: TextFeatures, video: VideoFeatures) -> dict[str, Tensor]:
        """Every score [T, V] by its name; while training, the vectors that the decorrelation compares too."""
        config = self.config
        frames_VFD, mask_VF = fit(video.frames_VFD, video.mask_VF, config.max_frames, "frames")
        counted_VF = torch.ones_like(mask_VF) if config.count_padding else mask_VF
        after_VFD = unit(self.temporal(frames_VFD, mask_VF))
        text_TD, frames_VFD = unit(text.text_TD), unit(frames_VFD)
        video_VD = unit(masked_mean(after_VFD.masked_fill(~mask_VF[..., None], 0), mask_VF))
        cosines_TVF = torch.einsum("td,vfd->tvf", text_TD, frames_VFD)
        weak_TVF = _softmax(cosines_TVF / config.weak_temperature, counted_VF) @ self.frame_mix_FF
        strong_TVF = _softmax(cosines_TVF / config.strong_temperature, counted_VF)
        found = {
            "video": text_TD @ self.bilinear_DD @ video_VD.mT,
            "frame_weak": (cosines_TVF * weak_TVF).sum(dim=-1),
        }
        found["frame_strong"], frame_VD = self._strong(text_TD, strong_TVF, after_VFD)
        if self.training:
            found |= {"text": text_TD, "video_vector": video_VD, "frame_vector": frame_VD}
        if video.patches_VFPD is not None:
            patches_VFPD, _ = fit(video.patches_VFPD, video.mask_VF, config.max_frames, "frames")
            patches_VND = unit(patches_VFPD).flatten(1, 2)
            counted_VN = counted_VF.repeat_interleave(patches_VFPD.shape[2], dim=1)
            cosines_TVN = torch.einsum("td,vnd->tvn", text_TD, patches_VND)
            weights_TVN = _softmax(cosines_TVN / config.patch_temperature, counted_VN)
            found["patch_weak"] = (cosines_TVN * weights_TVN).sum(dim=-1)
            found["patch_strong"], patch_VD = self._strong(text_TD, weights_TVN, patches_VND)
            if self.training:
                found["patch_vector"] = patch_VD
        return found

    def _strong(self, text_TD: Tensor, weights_TVN: Tensor, tokens_VND: Tensor) -> tuple[Tensor, Tensor]:
        """The cosine with the tokens pooled by the text; while training by each video's own text.

        Gives the scores [T, V] and the vectors [V, D] of the videos with their own texts.
        """
        own = torch.arange(min(weights_TVN.shape[:2]), device=text_TD.device)
        if self.training:
            own_VN = weights_TVN[own, own].detach()
            pooled_VD = unit(torch.einsum("vn,vnd->vd", own_VN, tokens_VND[: len(own)]))
            return text_TD @ pooled_VD.mT, pooled_VD
        pooled_TVD = unit(torch.einsum("tvn,vnd->tvd", weights_TVN, tokens_VND))
        return torch.einsum("td,tvd->tv", text_TD, pooled_TVD), pooled_TVD[own, own]


def weighted_sum(levels: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """The scores of the levels that there are, each with its weight."""
    parts = [weight * levels[name] for name, weight in weights.items() if name in levels]
    return torch.stack(parts).sum(dim=0)


def _softmax(logits_TVN: Tensor, mask_VN: Tensor) -> Tensor:
    return logits_TVN.masked_fill(~mask_VN, float("-inf")).softmax(dim=-1)
