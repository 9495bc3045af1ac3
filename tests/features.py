"""Random features, psi and interactions for tests of scoring."""

from __future__ import annotations

import itertools

import torch

from gare import Interaction, TextFeatures, VideoFeatures
from gare.model import IncrementNet

AXES = {
    "corrected_side": ("text", "video"),
    "context": ("frames", "words"),
    "query": ("gap", "text"),
    "gap_direction": ("video_minus_text", "text_minus_video"),
    "normalise": (False, True),
    "pooling": ("mean", "text_conditioned"),
    "mask_frames": (True, False),
}


def all_interactions() -> list[Interaction]:
    combinations = itertools.product(*AXES.values())
    return [Interaction(**dict(zip(AXES, values, strict=True))) for values in combinations]


def random_text(
    generator: torch.Generator, num_texts: int, num_words: int, dim: int, dtype: torch.dtype = torch.float64
) -> TextFeatures:
    mask = _random_mask(generator, num_texts, num_words)
    text = torch.randn(num_texts, dim, generator=generator, dtype=dtype)
    return TextFeatures(text, torch.randn(num_texts, num_words, dim, generator=generator, dtype=dtype), mask)


def random_video(
    generator: torch.Generator, num_videos: int, num_frames: int, dim: int, dtype: torch.dtype = torch.float64
) -> VideoFeatures:
    frames = torch.randn(num_videos, num_frames, dim, generator=generator, dtype=dtype)
    return VideoFeatures(frames, _random_mask(generator, num_videos, num_frames))


def random_psi(
    generator: torch.Generator, dim: int, num_heads: int = 1, dtype: torch.dtype = torch.float64
) -> IncrementNet:
    """Weights large enough that every term of psi matters; LayerNorm scales around one."""
    psi = IncrementNet(dim, num_heads=num_heads, dropout=0.0).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in psi.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.3)
            if name.startswith("norm") and name.endswith("weight"):
                parameter.add_(1)
    return psi


def _random_mask(generator: torch.Generator, rows: int, columns: int) -> torch.Tensor:
    """At least one real token a row, at a random place."""
    mask = torch.rand(rows, columns, generator=generator) < 0.7
    mask[torch.arange(rows), torch.randint(columns, (rows,), generator=generator)] = True
    return mask
