"""The paper's appendix in closed form: where InfoNCE pushes a text, and the increment a trust region allows.

Everything is for scores s_ij = cos(t_i + Delta_ij, v_ij) with text i belonging to video i.
Shapes: T texts, V videos, D embedding; a video vector may differ with the text, so it is [T, V, D] or [V, D].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gare.errors import check_choice

Direction = Literal["text_to_video", "video_to_text", "symmetric"]


@dataclass(frozen=True)
class InfoNCEGradients:
    """Gradients of the mean InfoNCE loss. Delta_ij only enters s_ij, and t_i enters every s_ij through t_i +
    Delta_ij, so the gradient on t_i is the sum of those on its increments."""

    increment_TVD: Tensor
    text_TD: Tensor


@dataclass(frozen=True)
class TrustRegionStep:
    """The increment after a step, its length along −gradient, and whether the radius could be met."""

    increment_TVD: Tensor
    length_TV: Tensor
    feasible_TV: Tensor


def infonce_gradients(
    text_TD: Tensor,
    increment_TVD: Tensor,
    video: Tensor,
    *,
    temperature: float,
    direction: Direction = "symmetric",
) -> InfoNCEGradients:
    """dL/dDelta_ij = (residual_ij / N) (v̂ − s_ij x̂) / (temperature |x|), with x = t_i + Delta_ij.

    residual_ij is softmax minus one-hot: over the videos of text i, over the texts of video j, or the mean of
    both.
    """
    check_choice("direction", direction, ("text_to_video", "video_to_text", "symmetric"))
    shifted_TVD = text_TD[:, None] + increment_TVD
    unit_shifted_TVD, unit_video = F.normalize(shifted_TVD, dim=-1), F.normalize(video, dim=-1)
    scores_TV = (unit_shifted_TVD * unit_video).sum(dim=-1)
    if scores_TV.shape[0] != scores_TV.shape[1]:
        raise ValueError(
            f"text i belongs to video i, so there must be as many of each; got {list(scores_TV.shape)}"
        )
    target_TV = torch.eye(scores_TV.shape[0], dtype=scores_TV.dtype, device=scores_TV.device)
    rows_TV = (scores_TV / temperature).softmax(dim=1) - target_TV
    columns_TV = (scores_TV / temperature).softmax(dim=0) - target_TV
    residual_TV = {
        "text_to_video": rows_TV,
        "video_to_text": columns_TV,
        "symmetric": (rows_TV + columns_TV) / 2,
    }[direction]
    tangent_TVD = unit_video - scores_TV[..., None] * unit_shifted_TVD
    weight_TV = residual_TV / (len(text_TD) * temperature * shifted_TVD.norm(dim=-1))
    gradient_TVD = weight_TV[..., None] * tangent_TVD
    return InfoNCEGradients(gradient_TVD, gradient_TVD.sum(dim=1))


def uncoupled_step(gradient_TVD: Tensor, radius_TV: Tensor) -> Tensor:
    """The best increment of length `radius` to first order, from zero: −radius · ĝ."""
    return -radius_TV[..., None] * F.normalize(gradient_TVD, dim=-1)


def coupled_step(increment_TVD: Tensor, gradient_TVD: Tensor, radius_TV: Tensor) -> TrustRegionStep:
    """Move an increment against its gradient until its length is `radius`: Delta − length · ĝ.

    length = Delta·ĝ + sqrt((Delta·ĝ)² − |Delta|² + radius²). Where the line never comes as close to the
    origin as the radius, there is no such step: the closest point is returned and `feasible_TV` is false.
    """
    unit_gradient_TVD = F.normalize(gradient_TVD, dim=-1)
    along_TV = (increment_TVD * unit_gradient_TVD).sum(dim=-1)
    discriminant_TV = along_TV.square() - increment_TVD.square().sum(dim=-1) + radius_TV.square()
    length_TV = along_TV + discriminant_TV.clamp_min(0).sqrt()
    moved_TVD = increment_TVD - length_TV[..., None] * unit_gradient_TVD
    return TrustRegionStep(moved_TVD, length_TV, discriminant_TV >= 0)


def learned_step(before_TVD: Tensor, after_TVD: Tensor, gradient_TVD: Tensor) -> Tensor:
    """How far an increment really moved against its gradient, [T, V]."""
    return ((before_TVD - after_TVD) * F.normalize(gradient_TVD, dim=-1)).sum(dim=-1)


def step_error(learned_TV: Tensor, analytic_TV: Tensor) -> Tensor:
    """|learned − analytic| step length, [T, V]."""
    return (learned_TV - analytic_TV).abs()
