"""The training objective: pure functions, one term a file, put together in `objective.py`."""

from gare.objective.bottleneck import kl_bottleneck
from gare.objective.contrastive import same_video_cells, symmetric_infonce
from gare.objective.direction import direction_diversity
from gare.objective.distillation import distillation
from gare.objective.objective import Loss, term_weights, training_loss
from gare.objective.radius import radius_spread

__all__ = [
    "Loss",
    "direction_diversity",
    "distillation",
    "kl_bottleneck",
    "radius_spread",
    "same_video_cells",
    "symmetric_infonce",
    "term_weights",
    "training_loss",
]
