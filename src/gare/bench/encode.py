"""How fast a model encodes: texts one by one, as a search has them, and videos whose frames are at hand."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from gare.bench.timing import describe_device, median_ms, peak_memory_gb
from gare.library.queries import AUDIT_SENTENCES
from gare.model import GARE


@dataclass(frozen=True)
class EncodeBenchmark:
    model: str
    device: str
    frames: int
    load_s: float
    """From the name to a model that can be asked, torch already imported."""
    text_ms: float
    """One sentence."""
    texts_per_second: float
    """In batches of 64."""
    video_ms: float
    """One video from pixels in memory."""
    videos_per_second: float
    peak_memory_gb: float


@torch.no_grad()
def benchmark_encode(name: str, *, frames: int, device: torch.device) -> EncodeBenchmark:
    """Load a model by name and time both towers."""
    started = time.perf_counter()
    model = GARE.from_pretrained(name).to(device).eval()
    load_s = time.perf_counter() - started
    size = model.backbone.image_format.size
    pixels_VFCHW = torch.rand(1, frames, 3, size, size, device=device)
    mask_VF = torch.ones(1, frames, dtype=torch.bool, device=device)
    many = [f"{AUDIT_SENTENCES[n % len(AUDIT_SENTENCES)]} {n}" for n in range(64)]
    text_ms = median_ms(lambda: model.encode_text([AUDIT_SENTENCES[0]]), device)
    batch_ms = median_ms(lambda: model.encode_text(many), device)
    video_ms = median_ms(lambda: model.video_features(pixels_VFCHW, mask_VF), device, seconds=4.0)
    return EncodeBenchmark(
        model=name,
        device=describe_device(device),
        frames=frames,
        load_s=load_s,
        text_ms=text_ms,
        texts_per_second=1000 * len(many) / batch_ms,
        video_ms=video_ms,
        videos_per_second=1000 / video_ms,
        peak_memory_gb=peak_memory_gb(),
    )
