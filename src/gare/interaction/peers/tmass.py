"""T-MASS (Wang et al. 2024): a text is a ball around its vector, and the best of some points in it counts.

The video is pooled by cross-attention as in X-Pool. The radius of the ball depends on the pair, through the
cosines of the text with the frames. Random points are drawn once and kept with the weights, the same for all
pairs, so that a score depends on its pair alone.

Shapes: T texts, V videos, F frames, D embedding, R points of the ball.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from gare.interaction.interaction import SQUARE_FLOOR, InteractionConfig
from gare.interaction.peers.peer import POOLER_NAMES, Peer, cosine_of_pairs, fit, unit
from gare.interaction.score_cards import ScoreCards
from gare.interaction.xpool import CrossAttentionPool
from gare.settings import PositiveInt, Range
from gare.types import PairScores, TextFeatures, VideoFeatures

PRIOR_STD = 3e-3


@dataclass(frozen=True)
class TmassConfig(InteractionConfig):
    """Stochastic texts."""

    name: Literal["tmass"] = "tmass"
    trials: PositiveInt = 20
    """Points of the ball at evaluation."""
    prior: Literal["uniform", "normal"] = "uniform"
    """Where points are drawn from: [0, 1) as for MSR-VTT, or N(0, 0.003) as for LSMDC."""
    num_heads: PositiveInt = 1
    max_frames: PositiveInt = 12
    dropout: Annotated[float, Range(least=0, below=1)] = 0.3
    own_caption: bool = False
    """Score each video as its own caption pools it, as the published evaluation does."""

    TRAPS: ClassVar[Mapping[str, str]] = {
        "own_caption": "The best point of text i is compared with video j pooled by the caption of video j: "
        "the evaluation tells every video which caption is its own.",
    }


class Tmass(Peer):
    """max_r cos(t_i + noise_r · exp(R_ij), v_ij)."""

    Config = TmassConfig
    config: TmassConfig
    published_terms: ClassVar[Mapping[str, Mapping[str, Any]]] = {"levels": {"weight": 0.8}}
    noise_RD: Tensor
    original_names = (
        (r"radius\.std_branch\.learnable_scalar", ""),
        (r"radius\.std_branch\.linear_proj\.", "radius."),
        *((r"pool\." + old, "attention." + new) for old, new in POOLER_NAMES),
    )

    def __init__(self, config: TmassConfig, dim: int) -> None:
        super().__init__(config, dim)
        self.attention = CrossAttentionPool(dim, num_heads=config.num_heads, dropout=config.dropout)
        self.radius = nn.Linear(config.max_frames, dim)
        nn.init.eye_(self.radius.weight)
        nn.init.zeros_(self.radius.bias)
        self.register_buffer("noise_RD", self._draw((config.trials, dim), self.radius.weight))

    def score_pairs(self, text: TextFeatures, video: VideoFeatures) -> PairScores:
        text, video = self.prepare(text, video)
        if self.training:
            return self.training_scores(text, video, self._draw(text.text_TD.shape, text.text_TD))
        return PairScores(self.best_scores(text, video, self.noise_RD.to(text.text_TD.dtype)), None)

    def score(
        self,
        text: TextFeatures,
        video: VideoFeatures | ScoreCards,
        *,
        text_block: int | None = None,
        video_block: int | None = None,
    ) -> Tensor:
        if self.config.own_caption:  # text j pools video j, so both must be there
            text_block, video_block = len(text), len(video)
        return super().score(text, video, text_block=text_block, video_block=video_block)

    def best_scores(self, text: TextFeatures, video: VideoFeatures, noise: Tensor) -> Tensor:
        """The best point of each pair, [T, V]; the noise is [R, D] for all pairs or [T, V, R, D]."""
        pooled_TVD = self.pool(text, video)
        radius_TVD = self.log_radius(text, video).exp()
        all_TVR = ball_cosines(text.text_TD, radius_TVD, pooled_TVD, noise)
        if not self.config.own_caption:
            return all_TVR.amax(dim=-1)
        if len(text) != len(video):
            raise ValueError(
                f"own_caption needs as many texts as videos, text j the caption of video j; "
                f"got {len(text)} and {len(video)}"
            )
        own = torch.arange(len(video), device=pooled_TVD.device)
        own_TVD = pooled_TVD[own, own].expand_as(pooled_TVD)
        best_TV1 = all_TVR.argmax(dim=-1, keepdim=True)
        leaked_TVR = ball_cosines(text.text_TD, radius_TVD, own_TVD, noise)
        return leaked_TVR.gather(-1, best_TV1).squeeze(-1)

    def training_scores(self, text: TextFeatures, video: VideoFeatures, noise_TD: Tensor) -> PairScores:
        """One point of each text, at the radius of its own pair, against all videos."""
        if len(text) != len(video):
            raise ValueError(f"training pairs text i with video i; got {len(text)} and {len(video)}")
        pooled_TVD, text_TD = self.pool(text, video), text.text_TD
        own = torch.arange(len(text), device=text_TD.device)
        radius_TD = self.log_radius(text, video)[own, own].exp()
        point_TD = text_TD + noise_TD * radius_TD
        # The support text lies at the radius, towards the video as the texts of the batch pool it.
        towards_TD = unit(pooled_TVD.mean(dim=0) - text_TD)
        support_TD = text_TD + towards_TD * radius_TD
        scores_TV, support_TV = (cosine_of_pairs(x[:, None], pooled_TVD) for x in (point_TD, support_TD))
        return PairScores(scores_TV, None, {"scores:support": support_TV})

    def pool(self, text: TextFeatures, video: VideoFeatures) -> Tensor:
        """The video vector of each pair, [T, V, D]."""
        text_VTD = text.text_TD.expand(len(video), -1, -1)
        pooled_VTD: Tensor = self.attention(text_VTD, video.frames_VFD, video.mask_VF)
        return pooled_VTD.transpose(0, 1)

    def log_radius(self, text: TextFeatures, video: VideoFeatures) -> Tensor:
        """R of each pair and channel, [T, V, D]."""
        frames_VFD, _ = fit(video.frames_VFD, video.mask_VF, self.config.max_frames, "frames")
        cosines_TVF = torch.einsum("td,vfd->tvf", unit(text.text_TD), unit(frames_VFD))
        radius_TVD: Tensor = self.radius(cosines_TVF)
        return radius_TVD

    def _draw(self, shape: torch.Size | tuple[int, ...], like: Tensor) -> Tensor:
        if self.config.prior == "uniform":
            return torch.rand(shape, dtype=like.dtype, device=like.device)
        return PRIOR_STD * torch.randn(shape, dtype=like.dtype, device=like.device)


def ball_cosines(text_TD: Tensor, radius_TVD: Tensor, video_TVD: Tensor, noise: Tensor) -> Tensor:
    """cos(t + noise · radius, v) of each point, [T, V, R], without forming the points."""
    to_points = "tvd,rd->tvr" if noise.ndim == 2 else "tvd,tvrd->tvr"
    text_T1D = text_TD[:, None]
    along_TVR = torch.einsum(to_points, radius_TVD * video_TVD, noise)
    product_TVR = (text_T1D * video_TVD).sum(dim=-1)[..., None] + along_TVR
    square_TVR = (
        text_TD.square().sum(dim=-1)[:, None, None]
        + 2 * torch.einsum(to_points, text_T1D * radius_TVD, noise)
        + torch.einsum(to_points, radius_TVD.square(), noise.square())
    )
    video_TV1 = video_TVD.square().sum(dim=-1, keepdim=True)
    scales = [square.clamp_min(SQUARE_FLOOR).rsqrt() for square in (square_TVR, video_TV1)]
    return product_TVR * scales[0] * scales[1]
