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
    rows_TV, columns_TV = (_residual(scores_TV / temperature, dim) for dim in (1, 0))
    residual_TV = {
        "text_to_video": rows_TV,
        "video_to_text": columns_TV,
        "symmetric": (rows_TV + columns_TV) / 2,
    }[direction]
    tangent_TVD = unit_video - scores_TV[..., None] * unit_shifted_TVD
    weight_TV = residual_TV / (len(text_TD) * temperature * shifted_TVD.norm(dim=-1))
    gradient_TVD = weight_TV[..., None] * tangent_TVD
    return InfoNCEGradients(gradient_TVD, gradient_TVD.sum(dim=1))


def _residual(logits_TV: Tensor, dim: int) -> Tensor:
    """Softmax minus one-hot; on the diagonal the sum of the others, which is exact where softmax − 1 is 0."""
    wrong_TV = logits_TV.softmax(dim=dim)
    wrong_TV = wrong_TV - wrong_TV.diagonal().diag_embed()
    return wrong_TV - wrong_TV.sum(dim=dim).diag_embed()


def _direction(gradient_TVD: Tensor) -> Tensor:
    """A gradient at unit length, however short it is; only zero stays zero.

    `F.normalize` divides by at least 1e-12, and the square of 1e-30 is 0 in float32: hence the scaling first.
    """
    largest_TV1 = gradient_TVD.abs().amax(dim=-1, keepdim=True)
    return F.normalize(gradient_TVD / torch.where(largest_TV1 > 0, largest_TV1, 1), dim=-1)


def uncoupled_step(gradient_TVD: Tensor, radius_TV: Tensor) -> Tensor:
    """The best increment of length `radius` to first order, from zero: −radius · ĝ."""
    return -radius_TV[..., None] * _direction(gradient_TVD)


def coupled_step(increment_TVD: Tensor, gradient_TVD: Tensor, radius_TV: Tensor) -> TrustRegionStep:
    """Move an increment against its gradient until its length is `radius`: Delta − length · ĝ.

    length = Delta·ĝ + sqrt((Delta·ĝ)² − |Delta|² + radius²). Where the line never comes as close to the
    origin as the radius, there is no such step: the closest point is returned and `feasible_TV` is false.
    A gradient of zero gives no line: the increment stays, which is feasible if it has that radius already.
    """
    unit_gradient_TVD = _direction(gradient_TVD)
    along_TV = (increment_TVD * unit_gradient_TVD).sum(dim=-1)
    norm_TV = increment_TVD.norm(dim=-1)
    # As a product of differences radius² − |Delta|² is zero, not rounding, where the two are equal.
    discriminant_TV = along_TV.square() + (radius_TV - norm_TV) * (radius_TV + norm_TV)
    has_line_TV = gradient_TVD.any(dim=-1)
    length_TV = (along_TV + discriminant_TV.clamp_min(0).sqrt()) * has_line_TV
    moved_TVD = increment_TVD - length_TV[..., None] * unit_gradient_TVD
    feasible_TV = torch.where(has_line_TV, discriminant_TV >= 0, norm_TV == radius_TV)
    return TrustRegionStep(moved_TVD, length_TV, feasible_TV)


def learned_step(before_TVD: Tensor, after_TVD: Tensor, gradient_TVD: Tensor) -> Tensor:
    """How far an increment really moved against its gradient, [T, V]."""
    return ((before_TVD - after_TVD) * _direction(gradient_TVD)).sum(dim=-1)


def step_error(learned_TV: Tensor, analytic_TV: Tensor) -> Tensor:
    """|learned − analytic| step length, [T, V]."""
    return (learned_TV - analytic_TV).abs()
