"""What scoring with a trained model costs: parameters, operations, milliseconds, exact fast scoring."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from gare import atomic
from gare.model import GARE
from gare.types import TextFeatures, VideoFeatures

PAIRS_A_SIDE = 64
REPEATS = 5
FAST = {
    "vectors": "yes, one vector a video",
    "products": "yes, from products of prepared tokens",
    "none": "no, every pair runs through it",
}


@dataclass(frozen=True)
class ScoringCosts:
    """The cost of scoring, measured on random features of the model's size."""

    parameters: int
    """Weights of the interaction, and of the model's transformer over frames where it has one."""
    flops_per_pair: float
    """Operations in training on 128 × 128 pairs, over their number."""
    milliseconds: float
    """The fastest of five for 64 texts and 64 videos, in evaluation."""
    fast_scoring: str
    device: str

    def save(self, path: Path) -> None:
        atomic.write_text(path, json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, path: Path) -> ScoringCosts:
        return cls(**json.loads(path.read_text(encoding="utf-8")))


@torch.no_grad()
def scoring_costs(model: GARE, *, frames: int, words: int) -> ScoringCosts:
    """Measure a model's interaction with so many frames a video and words a text."""
    interaction = model.interaction.eval()
    generator = torch.Generator().manual_seed(0)
    shape = (PAIRS_A_SIDE, words, model.dim)
    words_TWD = torch.randn(shape, generator=generator).to(model.device)
    frames_VFD = torch.randn(PAIRS_A_SIDE, frames, model.dim, generator=generator).to(model.device)
    text = TextFeatures(words_TWD[:, 0], words_TWD, torch.ones_like(words_TWD[..., 0], dtype=torch.bool))
    video = VideoFeatures(frames_VFD, torch.ones_like(frames_VFD[..., 0], dtype=torch.bool))
    parts = [interaction] if model.temporal is None else [interaction, model.temporal]
    flops = interaction.flops(texts=128, videos=128, frames=frames, words=words)
    seconds = []
    for _ in range(REPEATS + 1):  # the first one warms up
        _wait(model.device)
        begun = time.perf_counter()
        interaction.score(text, video)
        _wait(model.device)
        seconds.append(time.perf_counter() - begun)
    return ScoringCosts(
        parameters=sum(parameter.numel() for part in parts for parameter in part.parameters()),
        flops_per_pair=flops / 128**2,
        milliseconds=1000 * min(seconds[1:]),
        fast_scoring=interaction.fast_scoring,
        device=str(model.device),
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
