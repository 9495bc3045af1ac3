"""DiffusionRet (Jin et al. 2023): token-wise scores, and two nets that denoise the scores of candidates.

The first stage is token-wise interaction. The denoisers learn, beside it and without touching it, to give the
true candidate a one from noise. What they add at evaluation depends on the other candidates and on the noise,
so it is a setting of its own, `sampled_scores`.

Shapes: T texts, V videos, F frames, D embedding, Q queries, N candidates of each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gare.interaction.interaction import InteractionConfig
from gare.interaction.peers.peer import LATE_MASK, Peer, pool_by_text, start_normal
from gare.interaction.score_cards import ScoreCards
from gare.interaction.token_wise import ZERO_PADDING, TokenWise
from gare.settings import PositiveInt
from gare.types import PairScores, TextFeatures, VideoFeatures

POOLING_TEMPERATURE = 1.0


@dataclass(frozen=True)
class DiffusionRetConfig(InteractionConfig):
    """Token-wise interaction and denoisers of scores."""

    name: Literal["diffusion_ret"] = "diffusion_ret"
    num_steps: PositiveInt = 50
    """Steps of the diffusion."""
    zero_padding: bool = False
    """Compare padding with a cosine of zero instead of leaving it out."""
    late_mask: bool = False
    """Mask frames after the softmax of the denoisers' pooling."""
    sampled_scores: bool = False
    """Add the softmax over the best candidates of what the denoiser makes of noise."""
    num_candidates: PositiveInt = 32
    """Candidates of a query that are sampled."""

    COUNTS_PADDING: ClassVar[Mapping[str, bool]] = {"late_mask": True}
    TRAPS: ClassVar[Mapping[str, str]] = {
        "zero_padding": ZERO_PADDING,
        "late_mask": LATE_MASK,
        "sampled_scores": "A sample of the denoiser over the best 32 candidates is added: a score depends on "
        "the other candidates and on random noise.",
    }


class DiffusionRet(TokenWise):
    """WTI with hidden layers of 2 D, and what denoisers of either direction add."""

    Config = DiffusionRetConfig
    hidden_ratio = 2
    published_terms: ClassVar[Mapping[str, Mapping[str, Any]]] = {"denoising": {}}
    original_names = (
        *TokenWise.original_names,
        (r"(text|video)_query\.(q|k|v)_proj\.", r"\1_denoiser.\2."),
        (r"(text|video)_query\.proj\.", r"\1_denoiser.out."),
        (r"(text|video)_query\.embed_timestep\.time_embed\.0\.", r"\1_denoiser.time_in."),
        (r"(text|video)_query\.embed_timestep\.time_embed\.2\.", r"\1_denoiser.time_out."),
        (r"(text|video)_query\.decoder\.0\.", r"\1_denoiser.hidden."),
        (r"(text|video)_query\.decoder\.2\.", r"\1_denoiser.output."),
    )

    def __init__(self, config: DiffusionRetConfig, dim: int) -> None:
        super().__init__(config, dim)
        self.text_denoiser, self.video_denoiser = Denoiser(dim), Denoiser(dim)

    def score_pairs(self, text: TextFeatures, video: VideoFeatures) -> PairScores:
        pairs = super().score_pairs(text, video)
        if self.training:
            return PairScores(pairs.scores_TV, None, {**pairs.parts, **self.training_parts(text, video)})
        if self.config.sampled_scores:
            return PairScores(pairs.scores_TV + self.sampled(text, video, pairs.scores_TV), None)
        return pairs

    def score(
        self,
        text: TextFeatures,
        video: VideoFeatures | ScoreCards,
        *,
        text_block: int | None = None,
        video_block: int | None = None,
    ) -> Tensor:
        if self.config.sampled_scores:
            return Peer.score(self, text, video, text_block=text_block, video_block=len(video))  # type: ignore[arg-type]
        return super().score(text, video, text_block=text_block, video_block=video_block)

    # --- the denoisers --------------------------------------------------------------------------------------

    def pooled(self, text: TextFeatures, video: VideoFeatures) -> Tensor:
        """The candidates of each text, [T, V, D]."""
        late_mask = self.config.late_mask
        video = video if late_mask else video.without_padding()
        return pool_by_text(text.text_TD, video, POOLING_TEMPERATURE, late_mask=late_mask)

    def denoise_videos(self, text_TD: Tensor, pooled_TVD: Tensor, noisy_TV: Tensor, step_T: Tensor) -> Tensor:
        """The scores of every video for each text, from noisy ones."""
        query_TVD = text_TD[:, None].expand_as(pooled_TVD)
        denoised_TV: Tensor = self.text_denoiser(query_TVD, pooled_TVD, noisy_TV, step_T)
        return denoised_TV

    def denoise_texts(self, text_TD: Tensor, pooled_TVD: Tensor, noisy_VT: Tensor, step_V: Tensor) -> Tensor:
        """The scores of every text for each video, from noisy ones."""
        pooled_VTD = pooled_TVD.transpose(0, 1)
        candidate_VTD = text_TD.expand_as(pooled_VTD)
        denoised_VT: Tensor = self.video_denoiser(pooled_VTD, candidate_VTD, noisy_VT, step_V)
        return denoised_VT

    def training_parts(self, text: TextFeatures, video: VideoFeatures) -> dict[str, Tensor]:
        """Denoised scores of noisy truths at random steps, both ways; nothing flows into the features."""
        text_TD, pooled_TVD = text.text_TD.detach(), self.pooled(text, video).detach()
        found = {}
        for name, denoise, shape in (
            ("denoised_TV", self.denoise_videos, (len(text), len(video))),
            ("denoised_VT", self.denoise_texts, (len(video), len(text))),
        ):
            truth = torch.eye(*shape, dtype=text_TD.dtype, device=text_TD.device)
            step = torch.randint(self.config.num_steps, shape[:1], device=text_TD.device)
            noisy = add_noise(truth, torch.randn_like(truth), step, self.config.num_steps)
            found[name] = denoise(text_TD, pooled_TVD, noisy, step)
        return found

    @torch.no_grad()
    def sampled(self, text: TextFeatures, video: VideoFeatures, scores_TV: Tensor) -> Tensor:
        """What is added to the best candidates of each text, zero for the others, [T, V]."""
        number = min(self.config.num_candidates, len(video))
        best_TK = scores_TV.topk(number, dim=1).indices
        pooled_TVD = self.pooled(text, video)
        pooled_TKD = pooled_TVD.gather(1, best_TK[..., None].expand(-1, -1, self.dim))
        sample_TK = self.sample(text.text_TD, pooled_TKD, torch.randn_like(scores_TV[:, :number]))
        return torch.zeros_like(scores_TV).scatter(1, best_TK, sample_TK.softmax(dim=1))

    @torch.no_grad()
    def sample(self, text_TD: Tensor, pooled_TVD: Tensor, start_TV: Tensor) -> Tensor:
        """Deterministic sampling over all steps, from noise to scores."""
        kept = kept_signal(self.config.num_steps).to(start_TV)
        noisy_TV = start_TV
        for step in range(self.config.num_steps - 1, -1, -1):
            step_T = torch.full(start_TV.shape[:1], step, device=start_TV.device)
            clean_TV = self.denoise_videos(text_TD, pooled_TVD, noisy_TV, step_T).clamp(-1, 1)
            noise_TV = (noisy_TV - kept[step].sqrt() * clean_TV) / (1 - kept[step]).sqrt()
            before = kept[step - 1] if step else torch.ones_like(kept[0])
            noisy_TV = before.sqrt() * clean_TV + (1 - before).sqrt() * noise_TV
        return noisy_TV


