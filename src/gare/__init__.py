"""GARE: text-video retrieval with gap-aware, pair-specific increments.

What is listed in `__all__` is promised; everything else may change.
"""

import os
from typing import TYPE_CHECKING, Any

# Torch's threads spin for ever while they wait for each other. Where other work wants the cores too (an
# indexer beside a search), that turned 24 ms into 300; after some microseconds they should sleep. It must be
# set before torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

from gare import encoders, evaluate, interaction, objective, theory
from gare.encoders import ENCODERS, Encoder, EncoderProtocol
from gare.errors import GareError
from gare.evaluate import RetrievalMetrics, retrieval_metrics
from gare.interaction import INTERACTIONS, Interaction
from gare.interaction import peers as _peers  # noqa: F401 (it registers the published methods)
from gare.model import GARE, GareConfig, load_released
from gare.objective import ObjectiveConfig
from gare.types import FrameWeights, PairScores, TextFeatures, VideoFeatures
from gare.version import __version__ as __version__

if TYPE_CHECKING:
    from gare.library.library import Library
    from gare.library.search.search_hit import SearchHit

__all__ = [
    "ENCODERS",
    "GARE",
    "INTERACTIONS",
    "Encoder",
    "EncoderProtocol",
    "FrameWeights",
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
    "encoders",
    "evaluate",
    "interaction",
    "load_released",
    "objective",
    "retrieval_metrics",
    "theory",
]


def __getattr__(name: str) -> Any:
    """The library is loaded when it is asked for: training machines have no store."""
    if name == "Library":
        from gare.library.library import Library

        return Library
    if name == "SearchHit":
        from gare.library.search.search_hit import SearchHit

        return SearchHit
    if name == "scoring":
        raise AttributeError(
            "gare.scoring is gare.interaction since version 0.2; score with an Interaction or GARE.score"
        )
    raise AttributeError(f"module 'gare' has no attribute '{name}'")
