"""A training step at the size of the paper, beside a bare dual tower, with the arithmetic both must do."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from gare.bench.timing import describe_device, median_ms
from gare.config import GareConfig, ObjectiveConfig
from gare.model import GARE
from gare.objective import symmetric_infonce
from gare.scoring.pooling import mean_weights, weighted_mean
from gare.train.config import OptimizerConfig
from gare.train.distributed import Processes
from gare.train.loop import compile_towers
from gare.train.optim import build_optimizer
from gare.train.step import PairBatch, compute_gradients, make_encode

PEAK_TFLOPS = {"NVIDIA H200": 989.0, "NVIDIA H100": 989.0, "NVIDIA A100": 312.0}
"""Dense bfloat16, by the vendor's data sheet; utilisation is left out for other devices."""


@dataclass(frozen=True)
class TrainBenchmark:
    """Milliseconds a step; `bare` is the same towers with mean pooling, InfoNCE and the same optimiser."""

    batch_size: int
    frames: int
    backbone: str
    device: str
    torch: str
    step_ms: float
    bare_ms: float
    step_over_bare: float
    peak_memory_gb: float
    bare_memory_gb: float
    tflop_per_step: float
    model_flop_utilisation: float | None
    pairs_per_second: float


def benchmark_train(
    *,
    batch_size: int,
    frames: int,
    model: GareConfig,
    device: torch.device,
    compiled: bool,
    chunk_size: int | None,
) -> TrainBenchmark:
    """Random weights and frames: towers in bfloat16 on a GPU, everything after them in float32, AdamW."""
    torch.manual_seed(0)
    gare = GARE(model).to(device).train()
    if compiled:
        compile_towers(gare)
    optimizer = build_optimizer(gare, OptimizerConfig())
    batch = _random_batch(gare, batch_size, frames, device)
    encode = make_encode(gare, autocast=device.type == "cuda")
    alone, objective = Processes(0, 1, device), ObjectiveConfig()

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(gare.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def step() -> None:
        compute_gradients(gare, batch, objective, alone, encode=encode, chunk_size=chunk_size)
        update()

    def bare_step() -> None:
        text, video = encode(batch)
        weights_VF = mean_weights(video.mask_VF, mask_frames=True, dtype=torch.float32)
        mean_VD = weighted_mean(video.frames_VFD, weights_VF)
        scores_TV = F.normalize(text.text_TD, dim=-1) @ F.normalize(mean_VD, dim=-1).mT
        symmetric_infonce(scores_TV, gare.logit_scale).backward()
        update()

    bare_ms, bare_memory = _measure(bare_step, device)
    step_ms, memory = _measure(step, device)
    tflop = 3 * (_tower_tflop(gare, batch) + _psi_tflop(gare, batch_size))
    peak = PEAK_TFLOPS.get(describe_device(device))
    return TrainBenchmark(
        batch_size=batch_size,
        frames=frames,
        backbone=model.backbone.family,
        device=describe_device(device),
        torch=torch.__version__,
        step_ms=step_ms,
        bare_ms=bare_ms,
        step_over_bare=step_ms / bare_ms,
        peak_memory_gb=memory,
        bare_memory_gb=bare_memory,
        tflop_per_step=tflop,
        model_flop_utilisation=None if peak is None else 1000 * tflop / step_ms / peak,
        pairs_per_second=1000 * batch_size / step_ms,
    )


def _measure(function: object, device: torch.device) -> tuple[float, float]:
    assert callable(function)
    function()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    milliseconds = median_ms(function, device, seconds=4.0)
    memory = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else 0.0
    return milliseconds, memory


def _random_batch(model: GARE, batch_size: int, frames: int, device: torch.device) -> PairBatch:
    size, words = model.backbone.image_format.size, model.backbone.config.max_words
    token_ids_TW = torch.randint(1, 400, (batch_size, words), device=device)
    if model.config.backbone.family == "clip":
        token_ids_TW[:, -1] = 49_407
    return PairBatch(
        token_ids_TW,
        torch.ones_like(token_ids_TW, dtype=torch.bool),
        torch.randint(256, (batch_size, frames, 3, size, size), dtype=torch.uint8, device=device),
        torch.ones(batch_size, frames, dtype=torch.bool, device=device),
        torch.arange(batch_size, device=device),
    )


def _tower_tflop(model: GARE, batch: PairBatch) -> float:
    """Forward operations of the towers, counted on one pair and multiplied."""
    from torch.utils.flop_counter import FlopCounterMode

    one = batch[:1]
    was_compiled = (
        model.backbone.__dict__.pop("image_features", None),
        model.backbone.__dict__.pop("encode_text", None),
    )
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.text_features(one.token_ids_TW, one.mask_TW)
        model.video_features(one.frames.float(), one.mask_VF)
    for name, function in zip(("image_features", "encode_text"), was_compiled, strict=True):
        if function is not None:
            setattr(model.backbone, name, function)
    total: int = counter.get_total_flops()
    return len(batch) * total / 1e12


def _psi_tflop(model: GARE, batch_size: int) -> float:
    return 0.0 if model.increment_net is None else batch_size**2 * 8 * model.dim**2 / 1e12
