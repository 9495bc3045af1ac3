"""TS2-Net's head and token selection (Liu et al. 2022): frames weighted by how well they fit the text.

With `select_patches` a small net first chooses patches of each frame, and frames and patches go through a
transformer together; features must then have patches. Without, the frames alone do.

A model with this head needs no other transformer over frames: set `temporal.num_layers = 0`.

Shapes: T texts, V videos, F frames, P patches of a frame, D embedding, S draws, K chosen patches, N tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gare.interaction.interaction import FastScoring, InteractionConfig
from gare.interaction.peers.peer import Peer, fit, start_normal, unit
from gare.interaction.temporal import TemporalTransformer, default_heads
from gare.settings import PositiveFloat, PositiveInt
from gare.types import FrameWeights, PairScores, TextFeatures, VideoFeatures


@dataclass(frozen=True)
class Ts2NetConfig(InteractionConfig):
    """Frames weighted by their fit, after a transformer over frames and chosen patches."""

    name: Literal["ts2_net"] = "ts2_net"
    sharpness: PositiveFloat = 4.0
    """How much more the best frame counts."""
    select_patches: bool = False
    """Let patches take part; features must have them."""
    num_selected: PositiveInt = 3
    """Patches chosen of each frame."""
    num_draws: PositiveInt = 500
    """Noisy choices that a training step averages."""
    noise_std: PositiveFloat = 0.05
    num_layers: PositiveInt = 4
    num_heads: PositiveInt | None = None
    """Heads of the transformer; about one for each 64 dimensions if not given."""
    max_frames: PositiveInt = 12
    tiled_mask: bool = False
    """Give tokens the mask of the wrong frames, as the published code does."""
    noisy_evaluation: bool = False
    """Choose patches with noise at evaluation too."""

    COUNTS_PADDING: ClassVar[Mapping[str, bool]] = {"tiled_mask": True}
    TRAPS: ClassVar[Mapping[str, str]] = {
        "tiled_mask": "The frame mask is tiled although tokens stand frame by frame: frame b has the mask "
        "of frame 4b mod F, so padding counts and real frames do not. It matters with select_patches.",
        "noisy_evaluation": "Patches are chosen with random noise at evaluation: two runs score differently.",
    }


class Ts2Net(Peer):
    """Σ_b α_b c_b with c the cosines of text and frames and α a softmax of the cosines at length one."""

    Config = Ts2NetConfig
    config: Ts2NetConfig
    fast_scoring: FastScoring = "products"
    original_names = (
        (r"frame_position_embeddings\.weight", "temporal.position"),
        (r"transformerClip\.", "temporal."),
        (r"visual_token_selector\.score_predictor\.in_conv\.0\.", "selector.norm."),
        (r"visual_token_selector\.score_predictor\.in_conv\.1\.", "selector.enter."),
        (r"visual_token_selector\.score_predictor\.out_conv\.0\.", "selector.mix."),
        (r"visual_token_selector\.score_predictor\.out_conv\.2\.", "selector.output."),
    )

    def __init__(self, config: Ts2NetConfig, dim: int) -> None:
        super().__init__(config, dim)
        self.tokens_per_frame = 1 + config.num_selected if config.select_patches else 1
        self.temporal = TemporalTransformer(
            dim,
            num_layers=config.num_layers,
            num_heads=config.num_heads or default_heads(dim),
            max_frames=config.max_frames * self.tokens_per_frame,
        )
        if config.select_patches:
            self.selector = PatchScorer(dim)

    def score_pairs(self, text: TextFeatures, video: VideoFeatures) -> PairScores:
        text, video = self.prepare(text, video)
        frames_VFD, mask_VF = self.video_frames(video)
        return PairScores(weighted_cosines(text.text_TD, frames_VFD, mask_VF, self.config.sharpness)[0], None)

    def video_frames(self, video: VideoFeatures, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Frames after the transformer, and the mask they carry; `noise` is [V · F, S, P]."""
        frames_VFD, mask_VF = fit(video.frames_VFD, video.mask_VF, self.config.max_frames, "frames")
        if not self.config.select_patches:
            return self.temporal(frames_VFD, mask_VF), mask_VF
        if video.patches_VFPD is None:
            raise ValueError(
                "ts2_net with select_patches reads patch vectors, and these features have none; "
                "set interaction.select_patches = false"
            )
        patches_VFPD, _ = fit(video.patches_VFPD, video.mask_VF, self.config.max_frames, "frames")
        tokens_VND = self.select(frames_VFD, patches_VFPD, noise).flatten(1, 2)
        size = self.tokens_per_frame
        mask_VN = mask_VF.tile(1, size) if self.config.tiled_mask else mask_VF.repeat_interleave(size, dim=1)
        tokens_VND = self.temporal(tokens_VND, mask_VN)
        return tokens_VND[:, ::size], mask_VN[:, ::size]

    def select(self, frames_VFD: Tensor, patches_VFPD: Tensor, noise: Tensor | None = None) -> Tensor:
        """Each frame with its chosen patches behind it, [V, F, 1 + K, D]."""
        scores_BP = self.selector(frames_VFD.flatten(0, 1), patches_VFPD.flatten(0, 1))
        is_noisy = self.training or self.config.noisy_evaluation
        if noise is None and is_noisy:
            shape = (len(scores_BP), self.config.num_draws, scores_BP.shape[1])
            noise = torch.randn(shape, dtype=scores_BP.dtype, device=scores_BP.device)
        if noise is None:
            noise = scores_BP.new_zeros(len(scores_BP), 1, scores_BP.shape[1])
        number = min(self.config.num_selected, scores_BP.shape[1])
        chosen_BKP: Tensor = NoisyTopK.apply(scores_BP, noise, number, self.config.noise_std)  # type: ignore[no-untyped-call]
        chosen_VFKP = chosen_BKP.unflatten(0, frames_VFD.shape[:2])
        return torch.cat([frames_VFD[:, :, None], chosen_VFKP @ patches_VFPD], dim=2)

    def frame_weights(self, text: TextFeatures, video: Any) -> FrameWeights:
        """The share of each frame in the score."""
        video = video.video if not isinstance(video, VideoFeatures) else video
        num_frames = video.mask_VF.shape[1]
        text, video = self.prepare(text, video)
        frames_VFD, mask_VF = self.video_frames(video)
        weights_TVF = weighted_cosines(text.text_TD, frames_VFD, mask_VF, self.config.sharpness)[1]
        missing = max(0, num_frames - weights_TVF.shape[-1])
        return FrameWeights(F.pad(weights_TVF[..., :num_frames], (0, missing)))


