"""Made-up vectors of texts and videos, and a model for them: a benchmark needs no data, and no store.

Shapes: V items, F frames, D embedding.
"""

from __future__ import annotations

import numpy as np
import torch

from gare.model import GARE, GareConfig

_CLUSTERS = 400


def synthetic_model(dim: int, frames: int, *, scale: float = 1.0, **interaction: str) -> GARE:
    """GARE on the mini encoder, untrained: the same weights every time.

    Args:
        scale: how many times larger than they start all weights of the interaction are.
        interaction: its settings, where they differ.
    """
    torch.manual_seed(0)
    config = {
        "encoder": {"name": "mini", "dim": dim},
        "temporal": {"num_layers": 0},
        "interaction": {"pooling": "text_conditioned"} | interaction,
        "num_frames": frames,
    }
    model = GARE(GareConfig.load(config)).eval()
    with torch.no_grad():
        for parameter in model.interaction.parameters():
            parameter.mul_(scale)
    return model


def clustered_vectors(generator: np.random.Generator, count: int, dim: int) -> np.ndarray:
    """Unit vectors in clusters with a decaying spectrum, as embeddings have; cluster centres are fixed."""
    scale = 1 / np.sqrt(1 + np.arange(dim) / 20)
    centres = np.random.default_rng(0).normal(size=(_CLUSTERS, dim)) * scale
    vectors = (
        centres[generator.integers(_CLUSTERS, size=count)] + 0.7 * generator.normal(size=(count, dim)) * scale
    )
    unit: np.ndarray = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit.astype(np.float32)


def clustered_frames(generator: np.random.Generator, count: int, frames: int, dim: int) -> np.ndarray:
    """Frame vectors of videos, [V, F, D] in float16: those of a video resemble each other."""
    means_VD = clustered_vectors(generator, count, dim)
    noise_VFD = generator.standard_normal((count, frames, dim), dtype=np.float32)
    noise_VFD *= 0.3 / np.sqrt(dim)
    noise_VFD += means_VD[:, None]
    frames_VFD: np.ndarray = noise_VFD.astype("<f2")
    return frames_VFD
