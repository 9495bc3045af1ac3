"""The training objective: one loss term a file, with its settings; put together in `training_loss.py`."""

from gare.objective.banzhaf_term import Banzhaf
from gare.objective.bottleneck_term import KlBottleneck, kl_bottleneck
from gare.objective.contrastive_term import Contrastive, same_video_cells, symmetric_infonce
from gare.objective.decorrelation_term import (
    ConceptDecorrelation,
    FeatureDecorrelation,
    TokenDecorrelation,
)
from gare.objective.denoising_term import Denoising, PseudoQuery, SigmoidPairs
from gare.objective.direction_term import DirectionDiversity, direction_diversity
from gare.objective.hard_negative_term import HardNegative, PartialMargin
from gare.objective.levels_term import Hierarchy, LevelAgreement, Levels
from gare.objective.loss_term import LossTerm, ScoredBatch
from gare.objective.multi_instance_term import MultiInstance, SampleKl
from gare.objective.neighbor_term import Centrality, NeighborAdjusting, UniformMatching
from gare.objective.radius_term import RadiusSpread, radius_spread
from gare.objective.teacher_term import Distillation, distillation
from gare.registry import Registry

TERMS: Registry[type[LossTerm]] = Registry(
    "loss term",
    {
        "contrastive": Contrastive,
        "kl": KlBottleneck,
        "radius": RadiusSpread,
        "direction": DirectionDiversity,
        "teacher": Distillation,
        # Terms of published methods; docs/methods.md says whose.
        "levels": Levels,
        "level_agreement": LevelAgreement,
        "hierarchy": Hierarchy,
        "banzhaf": Banzhaf,
        "centrality": Centrality,
        "uniform": UniformMatching,
        "neighbor": NeighborAdjusting,
        "token_decorrelation": TokenDecorrelation,
        "concept_decorrelation": ConceptDecorrelation,
        "feature_decorrelation": FeatureDecorrelation,
        "multi_instance": MultiInstance,
        "sample_kl": SampleKl,
        "hard_negative": HardNegative,
        "partial_margin": PartialMargin,
        "denoising": Denoising,
        "pseudo_query": PseudoQuery,
        "sigmoid": SigmoidPairs,
    },
)

from gare.objective.training_loss import (  # noqa: E402 (it reads the table)
    Loss,
    ObjectiveConfig,
    term_weights,
    training_loss,
)

__all__ = [
    "TERMS",
    "Loss",
    "LossTerm",
    "ObjectiveConfig",
    "ScoredBatch",
    "direction_diversity",
    "distillation",
    "kl_bottleneck",
    "radius_spread",
    "same_video_cells",
    "symmetric_infonce",
    "term_weights",
    "training_loss",
]
