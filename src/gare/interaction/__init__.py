"""Interactions turn a text and a video into a score. One file each, and the table of all of them."""

from __future__ import annotations

from gare.interaction.gap_aware import GapAware, GapAwareConfig
from gare.interaction.interaction import Interaction, InteractionConfig, PairProducts, PairVectors
from gare.interaction.mean_pooling import MeanPooling, MeanPoolingConfig
from gare.interaction.score_cards import ScoreCards, features_of
from gare.interaction.text_conditioned import TextConditionedConfig, TextConditionedPooling
from gare.interaction.token_wise import TokenWise, TokenWiseConfig
from gare.interaction.xpool import XPool, XPoolConfig
from gare.registry import Registry

INTERACTIONS: Registry[type[Interaction]] = Registry(
    "interaction",
    {
        "gare": GapAware,
        "mean": MeanPooling,
        "text_conditioned": TextConditionedPooling,
        "xpool": XPool,
        "token_wise": TokenWise,
    },
    more="gare.interaction.peers",
)
"""Every interaction, by the `name` in a model's settings; the other published methods are in `peers`."""


def build_interaction(config: InteractionConfig, dim: int) -> Interaction:
    """The interaction that settings describe, with fresh weights."""
    return INTERACTIONS[config.name](config, dim)


__all__ = [
    "INTERACTIONS",
    "GapAware",
    "GapAwareConfig",
    "Interaction",
    "InteractionConfig",
    "MeanPooling",
    "MeanPoolingConfig",
    "PairProducts",
    "PairVectors",
    "ScoreCards",
    "TextConditionedConfig",
    "TextConditionedPooling",
    "TokenWise",
    "TokenWiseConfig",
    "XPool",
    "XPoolConfig",
    "build_interaction",
    "features_of",
]