class Denoiser(nn.Module):
    """One attention from a query to its candidates, with the noisy scores added to its logits."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.out = nn.Linear(dim, dim)
        self.time_in, self.time_out = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.hidden, self.output = nn.Linear(2 * dim, 2 * dim), nn.Linear(2 * dim, 1)
        start_normal(self)

    def forward(self, query_QND: Tensor, candidate_QND: Tensor, noisy_QN: Tensor, step_Q: Tensor) -> Tensor:
        time_QD = self.time_out(F.silu(self.time_in(sinusoid(step_Q, query_QND.shape[-1]).to(query_QND))))
        time_Q1D = time_QD[:, None]
        key_QND, value_QND = self.k(candidate_QND + time_Q1D), self.v(candidate_QND + time_Q1D)
        logits_QN = (self.q(query_QND + time_Q1D) * key_QND).sum(dim=-1)
        weights_QN = (logits_QN + noisy_QN).softmax(dim=-1)
        found_Q1D = self.out(weights_QN[:, None] @ value_QND)
        pair_QNE = torch.cat([found_Q1D.expand_as(candidate_QND), candidate_QND], dim=-1)
        denoised_QN: Tensor = self.output(self.hidden(pair_QNE).relu()).squeeze(-1) + weights_QN
        return denoised_QN


def sinusoid(step_Q: Tensor, dim: int) -> Tensor:
    """Sine on even and cosine on odd channels, [Q, D]."""
    rate_E = torch.exp(torch.arange(0, dim, 2, device=step_Q.device) * (-math.log(10000.0) / dim))
    angle_QE = step_Q[:, None].float() * rate_E
    return torch.stack([angle_QE.sin(), angle_QE.cos()], dim=-1).flatten(1)[:, :dim]


def kept_signal(num_steps: int) -> Tensor:
    """How much of the signal's variance each step keeps: the cosine schedule, [steps], float64."""

    def level(time: float) -> float:
        return math.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2

    betas = [min(1 - level((i + 1) / num_steps) / level(i / num_steps), 0.999) for i in range(num_steps)]
    return (1 - torch.tensor(betas, dtype=torch.float64)).cumprod(dim=0)


def add_noise(truth_QN: Tensor, noise_QN: Tensor, step_Q: Tensor, num_steps: int) -> Tensor:
    """The truth at a step of the diffusion."""
    kept_Q1 = kept_signal(num_steps).to(truth_QN.device)[step_Q][:, None]
    return kept_Q1.sqrt().to(truth_QN) * truth_QN + (1 - kept_Q1).sqrt().to(truth_QN) * noise_QN
