"""GARE: text-video retrieval with gap-aware, pair-specific increments.

What is listed in `__all__` is promised; everything else may change.
"""

import os
from typing import TYPE_CHECKING, Any

# Torch's threads spin for ever while they wait for each other. Where other work wants the cores too (an
# indexer beside a search), that turned 24 ms into 300; after some microseconds they had better sleep. To be
# said before torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

from gare import evaluate, objective, scoring, theory
from gare.config import GareConfig, ObjectiveConfig
from gare.errors import GareError
from gare.evaluate import RetrievalMetrics, retrieval_metrics
from gare.model import GARE, load_released
from gare.types import Interaction, PairScores, TextFeatures, VideoFeatures

if TYPE_CHECKING:
    from gare.library.library import Library
    from gare.library.search import SearchHit

__version__ = "0.1.0"

__all__ = [
    "GARE",
    "GareConfig",
    "GareError",
    "Interaction",
    "Library",
    "ObjectiveConfig",
    "PairScores",
    "RetrievalMetrics",
    "SearchHit",
    "TextFeatures",
    "VideoFeatures",
    "evaluate",
    "load_released",
    "objective",
    "retrieval_metrics",
    "scoring",
    "theory",
]


def __getattr__(name: str) -> Any:
    """The library is loaded when it is asked for: training machines have no store."""
    if name == "Library":
        from gare.library.library import Library

        return Library
    if name == "SearchHit":
        from gare.library.search import SearchHit

        return SearchHit
    raise AttributeError(f"module 'gare' has no attribute '{name}'")
