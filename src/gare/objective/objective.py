"""The training loss: every term by name, every weight in one place."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gare.config import ObjectiveConfig
from gare.objective.bottleneck import kl_bottleneck
from gare.objective.contrastive import symmetric_infonce
from gare.objective.direction import direction_diversity
from gare.objective.distillation import distillation
from gare.objective.radius import radius_spread
from gare.types import PairScores


@dataclass(frozen=True)
class Loss:
    """`total` is what to minimise; `terms` are the raw terms, before their weights."""

    total: Tensor
    terms: dict[str, Tensor]


def term_weights(config: ObjectiveConfig) -> dict[str, float]:
    """The weight of each term in the total."""
    return {
        "contrastive": 1.0,
        "kl": config.kl_weight,
        "radius": config.radius_weight,
        "direction": config.diversity_weight,
        "teacher": config.teacher_weight,
    }


def training_loss(
    pairs: PairScores,
    logit_scale: Tensor | float,
    config: ObjectiveConfig,
    *,
    video_index: Tensor | None = None,
    teacher_logits_TV: Tensor | None = None,
) -> Loss:
    """The objective of a batch whose text i belongs to video i.

    Args:
        pairs: scores and increments; without increments (the baseline) the contrastive term is all there is.
        logit_scale: one over the temperature.
        config: variants and weights.
        video_index: which video each pair shows; used when `config.same_video` is "exclude".
        teacher_logits_TV: what teachers say of the same pairs, if there are any.
    """
    excluded = video_index if config.same_video == "exclude" else None
    terms = {"contrastive": symmetric_infonce(pairs.scores_TV, logit_scale, video_index=excluded)}
    if pairs.increment_TVD is not None:
        terms["kl"] = kl_bottleneck(
            pairs.increment_TVD,
            anchor=config.kl_anchor,
            prior_std=config.kl_prior_std,
            reduction=config.kl_reduction,
            normalise=config.kl_normalise,
        )
        terms["radius"] = radius_spread(
            pairs.increment_TVD.norm(dim=-1), cap=config.radius_variance_cap, variant=config.radius_variant
        )
        terms["direction"] = direction_diversity(
            pairs.increment_TVD, sharpness=config.diversity_sharpness, variant=config.diversity_variant
        )
    if teacher_logits_TV is not None:
        terms["teacher"] = distillation(pairs.scores_TV, logit_scale, teacher_logits_TV)
    weights = term_weights(config)
    total = sum((weights[name] * term for name, term in terms.items()), start=pairs.scores_TV.new_zeros(()))
    return Loss(total, terms)
