"""GARE: text-video retrieval with gap-aware, pair-specific increments.

What is listed in `__all__` is promised; everything else may change.
"""

from __future__ import annotations

import os
from importlib import import_module

from gare.version import __version__ as __version__

TYPE_CHECKING = False  # the one of typing, whose import would take five times as long as all of this
# Torch's threads spin for ever while they wait for each other. Where other work wants the cores too (an
# indexer beside a search), that turned 24 ms into 300; after some microseconds they should sleep. It must be
# set before torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

if TYPE_CHECKING:
    from typing import Any

    from gare import encoders, evaluate, interaction, objective, theory
    from gare.encoders import ENCODERS, Encoder, EncoderProtocol
    from gare.errors import GareError
    from gare.evaluate import RetrievalMetrics, retrieval_metrics
    from gare.interaction import INTERACTIONS, Interaction
    from gare.library.library import Library
    from gare.library.search.search_hit import SearchHit
    from gare.model import GARE, GareConfig, load_released
    from gare.objective import ObjectiveConfig
    from gare.types import FrameWeights, PairScores, TextFeatures, VideoFeatures

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

_MODULES = {
    "ENCODERS": "gare.encoders",
    "GARE": "gare.model",
    "INTERACTIONS": "gare.interaction",
    "Encoder": "gare.encoders",
    "EncoderProtocol": "gare.encoders",
    "FrameWeights": "gare.types",
    "GareConfig": "gare.model",
    "GareError": "gare.errors",
    "Interaction": "gare.interaction",
    "Library": "gare.library.library",
    "ObjectiveConfig": "gare.objective",
    "PairScores": "gare.types",
    "RetrievalMetrics": "gare.evaluate",
    "SearchHit": "gare.library.search.search_hit",
    "TextFeatures": "gare.types",
    "VideoFeatures": "gare.types",
    "load_released": "gare.model",
    "retrieval_metrics": "gare.evaluate",
}
"""Where each name is; the other names of `__all__` are modules themselves."""


def __getattr__(name: str) -> Any:
    """Load a name when it is asked for: `gare --help` needs no torch, training machines have no store."""
    if name == "scoring":
        raise AttributeError(
            "gare.scoring is gare.interaction since version 0.2; score with an Interaction or GARE.score"
        )
    if name in _MODULES:
        found = getattr(import_module(_MODULES[name]), name)
        globals()[name] = found  # from now on it is found without this function
        return found
    try:
        if name.isidentifier():
            return import_module(f"gare.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"gare.{name}":  # the module is there, and something that it needs is not
            raise
    raise AttributeError(f"module 'gare' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
