"""The training loss: the terms a recipe asks for, every weight applied in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from gare.errors import ConfigError
from gare.objective import TERMS
from gare.objective.loss_term import LossTerm, ScoredBatch
from gare.settings import Settings
from gare.types import PairScores, TextFeatures, VideoFeatures

DEFAULT_TERMS = ("contrastive", "kl", "radius", "direction", "teacher")
"""The terms of every run, unless their weight is zero. A term that a batch has no input for is left out."""

_OLD_KEYS = {
    "kl_weight": ("kl", "weight"),
    "kl_reduction": ("kl", "reduction"),
    "kl_anchor": ("kl", "anchor"),
    "kl_prior_std": ("kl", "prior_std"),
    "kl_normalise": ("kl", "normalise"),
    "radius_weight": ("radius", "weight"),
    "radius_variant": ("radius", "variant"),
    "radius_variance_cap": ("radius", "variance_cap"),
    "diversity_weight": ("direction", "weight"),
    "diversity_variant": ("direction", "variant"),
    "diversity_sharpness": ("direction", "sharpness"),
    "teacher_weight": ("teacher", "weight"),
    "same_video": ("contrastive", "same_video"),
}
"""Recipes once had one flat table: `objective.kl_weight` is `objective.terms.kl.weight`. Both are read."""


@dataclass(frozen=True)
class ObjectiveConfig(Settings):
    """Terms of the training loss and their weights. `preset = "released"` follows the authors' code."""

    terms: dict[str, Any] = field(default_factory=dict)
    """Settings by the name of the term, as in `[objective.terms.kl]`; what is left out is as it is by
    default. A term that others registered is added by being named here."""

    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {},
        "released": {
            "terms": {
                "contrastive": {"same_video": "released"},
                "kl": {"weight": 1e-4, "reduction": "event"},
                "radius": {"above_cap": "zero"},
                "direction": {"log_floor": 1e-8},
            }
        },
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        given = {**{name: {} for name in DEFAULT_TERMS}, **self.terms}
        object.__setattr__(self, "terms", {name: _read_term(name, values) for name, values in given.items()})

    @classmethod
    def upgraded(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Sort the keys of the flat table under their terms."""
        terms = values.get("terms", {})
        if not isinstance(terms, Mapping):
            return values
        for key in _OLD_KEYS.keys() & values.keys():
            term, name = _OLD_KEYS[key]
            value, settings = values.pop(key), terms.get(term, {})
            if isinstance(settings, Mapping):
                terms = {**terms, term: {**settings, name: value}}
        return {**values, "terms": terms} if terms else values


def _read_term(name: str, values: Any) -> LossTerm:
    term = TERMS[name]
    if isinstance(values, term):
        return values
    if not isinstance(values, Mapping):
        raise ConfigError(f"terms.{name}: must be a table of settings, not {values!r}")
    try:
        return term.load(values)
    except ConfigError as error:
        raise ConfigError(f"terms.{name}: {error}") from None


@dataclass(frozen=True)
class Loss:
    """`total` is what to minimise; `terms` are the raw terms, before their weights."""

    total: Tensor
    terms: dict[str, Tensor]


def term_weights(config: ObjectiveConfig) -> dict[str, float]:
    """The weight of each term in the total."""
    return {name: term.weight for name, term in config.terms.items()}


def training_loss(
    pairs: PairScores,
    logit_scale: Tensor | float,
    config: ObjectiveConfig,
    *,
    video_index: Tensor | None = None,
    teacher_logits_TV: Tensor | None = None,
    text: TextFeatures | None = None,
    video: VideoFeatures | None = None,
) -> Loss:
    """The objective of a batch whose text i belongs to video i.

    Args:
        pairs: scores and increments; without increments (the baseline) and teachers the contrastive term is
            all there is.
        logit_scale: one over the temperature.
        config: which terms, with their settings.
        video_index: which video each pair shows.
        teacher_logits_TV: the teachers' logits of the same pairs, if there are teachers.
        text, video: features of both sides, for terms that need them.
    """
    if pairs.are_logits:
        logit_scale = 1.0
    batch = ScoredBatch(pairs, logit_scale, video_index, teacher_logits_TV, text, video)
    found = {name: term(batch) for name, term in config.terms.items()}
    terms = {name: term for name, term in found.items() if term is not None}
    weights = term_weights(config)
    total = sum((weights[name] * term for name, term in terms.items()), start=pairs.scores_TV.new_zeros(()))
    return Loss(total, terms)
