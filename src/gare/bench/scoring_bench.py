"""GARE's dense scores against its factored ones on the same data, with operation counts and their floor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gare.bench.bench_timing import describe_device, median_ms
from gare.cpu_products import multiply
from gare.interaction import GapAware, GapAwareConfig
from gare.interaction.interaction import score_in_blocks
from gare.types import TextFeatures, VideoFeatures


@dataclass(frozen=True)
class ScoringBenchmark:
    """Times in milliseconds; `floor_ms` is the bare matrix product of the texts with the cards' vectors,
    taken as scoring takes it: by torch, or by oneDNN where that is faster."""

    texts: int
    videos: int
    frames: int
    dim: int
    dtype: str
    device: str
    torch: str
    dense_ms: float
    factored_ms: float
    cards_ms: float
    floor_ms: float
    speedup: float
    factored_over_floor: float
    max_abs_difference: float
    dense_gflop: float
    factored_gflop: float
    floor_gflop: float


@torch.no_grad()
def benchmark_scoring(
    *, texts: int, videos: int, frames: int, dim: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> ScoringBenchmark:
    """Time one head, frame context, text-conditioned pooling; dense runs in blocks of 128 × 128 pairs."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    text = TextFeatures.from_vectors(random(texts, dim))
    mask_VF = torch.ones(videos, frames, dtype=torch.bool, device=device)
    video = VideoFeatures(random(videos, frames, dim), mask_VF)
    interaction = GapAware(GapAwareConfig(pooling="text_conditioned"), dim).eval().to(device, dtype)
    cards = interaction.cards(video)

    def dense() -> Tensor:
        return score_in_blocks(interaction.score_pairs, text, video)

    dense_TV, factored_TV = dense(), interaction.score(text, cards)
    rows_ND = random(3 * frames * videos, dim)

    dense_ms = median_ms(dense, device)
    factored_ms = median_ms(lambda: interaction.score(text, cards), device)
    cards_ms = median_ms(lambda: interaction.cards(video), device)
    floor_ms = median_ms(lambda: multiply(rows_ND, text.text_TD), device)
    return ScoringBenchmark(
        texts=texts,
        videos=videos,
        frames=frames,
        dim=dim,
        dtype=str(dtype).removeprefix("torch."),
        device=describe_device(device),
        torch=torch.__version__,
        dense_ms=dense_ms,
        factored_ms=factored_ms,
        cards_ms=cards_ms,
        floor_ms=floor_ms,
        speedup=dense_ms / factored_ms,
        factored_over_floor=factored_ms / floor_ms,
        max_abs_difference=(dense_TV.double() - factored_TV.double()).abs().max().item(),
        dense_gflop=texts * videos * dense_flop_per_pair(frames, dim) / 1e9,
        factored_gflop=texts * videos * factored_flop_per_pair(frames, dim) / 1e9,
        floor_gflop=texts * videos * 6 * frames * dim / 1e9,
    )


def dense_flop_per_pair(frames: int, dim: int) -> int:
    """Four D×D products (query, out, residual, output), attention and pooling over F frames.

    >>> dense_flop_per_pair(12, 512)
    2146304
    """
    return 4 * 2 * dim * dim + 4 * 2 * frames * dim


def factored_flop_per_pair(frames: int, dim: int) -> int:
    """Three dot products of length D per frame, and five F×F quadratic forms.

    >>> factored_flop_per_pair(12, 512)
    38424
    """
    return 3 * 2 * frames * dim + 5 * 2 * frames * (frames + 1)