class PatchScorer(nn.Module):
    """How much each patch of a frame matters, from the patch and the frame."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        half = dim // 2
        self.norm = nn.LayerNorm(dim)
        self.enter = nn.Linear(dim, half, bias=False)
        self.mix, self.output = nn.Linear(2 * half, half, bias=False), nn.Linear(half, 1, bias=False)
        start_normal(self)

    def forward(self, frame_BD: Tensor, patches_BPD: Tensor) -> Tensor:
        tokens_BND = torch.cat([frame_BD[:, None], patches_BPD], dim=1)
        hidden_BNE = F.gelu(self.enter(self.norm(tokens_BND)))
        whole_BNE = hidden_BNE[:, :1].expand_as(hidden_BNE)
        scores_BN = self.output(F.gelu(self.mix(torch.cat([hidden_BNE, whole_BNE], dim=-1)))).squeeze(-1)
        scores_BP: Tensor = scores_BN.tanh()[:, 1:]
        return scores_BP


class NoisyTopK(torch.autograd.Function):
    """The mean over noisy draws of the one-hot rows of the best K, in the order of their place.

    Backward is that of the published code: the diagonal part of the perturbed gradient.
    """

    @staticmethod
    def forward(ctx: Any, scores_BP: Tensor, noise_BSP: Tensor, number: int, std: float) -> Tensor:
        noisy_BSP = scores_BP[:, None] + std * noise_BSP
        chosen_BSK = noisy_BSP.topk(number, dim=-1).indices.sort(dim=-1).values
        one_hot_BSKP = F.one_hot(chosen_BSK, scores_BP.shape[-1]).to(scores_BP.dtype)
        ctx.std = std
        ctx.save_for_backward((one_hot_BSKP * noise_BSP[:, :, None]).mean(dim=1))
        return one_hot_BSKP.mean(dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (slope_BKP,) = ctx.saved_tensors
        return (gradients[0] * slope_BKP).sum(dim=1) / ctx.std, None, None, None


def weighted_cosines(
    text_TD: Tensor, frames_VFD: Tensor, mask_VF: Tensor, sharpness: float
) -> tuple[Tensor, Tensor]:
    """Cosines of text and frames, weighted by a softmax of themselves at length one; and the weights."""
    cosines_TVF = torch.einsum("td,vfd->tvf", unit(text_TD), unit(frames_VFD))
    relative_TVF = F.normalize(cosines_TVF * mask_VF, dim=-1)
    logits_TVF = (sharpness * relative_TVF).masked_fill(~mask_VF, float("-inf"))
    weights_TVF = logits_TVF.softmax(dim=-1)
    return (weights_TVF * cosines_TVF).sum(dim=-1), weights_TVF
