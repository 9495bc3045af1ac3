"""GARE: text-video retrieval with gap-aware, pair-specific increments.

What is listed in `__all__` is promised; everything else may change.
"""

from gare import evaluate, objective, scoring, theory
from gare.config import GareConfig, ObjectiveConfig
from gare.errors import GareError
from gare.evaluate import RetrievalMetrics, retrieval_metrics
from gare.model import GARE, load_released
from gare.types import Interaction, PairScores, TextFeatures, VideoFeatures

__version__ = "0.1.0"

__all__ = [
    "GARE",
    "GareConfig",
    "GareError",
    "Interaction",
    "ObjectiveConfig",
    "PairScores",
    "RetrievalMetrics",
    "TextFeatures",
    "VideoFeatures",
    "evaluate",
    "load_released",
    "objective",
    "retrieval_metrics",
    "scoring",
    "theory",
]
